"""Mathematics: generated arithmetic, and data sets graded by math-verify."""
