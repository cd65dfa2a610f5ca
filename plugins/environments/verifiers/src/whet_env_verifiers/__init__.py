"""Environments of verifiers: tasksets with their rubrics."""
