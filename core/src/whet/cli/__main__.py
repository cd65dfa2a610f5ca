"""`python -m whet.cli` is the command `whet`."""

from whet.cli import main

main()
