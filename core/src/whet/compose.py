"""Build the parts of a run from its plan, and run it."""
