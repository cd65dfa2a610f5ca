"""Tools: a calculator that is called over two turns."""
