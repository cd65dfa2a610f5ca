"""What runs inside sandboxes."""
