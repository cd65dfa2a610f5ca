"""The command line. Commands import what they need when they run, so that `whet --help` answers at once."""

from whet.cli.app import main

__all__ = ["main"]
