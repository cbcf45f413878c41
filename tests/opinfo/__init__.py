"""torch's own samples of its operations (OpInfo), run on shards and compared with one process."""
