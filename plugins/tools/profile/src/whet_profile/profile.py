"""The driver's part of the profiler: it has the workers of the chosen roles built inside of a tracer."""

from collections.abc import Generator, Mapping
from typing import Any, cast

from attrs import asdict, frozen

from whet import hookimpl
from whet.errors import ConfigError
from whet.interfaces.logger import RunInfo
from whet.interfaces.workers import WorkerGroup, Workers
from whet_profile.config import ProfileConfig


class Profile:
    """The hooks of a run that is traced."""

    def __init__(self, config: ProfileConfig, run: RunInfo) -> None:
        self._config, self._folder = config, run.folder / "profile"

    @hookimpl(wrapper=True)
    def whet_worker_group(self, role: str) -> Generator[None, WorkerGroup, WorkerGroup]:
        """Return the worker group of a role, traced if the role is chosen. Raises `ConfigError` if no rank would be."""
        group = yield
        if role not in self._config.roles:
            return group
        if self._config.ranks and min(self._config.ranks) >= group.size:
            raise ConfigError(
                f"the hook `profile` has ranks {self._config.ranks}, and {role} has {group.size}; wanted one below it"
            )
        return cast(WorkerGroup, TracedGroup(group, {"folder": str(self._folder), **asdict(self._config)}))


@frozen
class TracedGroup:
    """A worker group whose workers are built inside of a tracer. In all else it is the group."""

    group: WorkerGroup
    settings: Mapping[str, Any]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.group, name)

    def spawn(self, target: str, arguments: Mapping[str, Any]) -> Workers:
        """Start the workers. Each worker process calls `whet_profile.worker.traced`."""
        inner = {"target": target, "arguments": dict(arguments), "settings": dict(self.settings)}
        return self.group.spawn("whet_profile.worker:traced", inner)
