"""Tensors of workers on their way: between devices and host memory."""
