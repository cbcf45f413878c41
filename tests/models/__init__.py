"""Public models, unmodified, on shards, compared with one process."""
