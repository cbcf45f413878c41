"""The command line's own parts: arguments, tables, and what the commands compute. Not for import by users."""
