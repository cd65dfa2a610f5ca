"""Processes with limits, in which code may read what a model wrote."""
