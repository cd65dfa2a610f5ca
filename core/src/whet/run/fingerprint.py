"""What makes a run this run: a resume that would mix two of them is refused with the difference shown."""

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
    from whet.data.offline import OfflineData
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
"""Sections that decide what a run computes; the others say where it runs and who watches."""

SAMPLED_TASKS = 64


def run_fingerprint(
    config: "Config",
    model: "ModelInfo",
    data: "OfflineData | None",
    routes: "Sequence[Route]",
    models: "Mapping[str, ModelInfo] | None" = None,
) -> dict[str, Any]:
    """Collect what decides a run's numbers: config, model files (`models` are those of roles), data files and tasks."""
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
    """Return what identifies a path, or each of a mapping: where files lie may change.

    Of a folder it is what makes it a model. What is read from others is hashed as data or tasks. Names on a hub are
    kept.
    """
    if isinstance(path, Mapping):
        return {key: _held(item) for key, item in path.items()}
    if not path or not (found := Path(path).expanduser()).exists():
        return path
    return fingerprint(found) if found.is_dir() else None


def _tasks(route: "Route") -> str:
    """Hash the number of tasks and a sample spread evenly over them: generated splits may be endless."""
    tasks = route.tasks()
    positions = sorted({i * len(tasks) // SAMPLED_TASKS for i in range(SAMPLED_TASKS)})
    return _hash(repr((len(tasks), [(tasks[i].prompt, sorted(tasks[i].data.items())) for i in positions])))


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def versions_of(interpreters: "Mapping[str, Interpreter]") -> dict[str, Any]:
    """List the versions that a run stands on, and under `roles` those of roles that have a Python of their own."""
    roles = {role: {"interpreter": found.executable, **found.versions} for role, found in interpreters.items()}
    return {**versions(), **({"roles": roles} if roles else {})}


def _without(section: Any, keys: tuple[str, ...]) -> Any:
    return {k: v for k, v in section.items() if k not in keys} if isinstance(section, Mapping) else section
