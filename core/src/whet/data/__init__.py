"""Messages, the ragged batch, metrics, derived randomness, and files."""
