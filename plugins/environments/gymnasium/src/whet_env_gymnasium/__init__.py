"""Environments of Gymnasium, played as text."""
