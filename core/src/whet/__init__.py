"""whet fine-tunes language models: a thin core that composes plugins from one YAML file.

Importing this package loads nothing heavy; each name below is imported when it is first used. A plugin's author needs
little else: `import whet`, then `whet.Component`, `whet.hookimpl` and the names of what the plugin offers.
"""

import sys

TYPE_CHECKING = False  # that of `typing`, whose import takes as long as all else that a command does before it starts
if TYPE_CHECKING:
    import pluggy

    from whet.component import (
        AdvantagesFacts,
        AlgorithmFacts,
        BackendFacts,
        Component,
        EnvironmentFacts,
        FilterFacts,
        GeneratorFacts,
        LossFacts,
        MemoryTerm,
        Problem,
        RoleNeed,
        Selection,
    )
    from whet.config.bounds import between
    from whet.config.sections import Config, selection
    from whet.data.batch import Batch
    from whet.data.messages import Message
    from whet.data.metrics import Metric
    from whet.data.model_info import ModelInfo
    from whet.data.records import Completion, Request, Task
    from whet.errors import ConfigError, ContextFull, DataError, WhetError
    from whet.interfaces.algorithm import Algorithm, OfflineParts, OnlineParts
    from whet.interfaces.backend import Backend
    from whet.interfaces.environment import Environment, Model, Responder, SingleTurn
    from whet.interfaces.generator import Generator
    from whet.interfaces.logger import Logger, RunInfo
    from whet.interfaces.loss import Loss, LossResult
    from whet.run.compose import open

    hookimpl = pluggy.HookimplMarker("whet")
    """Mark a function of a plugin's `hooks.py` as an implementation of the hook of that name."""
    __version__: str
    """The version of core."""


class _PathsOfBefore:
    """Finds modules by their paths of earlier versions."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> object:
        """Return how a module that nothing else has found is imported; None: it is not whet's."""
        if not name.startswith("whet."):
            return None
        from whet.moved import find

        return find(name)


sys.meta_path.append(_PathsOfBefore)  # type: ignore[arg-type]

__all__ = [
    "AdvantagesFacts", "Algorithm", "AlgorithmFacts", "Backend", "BackendFacts", "Batch", "Completion", "Component",
    "Config", "ConfigError", "ContextFull", "DataError", "Environment", "EnvironmentFacts", "FilterFacts", "Generator",
    "GeneratorFacts", "Logger", "Loss", "LossFacts", "LossResult", "MemoryTerm", "Message", "Metric", "Model",
    "ModelInfo", "OfflineParts", "OnlineParts", "Problem", "Request", "Responder", "RoleNeed", "RunInfo", "Selection",
    "SingleTurn", "Task", "WhetError", "__version__", "between", "hookimpl", "open", "selection",
]  # fmt: skip
_HOMES = {
    "component": (
        "Component", "MemoryTerm", "Problem", "RoleNeed", "Selection", "AdvantagesFacts", "AlgorithmFacts",
        "BackendFacts", "EnvironmentFacts", "FilterFacts", "GeneratorFacts", "LossFacts",
    ),
    "config.bounds": ("between",),
    "config.sections": ("Config", "selection"),
    "data.batch": ("Batch",),
    "data.messages": ("Message",),
    "data.metrics": ("Metric",),
    "data.model_info": ("ModelInfo",),
    "data.records": ("Completion", "Request", "Task"),
    "errors": ("ConfigError", "ContextFull", "DataError", "WhetError"),
    "interfaces.algorithm": ("Algorithm", "OfflineParts", "OnlineParts"),
    "interfaces.backend": ("Backend",),
    "interfaces.environment": ("Environment", "Model", "Responder", "SingleTurn"),
    "interfaces.generator": ("Generator",),
    "interfaces.logger": ("Logger", "RunInfo"),
    "interfaces.loss": ("Loss", "LossResult"),
    "run.compose": ("open",),
}  # fmt: skip
"""The module of each name, without the leading `whet.`."""


def __getattr__(name: str) -> object:
    if name == "hookimpl":
        import pluggy

        return pluggy.HookimplMarker("whet")
    if name == "__version__":
        from whet.component import CORE_VERSION

        return CORE_VERSION
    for home, names in _HOMES.items():
        if name in names:
            from importlib import import_module

            return getattr(import_module(f"whet.{home}"), name)
    raise AttributeError(f"module 'whet' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
