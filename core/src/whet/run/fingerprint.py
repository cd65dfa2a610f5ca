"""The fingerprint of a run: everything that decides its numbers. Another run is refused, and the error shows why."""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whet.config.structure import unstructure
from whet.data.model_info import fingerprint
from whet.runtime.interpreters import versions

if TYPE_CHECKING:
    from whet.config.sections import Config
    from whet.data.model_info import ModelInfo
    from whet.interfaces.data import OfflineData
    from whet.rollout.routing import Route
    from whet.runtime.interpreters import Interpreter

FREE = {
    "run": (
        "folder",
        "steps",
        "epochs",
        "save_every",
        "keep",
        "resume",
        "export",
        "allow_changed",
        "private_records",
    ),
    "rollout": (
        "retries",
        "infrastructure_retries",
        "max_failed_groups",
        "max_infrastructure_groups",
        "max_filtered_groups",
        "record",
    ),
    "model": ("path", "revision"),
    "data": ("train", "validation"),
}
"""Keys of each section that may change between the run attempts of a run."""
SECTIONS = ("run", "model", "algorithm", "backend", "generator", "rollout", "environments", "data")
"""Sections that decide the numbers of a run. The others decide where it runs and how it is observed."""

SAMPLED_TASKS = 64


def run_fingerprint(
    config: "Config",
    model: "ModelInfo",
    data: "OfflineData | None",
    routes: "Sequence[Route]",
    models: "Mapping[str, ModelInfo] | None" = None,
) -> dict[str, Any]:
    """Return everything that decides the numbers: config, model files (`models`: of roles), data files and tasks."""
    plain = unstructure(config, path=_held)
    chosen = {
        name: _without(plain[name], FREE.get(name, ())) for name in SECTIONS if plain.get(name) not in (None, [], {})
    }
    if plain["roles"]:
        chosen["roles"] = {
            name: {**role, "model": _without(role["model"], FREE["model"])} for name, role in plain["roles"].items()
        }
    files: dict[str, Any] = {"model files": fingerprint(model.path)}
    if config.model.chat_template:
        files["model files"]["chat template"] = _hash(Path(config.model.chat_template).read_text(encoding="utf-8"))
    for name, of_role in (models or {}).items():
        files[f"model files of {name}"] = fingerprint(of_role.path)
    if data is not None:
        files["data files"] = data.fingerprint()
    if routes:
        files["tasks"] = {f"{route.name} ({route.split})": _tasks(route) for route in routes}
    return {**chosen, **files}


def _held(path: Any) -> Any:
    """Return what identifies a path, or each path of a mapping. The location of files may change.

    For a folder: the fingerprint of its model. For a file: None, because its content is hashed as data or tasks. A name
    on the hub is returned as it is.
    """
    if isinstance(path, Mapping):
        return {key: _held(item) for key, item in path.items()}
    if not path or not (found := Path(path).expanduser()).exists():
        return path
    return fingerprint(found) if found.is_dir() else None


def _tasks(route: "Route") -> str:
    """Return a hash of the number of tasks and of an evenly spaced sample, because generated splits may be endless."""
    tasks = route.tasks()
    positions = sorted({i * len(tasks) // SAMPLED_TASKS for i in range(SAMPLED_TASKS)})
    return _hash(repr((len(tasks), [(tasks[i].prompt, sorted(tasks[i].data.items())) for i in positions])))


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def versions_of(interpreters: "Mapping[str, Interpreter]") -> dict[str, Any]:
    """Return the versions of the packages of a run; under `roles`, the versions of roles with their own Python."""
    roles = {role: {"interpreter": found.executable, **found.versions} for role, found in interpreters.items()}
    return {**versions(), **({"roles": roles} if roles else {})}


def _without(section: Any, keys: tuple[str, ...]) -> Any:
    return {k: v for k, v in section.items() if k not in keys} if isinstance(section, Mapping) else section
