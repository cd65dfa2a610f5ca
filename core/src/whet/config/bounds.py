"""Bounds of the numbers in a config. Every number of core and of the plugins has a lower and an upper bound.

A bound is a validator of attrs on the field, so that the reference pages show it. The upper bounds are far above
what anybody trains with. They refuse a number that was mistyped, or that no clock, array or optimizer can take. nan and
infinity are refused when the config is structured. A field whose metadata has `infinite: True` takes an infinity where
its validator has no bound: `inf` without an upper one, `-inf` without a lower one.
"""

from typing import Any

from attrs.validators import and_, ge, gt, le, lt

STEPS = 1_000_000_000
"""Steps of a run, and steps between two events."""
TOKENS = 100_000_000
"""Tokens of a sequence, of a completion or of a micro-batch."""
RECORDS = 1_000_000_000
"""Records of a file and tasks of an environment."""
BATCH = 10_000_000
"""Prompts, records, groups or minibatches of one step."""
GROUP = 65_536
"""Samples of one task."""
PROCESSES = 16_384
"""Worker processes, GPUs or threads of one role."""
RETRIES = 1_000_000
"""Retries, restarts, and failures in a row."""
BYTES = 1 << 50
"""Bytes of a file or of a message."""
GIB = 1_048_576.0
"""GiB of memory."""
SECONDS = 1_000_000.0
"""Seconds of a deadline: eleven days. The limit of sockets and polls is 25 days."""
SEED = (1 << 63) - 1
"""Seeds."""
FACTOR = 1.0e6
"""Weights, scales, clips and clamps."""


def between(least: float, most: float) -> Any:
    """Return a validator that takes numbers from `least` to `most`, both included."""
    return and_(ge(least), le(most))


def above(bound: float, most: float) -> Any:
    """Return a validator that takes numbers above `bound`, up to `most`."""
    return and_(gt(bound), le(most))


def below(least: float, bound: float) -> Any:
    """Return a validator that takes numbers from `least`, below `bound`."""
    return and_(ge(least), lt(bound))
