"""An environment in which the model writes a word backwards."""
