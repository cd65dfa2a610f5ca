"""Conversations with a simulated user."""
