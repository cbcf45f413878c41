"""Node sets and the edges between them, as graph models of weather build them: generated, pure, without torch."""
