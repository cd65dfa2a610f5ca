"""The config of the environment `reverse`."""

from attrs import field, frozen, validators


@frozen
class ReverseConfig:
    """Words to write backwards."""

    letters: int = field(default=5, validator=validators.in_(range(2, 17)))
    """Letters of each word, 2 to 16."""
    words: int = field(default=2000, validator=validators.ge(1))
    """Words in each split."""
