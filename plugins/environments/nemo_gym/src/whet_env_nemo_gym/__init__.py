"""Resources servers and agent servers of NeMo Gym."""
