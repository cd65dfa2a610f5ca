"""What is wrong with an fsdp2 section by itself, beyond the bounds of its fields. Imports no torch."""

from collections.abc import Iterator

import attrs

from whet.component import Problem
from whet_fsdp2.config import Fsdp2Config, MuonConfig, OptimizerConfig
from whet_training import schedule, weight_groups


def problems(config: Fsdp2Config, path: str) -> Iterator[Problem]:
    """Yield the problems of a section that stands at `path`."""
    yield from schedule.problems(config.schedule, f"{path}.schedule")
    yield from _optimizer(config.optimizer, f"{path}.optimizer")


def _optimizer(optimizer: OptimizerConfig, path: str) -> Iterator[Problem]:
    if optimizer.kind != "muon":
        for name in _set(optimizer.muon, MuonConfig()):
            words = (
                f"only `kind: muon` has it, and the kind is {optimizer.kind}; set {path}.kind: muon, or leave it out"
            )
            yield Problem(f"{path}.muon.{name}", words)
    yield from weight_groups.problems(optimizer.groups, f"{path}.groups")


def _set(config: attrs.AttrsInstance, default: attrs.AttrsInstance) -> list[str]:
    """Return the fields whose values are not the defaults."""
    return [name for name in attrs.fields_dict(type(config)) if getattr(config, name) != getattr(default, name)]
