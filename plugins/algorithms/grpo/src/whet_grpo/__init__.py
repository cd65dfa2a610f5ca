"""Group relative policy optimisation."""
