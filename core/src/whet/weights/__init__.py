"""Weight sync from backends to generators: one module per transport."""
