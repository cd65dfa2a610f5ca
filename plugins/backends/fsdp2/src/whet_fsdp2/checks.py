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
    if config.compile:
        for other, given, change in _uncompiled(config):
            yield Problem(f"{path}.compile", f"does not go with {other}: {given}; {change}, or leave it out")


def _uncompiled(config: Fsdp2Config) -> Iterator[tuple[str, object, str]]:
    """Yield the keys that compiled layers do not go with, each with its value and what to change."""
    if config.parallel.tensor > 1:
        yield "parallel.tensor", config.parallel.tensor, "set it to 1"
    if config.lora is not None:
        yield "lora", "its layers look their adapters up by name", "drop it"
    if config.gradient_checkpointing == "selective":
        yield "gradient_checkpointing", "selective", "set it to true or false"
    if config.kernels:
        yield "kernels", list(config.kernels), "drop them"


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
