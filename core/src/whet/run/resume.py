"""Checks that a run folder holds the same run, and finds after which step the run continues and how many it has.

The fingerprint of a run has everything that decides its numbers:

inputs of a run -> fingerprint -> differs from that of the folder or its checkpoint: refused
-> else rewind the folder to the checkpoint, and write the config, the versions and the plan of the run
"""

import hashlib
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import frozen

from whet.config.document import to_text
from whet.config.renamed import renewed
from whet.config.structure import absolute, unstructure
from whet.data import model_info
from whet.errors import CheckpointError
from whet.plugins.features import reader
from whet.run import checkpoint
from whet.runtime.interpreters import versions

if TYPE_CHECKING:
    from whet.config.sections import Config, RunSection
    from whet.data.model_info import ModelInfo
    from whet.interfaces.data import OfflineData
    from whet.plan.prepare import Prepared
    from whet.rollout.routing import Route
    from whet.run.checkpoint import Checkpoint
    from whet.run.run_folder import RunFolder

FREE = {
    "run": (
        "folder", "steps", "epochs", "save_every", "keep", "keep_best", "save_in_background", "time_limit", "resume",
        "export", "allow_changed", "private_records",
    ),
    "rollout": (
        "retries", "infrastructure_retries", "max_failed_groups", "max_infrastructure_groups", "max_filtered_groups",
        "record",
    ),
    "model": ("path", "revision"),
    "data": ("train", "validation", "max_too_long"),
}  # fmt: skip
"""Keys of each section that may change between the run attempts of a run."""
SECTIONS = ("run", "model", "algorithm", "backend", "generator", "rollout", "environments", "data")
"""Sections that decide the numbers of a run. The others decide where it runs and how it is observed."""

SAMPLED_TASKS = 64


Status = Callable[[str], None]


@frozen
class Opened:
    """The state of a run folder that was opened at its last checkpoint."""

    saved: "Checkpoint | None"
    """The last checkpoint; None: the run begins."""
    total: int
    """Steps of the run in all."""
    fingerprint: Mapping[str, Any]
    """The fingerprint of the run, which must stay the same. It is saved with each checkpoint."""

    @property
    def done(self) -> int:
        """Return how many steps are done."""
        return self.saved.step if self.saved else 0


def open_run(
    prepared: "Prepared", folder: "RunFolder", data: "OfflineData | None", routes: "Sequence[Route]", status: Status,
    again: bool = False,
) -> Opened:  # fmt: skip
    """Rewind a run folder to its last checkpoint, and write the config, the versions and the plan of the run.

    Raises `CheckpointError` if the run of the folder must not be continued; then nothing is changed. `again`: this
    process has opened the folder before.
    """
    config = prepared.config
    fingerprint = run_fingerprint(config, prepared.model, data, routes, prepared.models)
    if (held := held_fingerprint(folder, "auto" if again else config.run.resume)) is not None:
        refuse_another(f"{folder.path} holds", held, fingerprint, config)
    saved = checkpoint.latest(folder)
    if saved:
        refuse_another(f"{saved.folder} was saved by", saved.state.get("identity"), fingerprint, config)
    elif any(row.get("event") == "saved" for row in folder.events()):
        words = "which its journal says were saved; bring them back, or choose another run.folder to begin anew"
        raise CheckpointError(f"{folder.path} lacks its checkpoints, {words}")
    done, state = (saved.step, saved.state) if saved else (0, {})
    # after the check for another run, because it may take minutes
    total = count_steps(
        config.run, prepared.roles.algorithm.records_per_step, data, done, state.get("data", {}), status
    )
    folder.rewind(saved.step if saved else -1)
    shutil.rmtree(folder.scratch, ignore_errors=True)
    folder.scratch.mkdir(parents=True, exist_ok=True)
    folder.write_text("config.yaml", to_text(unstructure(config, path=absolute)))
    folder.write_json("identity.json", fingerprint)
    pythons = {role: {"interpreter": p.executable, **p.versions} for role, p in prepared.interpreters.items()}
    folder.write_json("versions.json", {**versions(), **({"roles": pythons} if pythons else {})})
    folder.write_json("plan.json", prepared.plan.to_dict())
    return Opened(saved, total, fingerprint)


def held_fingerprint(folder: "RunFolder", resume: str = "auto") -> Any:
    """Return the fingerprint of the run that a folder holds; None: it holds none.

    Raises `CheckpointError` if `run.resume` does not allow the result.
    """
    held = folder.read_json("identity.json") if folder.has_steps() else None
    if held is not None and resume == "never":
        raise CheckpointError(f"{folder.path} holds a run already; choose another run.folder, or run.resume: auto")
    if held is None and resume == "must":
        raise CheckpointError(f"run.resume is `must`, but {folder.path} holds no run")
    return held


def refuse_another(found: str, before: Any, fingerprint: Mapping[str, Any], config: "Config") -> None:
    """Raise `CheckpointError` if a fingerprint differs from the fingerprint of an earlier run or checkpoint."""
    if different := differences(before, fingerprint, config):
        raise CheckpointError(
            f"{found} another run; choose another run.folder, or list what may differ in run.allow_changed:\n"
            + "\n".join(f"  {line}" for line in different)
        )


def differences(before: Any, fingerprint: Mapping[str, Any], config: "Config | None") -> list[str]:
    """Return the differences of a fingerprint from an earlier one, one line each. `config` says what may differ.

    Renamed keys, new keys with their defaults, and the keys in `run.allow_changed` do not count as a difference. Nor
    does `parallel`: how ranks share the work may change, as their number may.
    """
    free = ["backend", *(f"roles.{name}" for name in config.roles)] if config else []
    allowed = [*(config.run.allow_changed if config else ()), *(f"{section}.parallel" for section in free)]
    return checkpoint.differences(renewed(before, config, allowed), fingerprint, allowed)


def count_steps(
    run: "RunSection", size: int | None, data: "OfflineData | None", done: int, position: Mapping[str, int],
    status: Status,
) -> int:  # fmt: skip
    """Return the total number of steps of the run, and set the data to continue after the finished steps.

    `size` is the number of records of a step. The steps of epochs are known once the data has been read and tokenised.
    """
    if data is not None:
        data.go_on(done, position)
    if run.epochs is None or data is None or size is None:
        return run.steps or 0
    total = data.prepare().steps(size)
    status(f"{run.epochs:g} epochs are {total:,} steps of {size} records")
    return total


def nothing_left(
    run: "RunSection", size: int | None, folder: "RunFolder", done: int, data: "OfflineData | None"
) -> bool:
    """Return whether the run has finished all its steps. Data is read only if no checkpoint has its position."""
    if run.epochs is None or data is None:
        return done >= (run.steps or 0)
    position = checkpoint.position(folder, done)
    if position and "epoch" in position and not run.allow_changed:
        return position["records"] >= reader().records(run.epochs, position["epoch"])
    return done >= count_steps(run, size, data, done, position, lambda status: None)


def run_fingerprint(
    config: "Config", model: "ModelInfo", data: "OfflineData | None", routes: "Sequence[Route]",
    models: "Mapping[str, ModelInfo]",
) -> dict[str, Any]:  # fmt: skip
    """Return everything that decides the numbers: config, model files (`models`: of roles), data files and tasks."""
    plain = unstructure(config, path=_held)
    chosen = {
        name: _without(plain[name], FREE.get(name, ())) for name in SECTIONS if plain.get(name) not in (None, [], {})
    }
    if plain["roles"]:
        chosen["roles"] = {
            name: {**role, "model": _without(role["model"], FREE["model"])} for name, role in plain["roles"].items()
        }
    files: dict[str, Any] = {"model files": model_info.fingerprint(model.path)}
    if config.model.chat_template:
        files["model files"]["chat template"] = _hash(Path(config.model.chat_template).read_text(encoding="utf-8"))
    for name, of_role in models.items():
        files[f"model files of {name}"] = model_info.fingerprint(of_role.path)
    if data is not None:
        files["data files"] = data.fingerprint()
    if routes:
        files["tasks"] = {f"{route.name} ({route.split})": _tasks(route) for route in routes}
    return {**chosen, **files}


def _held(path: Any) -> Any:
    """Return the identity of the files at a path, or at each path of a mapping. The location of files may change.

    For a folder: the fingerprint of its model. For a file: None, because its content is hashed as data or tasks. A name
    on the hub is returned as it is.
    """
    if isinstance(path, Mapping):
        return {key: _held(item) for key, item in path.items()}
    if not path or not (found := Path(path).expanduser()).exists():
        return path
    return model_info.fingerprint(found) if found.is_dir() else None


def _tasks(route: "Route") -> str:
    """Return a hash of the number of tasks and of an evenly spaced sample, because generated splits may be endless."""
    tasks = route.tasks()
    positions = sorted({i * len(tasks) // SAMPLED_TASKS for i in range(SAMPLED_TASKS)})
    found = [route.task(tasks, i) for i in positions]
    pairs = [(one.prompt, _ordered(sorted(one.data.items(), key=lambda item: str(item[0])))) for one in found]
    # An object without a `repr` of its own counts by its type: its address differs between processes.
    return _hash(re.sub(r" at 0x[0-9a-f]+>", ">", repr((len(tasks), pairs))))


def _ordered(value: Any) -> Any:
    """Return data with lists in place of sets, whose order differs between processes."""
    if isinstance(value, Mapping):
        return {key: _ordered(item) for key, item in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(map(_ordered, value), key=repr)
    return type(value)(map(_ordered, value)) if type(value) in (list, tuple) else value


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _without(section: Any, keys: tuple[str, ...]) -> Any:
    return {k: v for k, v in section.items() if k not in keys} if isinstance(section, Mapping) else section
