"""``DataLoader``: sampling, reading ahead, worker processes, and the other ranks under watch."""
