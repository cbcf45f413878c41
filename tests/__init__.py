"""The tests, a package: so the ``tests`` that others install (mace-torch does) does not hide it."""
