"""What every layer shares: bounds, index maps, types, checks. No I/O and no torch."""
