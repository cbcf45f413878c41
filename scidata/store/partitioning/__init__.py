"""``scidata.partition``: raw files in, a store out."""
