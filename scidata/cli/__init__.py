"""The ``scidata`` command. Arguments and printing here, computing in ``commands``; not for import by users."""
