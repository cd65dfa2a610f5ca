"""Games that a model plays over several turns."""
