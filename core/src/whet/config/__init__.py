"""Strict, typed configuration: load YAML, structure it, report all errors at once, and explain every key."""
