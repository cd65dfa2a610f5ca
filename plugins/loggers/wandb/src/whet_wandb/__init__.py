"""A run of whet as a run of Weights & Biases, online or offline."""
