"""The command `whet demo`: trains a small model that starts from nothing."""
