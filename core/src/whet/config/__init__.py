"""Strict, typed configuration: load YAML, structure it with all errors at once, explain it."""
