"""Tensors of workers on their way: weight sync between trainer and generator, offload to host memory."""
