"""The hooks of a plugin that offers one of almost everything. Fixtures install its source; see `offers`."""

from attrs import field, frozen, validators

from whet import hookimpl
from whet.component import Component, Selection
from whet.config.sections import selection


@frozen
class Clip:
    """A clipped loss."""

    low: float = field(default=0.2, validator=validators.ge(0))
    """How far down."""
    high: float = field(default=0.2, validator=validators.ge(0))
    """How far up."""


@frozen
class Loop:
    """A loop."""

    size: int = 8
    """How many."""
    loss: Selection = selection("losses", default="clip")
    """What is minimised."""
    filters: list[Selection] = field(factory=list, metadata={"kind": "filters", "default": None})
    """What is dropped."""


@frozen
class Optimizer:
    """An optimizer."""

    lr: float = field(default=1e-6, validator=validators.gt(0))
    """Learning rate."""


@frozen
class Trainer:
    """A trainer."""

    optimizer: Optimizer = field(factory=Optimizer)
    """Takes the steps."""


@frozen
class Nothing:
    """No keys."""


@frozen
class Sums:
    """Sums."""

    terms: int = 2
    """Numbers in a sum."""


@hookimpl
def whet_losses():
    return [Component("clip", Clip, __name__ + ":made")]


@hookimpl
def whet_algorithms():
    return [Component("loop", Loop, __name__ + ":made")]


@hookimpl
def whet_backends():
    return [Component("trainer", Trainer, __name__ + ":made")]


@hookimpl
def whet_filters():
    return [Component("not-flat", Nothing, __name__ + ":made")]


@hookimpl
def whet_loggers():
    return [Component("screen", Nothing, __name__ + ":made"), Component("paper", Nothing, __name__ + ":made")]


@hookimpl
def whet_environments():
    return [Component("sums", Sums, __name__ + ":made")]


def made(config, *args):
    return (config, *args)
