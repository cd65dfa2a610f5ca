"""A run: what is composed for it, its steps, its checkpoints and its folder."""
