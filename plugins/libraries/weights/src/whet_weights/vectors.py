"""Which weights are vectors for an optimizer, by their names: not decayed, and not orthogonalized. Needs no torch.

Some vectors have two dimensions and more: a bias for each expert [E, out], a norm for each head [heads, size], the
decay rates of a state space [channels, states].
"""

STATE_SPACE = ("A_log", "D", "time_mix_key", "time_mix_receptance", "time_mix_value")
"""Names of numbers for each channel of a state-space model. `dt_bias` and the like end in `bias`."""


def is_vector(name: str, ndim: int) -> bool:
    """Return whether a weight of `ndim` dimensions is a vector or a stack of vectors, by its name in `transformers`."""
    owner, _, own = name.rpartition(".")
    norm = own == "weight" and "norm" in owner.rpartition(".")[2].lower()
    return ndim < 2 or own.endswith("bias") or own in STATE_SPACE or norm
