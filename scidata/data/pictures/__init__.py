"""Pictures of samples and of how they are cut. Needs matplotlib (extra ``plot``), imported when a picture is drawn."""
