"""The ``scidata`` command. Arguments and printing here, what is computed in ``commands``; not for import by users."""
