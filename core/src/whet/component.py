"""What a plugin says about the things it offers: `Component`, and the `Facts` that planning reads."""

import importlib
from typing import Any, Literal

from attrs import field, frozen

from whet.errors import PluginError

Kind = Literal["backends", "generators", "losses", "environments", "loggers", "algorithms", "advantages", "filters"]
KINDS: tuple[Kind, ...] = (
    "backends", "generators", "losses", "environments", "loggers", "algorithms", "advantages", "filters",
)  # fmt: skip


@frozen
class Component:
    """One thing that a plugin offers. Making one imports nothing heavy."""

    name: str
    """The word after `use:`; lower-case with dashes."""
    config: type
    """The attrs class of its section of the config; every field documented by a string beneath it."""
    target: str
    """`package.module:Class`, imported only in the process that runs it, and called with the config first."""
    facts: str = ""
    """`package.module:function`, called with (config, model) without torch, returning `Facts`. Empty: no facts."""


@frozen
class Facts:
    """All that planning knows of a component. What fits what is derived from facts, never listed by name."""

    inputs: frozenset[str] = frozenset()
    """Of an algorithm: what it feeds on, of `rollouts` and `data`."""
    data_format: str = ""
    """Of an algorithm that feeds on `data`: the records it reads, e.g. `conversations` or `pairs`."""
    outputs_needed: frozenset[str] = frozenset()
    """Of a loss: the model outputs it reads, e.g. `logprobs`, `entropy`."""
    outputs_given: frozenset[str] = frozenset()
    """Of a backend: the model outputs it can compute."""
    columns_read: frozenset[str] = frozenset()
    """Batch columns that a loss or algorithm reads beyond those that are always there."""
    columns_written: frozenset[str] = frozenset()
    """Batch columns that an algorithm adds."""
    transports: tuple[str, ...] = ()
    """Of backends and generators: ways to hand weights over, best first, of `shared`, `shared-memory`, `disk`."""
    ranks: int = 1
    """Of backends and generators: worker processes wanted."""
    group_size: int | None = None
    """Of an algorithm: samples of one task that it compares with each other."""
    groups_per_step: int | None = None
    """Of an algorithm fed by rollouts: groups that one step consumes."""
    memory_bytes: int | None = None
    """Of backends and generators: memory for weights and optimizer, for each rank, as far as it is known."""
    notes: tuple[str, ...] = ()
    """Anything else that `whet check` should print, a sentence each."""


@frozen
class Problem:
    """One thing wrong with a config: where, and what to change."""

    path: str
    """Dotted path into the config, e.g. `rollout.max_tokens`; empty for the whole."""
    message: str

    def __str__(self) -> str:
        return f"{self.path}: {self.message}" if self.path else self.message


@frozen
class Selection:
    """A component chosen by `use:` together with its structured config."""

    kind: Kind
    component: Component
    config: object
    """An instance of `component.config`."""
    distribution: str = ""
    """The distribution or file that offers it."""

    @property
    def name(self) -> str:
        """The word after `use:`."""
        return self.component.name


@frozen
class Spec:
    """A component as it travels to a worker: import paths and builtins, no code and no pickle."""

    target: str
    config_type: str = ""
    """`package.module:Class` of the config; empty when `config` is passed on as it is."""
    config: dict[str, object] = field(factory=dict)


def resolve(target: str) -> Any:
    """Import what `package.module:Name` names. Raises `PluginError` saying what is missing."""
    module, _, name = target.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise PluginError(f"{target!r} cannot be imported: {error}") from error
