"""The contract of an algorithm: a loop that fits on a page."""

from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from whet.parts import Parts


@runtime_checkable
class Algorithm(Protocol):
    """The component's target is called as `target(config)`; `run` owns the optimizer steps."""

    def run(self, parts: "Parts") -> None:
        """Run from `parts.steps`' first step to its last."""
        ...
