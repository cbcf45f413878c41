"""Random programs on shards, held against one process."""
