"""What several algorithms share: the stages of a policy step, and losses with corrections."""
