"""Programs that a model writes, graded by hidden tests."""
