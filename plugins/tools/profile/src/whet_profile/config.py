"""The settings of the profiler."""

from typing import Any

from attrs import field, frozen
from attrs.validators import deep_iterable, min_len

from whet.config.bounds import PROCESSES, STEPS, between

_STEPS: Any = [min_len(1), deep_iterable(between(1, STEPS))]
_RANKS: Any = deep_iterable(between(0, PROCESSES))


@frozen
class ProfileConfig:
    """Traces of chosen steps, in the folder `profile` of the run folder. A step that is traced takes longer."""

    steps: list[int] = field(factory=lambda: [2], validator=_STEPS)
    """The steps to trace. The first step of a run is slower than the others, because it allocates memory.
    A number above the last step has no effect."""
    ranks: list[int] = field(factory=lambda: [0], validator=_RANKS)
    """The ranks to trace; empty: all ranks. Each of the roles needs one of them."""
    roles: list[str] = field(factory=lambda: ["backend"], validator=min_len(1))
    """The roles to trace: `backend` and further models of the section `roles`."""
    shapes: bool = False
    """Whether a trace has the shapes of tensors."""
    stacks: bool = False
    """Whether a trace has the Python lines that called each operation. Such a trace is many times larger."""
    memory: bool = True
    """Whether a trace has allocations. On a GPU, a text file beside each trace has the memory of the GPU, too."""
