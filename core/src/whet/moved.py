"""Import paths of earlier versions that plugins use: each leads to where its module is now, with a warning.

They are kept for one version of core. `whet` asks here only for a module that it does not have.
"""

import importlib
import warnings
from importlib.machinery import ModuleSpec
from types import ModuleType

MOVED = {
    "bounded": "data.bounded",
    "cluster": "runtime",
    "cluster.pool": "runtime.pool",
    "cluster.ports": "runtime.ports",
    "cluster.slices": "interfaces.workers",
    "cluster.wire": "runtime.wire",
    "compose": "run.compose",
    "config.load": "plan.load",
    "corrected": "algorithms.corrected_loss",
    "foreign": "generation.external_engine",
    "hookspecs": "plugins.hookspecs",
    "jobs": "run.jobs",
    "metrics": "data.metrics",
    "model": "data.model_info",
    "offload": "generation.offload",
    "parts": "interfaces.algorithm",
    "prepare": "plan.prepare",
    "randomness": "data.randomness",
    "refit": "weights",
    "refit.handover": "weights.transfer",
    "refit.link": "interfaces.weights",
    "rollout.completions": "generation.completeness",
    "rollout.dispatch": "generation.dispatcher",
    "rollout.replicas": "generation.replicas",
    "run_folder": "data.files",
    "spans": "data.spans",
    "stages": "algorithms.policy_steps",
    "steps": "interfaces.algorithm",
    "undecided": "interfaces.undecided",
    "validation": "algorithms.offline_loop",
}
"""Module of today, by the path of before; both without the leading `whet.`."""


class _Alias:
    """A loader that loads the module of today."""

    def __init__(self, name: str) -> None:
        self._name = name

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the module of today."""
        warnings.warn(f"{spec.name} has moved to {self._name}", DeprecationWarning, stacklevel=2)
        self._module = importlib.import_module(self._name)
        self._spec = self._module.__spec__
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        """Leave the module as it is, with its own name."""
        module.__spec__ = self._spec


def find(name: str) -> ModuleSpec | None:
    """Return how a module of `whet` is imported by a path of before; None where there was none."""
    new = MOVED.get(name.removeprefix("whet."))
    if new is None:
        return None
    return ModuleSpec(name, _Alias(f"whet.{new}"), is_package="." not in new)  # type: ignore[arg-type]
