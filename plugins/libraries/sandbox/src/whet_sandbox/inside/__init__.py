"""Programs that run inside a sandbox. They import the standard library only, and nothing trusts them."""
