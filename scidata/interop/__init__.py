"""Adapters to other packages, each imported only where it is used; a missing one names the extra that brings it."""
