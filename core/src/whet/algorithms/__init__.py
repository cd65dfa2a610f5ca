"""Code shared by several algorithms: the stages of a policy step, and losses with corrections."""
