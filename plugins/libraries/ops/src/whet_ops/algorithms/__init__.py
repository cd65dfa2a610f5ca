"""What algorithms share beyond formulas: loops, the steps between rollouts and loss, config sections, sequences."""
