"""Hand-over of weights from backends to generators: one module per transport."""
