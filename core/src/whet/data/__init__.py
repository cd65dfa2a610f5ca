"""Messages, chat templates, the ragged batch, and readers of data files."""
