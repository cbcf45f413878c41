"""``DataLoader``: sampling, reading ahead, worker processes, and a watch over the other ranks."""
