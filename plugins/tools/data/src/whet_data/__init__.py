"""The command `whet data`: what the data of a config becomes, token by token."""
