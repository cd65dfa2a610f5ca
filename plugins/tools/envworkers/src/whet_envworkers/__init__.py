"""Environments in worker processes, and in Pythons of their own."""
