"""What a first run starts from: the recipes that plugins ship, and small random models."""
