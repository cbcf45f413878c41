"""Adapters to other packages, each imported only if it is used; a missing one names the extra that brings it."""
