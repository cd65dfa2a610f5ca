"""What a first run starts from: the recipes that plugins ship, what their keys mean, and small models."""
