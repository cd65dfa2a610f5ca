"""Ready-made rewards, and the environment that adds them to other ones."""
