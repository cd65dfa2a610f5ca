"""Programs that run inside sandboxes. They import the standard library only, and are sent as text."""
