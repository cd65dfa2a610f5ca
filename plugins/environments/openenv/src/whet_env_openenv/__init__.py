"""Environments of OpenEnv servers."""
