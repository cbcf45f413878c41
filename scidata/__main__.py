"""``python -m scidata``."""

from scidata.cli.app import main

if __name__ == "__main__":
    main()
