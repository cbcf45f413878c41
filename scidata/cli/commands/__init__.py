"""What each command computes; the arguments and the printing lie one folder up."""
