"""torch.func on ShardTensors; each module adds its transforms to the table when it is imported."""
