"""Point files read as they are, without a store: each rank takes a part of the rows."""
