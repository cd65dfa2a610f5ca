"""Episodes, and the stream that decides when groups of episodes are played."""
