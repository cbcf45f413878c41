"""What a store is: the manifest, the arrays and their checksums; opening, writing and verifying it."""
