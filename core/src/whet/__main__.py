"""The command line as `python -m whet`, for where the command `whet` is not on the path."""

from whet.cli import main

if __name__ == "__main__":
    main()
