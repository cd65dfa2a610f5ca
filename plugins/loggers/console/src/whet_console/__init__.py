"""Progress, tables and a summary in the terminal."""
