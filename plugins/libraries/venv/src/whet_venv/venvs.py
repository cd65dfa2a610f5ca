"""Named Python environments for plugins whose engines need one of their own: created, recorded, listed, removed.

A plugin describes its environment in the file `environment.toml` in its package, with a table for each variant:

    [cpu]
    install = ["fast-cpu==0.32.0"]       # requirements beside core and the plugin itself
    constraints = "cpu.txt"              # a file in the same folder
    remove = ["torchvision"]             # dependencies of the others that are uninstalled at the end
"""

import datetime
import fcntl
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote, urlsplit

from attrs import frozen
from packaging.requirements import InvalidRequirement, Requirement

from whet.component import CORE_VERSION
from whet.data.files import disk_errors
from whet.errors import WhetError
from whet.installed import normal
from whet.runtime.interpreters import environments, faults, probe
from whet.runtime.last_words import last_words

Tool = Literal["pip", "uv"]

RECORD = "whet-environment.json"
"""The file that is written last. An environment without this file is incomplete."""
LOG = "install.log"
"""The file that is written first. A folder with neither this file nor a record was made by somebody else."""
INSTALL_SECONDS = 3600.0
"""Seconds that one command may take. An engine is gigabytes to download."""
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]*")
_LIST = """
import json
from importlib import metadata
print(json.dumps({d.name: d.version for d in metadata.distributions() if d.name}))
"""


@frozen
class Recipe:
    """What is installed into an environment, beside core."""

    plugins: tuple[str, ...]
    """Requirements of pip: names, with extras and versions where they are needed, or paths."""
    install: tuple[str, ...] = ()
    """Further requirements of pip."""
    constraints: Path | None = None
    """A constraints file of pip, with versions that were tested together."""
    remove: tuple[str, ...] = ()
    """Distributions that are installed as dependencies and then uninstalled."""


def recipe_of(plugin: str, variant: str = "") -> Recipe:
    """Return the recipe in the `environment.toml` of an installed plugin: the named variant, or the first one."""
    folder = _package(plugin)
    file = folder / "environment.toml" if folder else None
    if file is None or not file.is_file():
        if variant:
            raise WhetError(
                f"{plugin} says nothing of a variant {variant!r}: there is no environment.toml in its package"
            )
        return Recipe((plugin,))
    tables = tomllib.loads(file.read_text(encoding="utf-8"))
    if (variant or next(iter(tables))) not in tables:
        raise WhetError(f"{plugin} has no variant {variant!r} of its environment, only {', '.join(tables)}")
    table = tables[variant or next(iter(tables))]
    if unknown := set(table) - {"install", "constraints", "remove"}:
        raise WhetError(f"{file} has unknown keys: {', '.join(sorted(unknown))}")
    constraints = file.parent / table["constraints"] if "constraints" in table else None
    return Recipe((plugin,), tuple(table.get("install", ())), constraints, tuple(table.get("remove", ())))


def create(
    name: str, recipe: Recipe, *, python: str = "", tool: Tool | None = None, say: Callable[[str], None] = print
) -> dict[str, Any]:
    """Create an environment with this interpreter's version of core, and return its record.

    `python` is the base interpreter, by default this one. `tool` is by default uv where it is installed, else pip. If
    anything fails, the incomplete environment is removed.
    """
    if not _NAME.fullmatch(name):
        raise WhetError(f"{name!r} is no name for an environment; use lower-case letters, digits and dashes")
    if recipe.constraints is not None and not recipe.constraints.is_file():
        raise WhetError(f"there is no file of constraints {str(recipe.constraints)!r}")
    with _alone(name) as folder:
        if (folder / RECORD).exists():
            raise WhetError(
                f"there is an environment {name!r} already, in {folder}; `whet env remove {name}` removes it"
            )
        _refuse_foreign(folder)
        shutil.rmtree(folder, ignore_errors=True)  # the remains of an attempt that was killed
        try:
            return _create(name, folder, recipe, python or sys.executable, tool or _tool(), say)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise


def _create(
    name: str, folder: Path, recipe: Recipe, base: str, tool: Tool, say: Callable[[str], None]
) -> dict[str, Any]:  # fmt: skip
    python, commands = folder / "bin" / "python", list[list[str]]()
    with disk_errors(folder):
        folder.mkdir(parents=True)
        (folder / LOG).touch()
    log = folder / LOG

    def run(*command: str) -> None:
        say(f"{' '.join(command)}\n  (log: {log})")
        commands.append(list(command))
        _run(command, log)

    install, uninstall = {
        "pip": ([str(python), "-m", "pip", "install"], [str(python), "-m", "pip", "uninstall", "-y"]),
        "uv": (["uv", "pip", "install", "--python", str(python)], ["uv", "pip", "uninstall", "--python", str(python)]),
    }[tool]
    run(*(["uv", "venv", "--allow-existing", "--python", base] if tool == "uv" else [base, "-m", "venv"]), str(folder))
    constraints = []
    if recipe.constraints is not None:
        kept = folder / "constraints.txt"
        shutil.copyfile(recipe.constraints, kept)
        constraints = ["-c", str(kept)]
    plugins = [word for plugin in (*recipe.plugins, *libraries_of(recipe.plugins)) for word in as_here(plugin)]
    run(*install, *constraints, *as_here("whet"), *plugins, *recipe.install)
    if recipe.remove:
        run(*uninstall, *recipe.remove)
    wanted = _versions(recipe.plugins)
    found = probe(python, distributions=wanted)
    if words := faults(found, wanted):
        raise WhetError(f"the environment {name!r} does not fit: {'; '.join(words)}")
    told = subprocess.run([str(python), "-c", _LIST], capture_output=True, text=True, check=True)
    held = json.loads(told.stdout.splitlines()[-1])
    record = {
        "name": name, "made": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "python": found.python, "interpreter": str(python), "whet": CORE_VERSION, "plugins": list(recipe.plugins),
        "constraints": str(recipe.constraints or ""), "removed": list(recipe.remove), "made_with": tool,
        "commands": commands, "packages": dict(sorted(held.items(), key=lambda item: normal(item[0]))),
    }  # fmt: skip
    with disk_errors(folder / RECORD):
        partial = folder / f"{RECORD}.partial"
        partial.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        partial.replace(folder / RECORD)
    return record


def listed() -> list[dict[str, Any]]:
    """Return the records of all environments. The record of an incomplete one has a name and a folder only."""
    found = []
    for folder in sorted(path for path in environments().glob("*") if path.is_dir()):
        record = None
        with suppress(OSError, ValueError):  # it is incomplete, or damaged
            record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        found.append({"name": folder.name, **(record if isinstance(record, dict) else {}), "folder": str(folder)})
    return found


def remove(name: str) -> Path:
    """Remove an environment, complete or not, and return the folder that it had."""
    folder = environments() / name
    if not _NAME.fullmatch(name) or not folder.is_dir():
        known = ", ".join(record["name"] for record in listed()) or "none"
        raise WhetError(f"there is no environment {name!r} in {environments()}; there are: {known}")
    with _alone(name), disk_errors(folder):
        _refuse_foreign(folder)
        shutil.rmtree(folder)
    return folder


def is_foreign(folder: Path) -> bool:
    """Return whether a folder holds something and was not made by `create`."""
    ours = any((folder / name).exists() for name in (RECORD, LOG))
    return folder.exists() and not ours and (not folder.is_dir() or any(folder.iterdir()))


def _refuse_foreign(folder: Path) -> None:
    """Raise `WhetError` for a folder that is foreign."""
    if is_foreign(folder):
        raise WhetError(f"{folder} was not made by `whet env create`; choose another name, or move it away")


def as_here(requirement: str) -> list[str]:
    """Return pip's arguments that install core or a plugin from where this interpreter has it: a version or a folder.

    A requirement that is a path, that names a version, or that is not core or a plugin is returned unchanged.
    """
    held = _held(requirement)
    if held is None or (wanted := Requirement(requirement)).specifier or wanted.url:
        return [requirement]
    extras = f"[{','.join(sorted(wanted.extras))}]" if wanted.extras else ""
    source = json.loads(held.read_text("direct_url.json") or "{}")
    url = str(source.get("url", ""))
    if not url.startswith("file:"):
        return [f"{wanted.name}{extras}=={held.version}"]
    path = unquote(urlsplit(url).path) + extras
    return ["-e", path] if source.get("dir_info", {}).get("editable") else [path]


def libraries_of(plugins: Sequence[str]) -> list[str]:
    """Return the further distributions of whet that plugins require, as far as they are installed here."""
    found: dict[str, None] = {}
    waiting = [held for plugin in plugins if (held := _held(plugin)) is not None]
    while waiting:
        for need in map(Requirement, waiting.pop().requires or ()):
            wanted = need.marker is None or need.marker.evaluate({"extra": ""})
            if wanted and need.name not in found and (held := _held(need.name)) and normal(held.name) != "whet":
                found[need.name] = None
                waiting.append(held)
    return list(found)


def _held(requirement: str) -> metadata.Distribution | None:
    """Return the distribution of core, or of a plugin or library of whet, that a requirement names.

    Return None where the requirement names another distribution, or one that is not installed here.
    """
    try:
        held = metadata.distribution(Requirement(requirement).name)
    except (InvalidRequirement, metadata.PackageNotFoundError):
        return None
    ours = normal(held.name) == "whet" or any(point.group.partition(".")[0] == "whet" for point in held.entry_points)
    return held if ours else None


def _versions(plugins: Sequence[str]) -> dict[str, str]:
    """Return the driver's versions of plugins. Workers must have the same versions."""
    return {held.name: held.version for plugin in plugins if (held := _held(plugin)) is not None}


def _package(plugin: str) -> Path | None:
    """Return the folder of the package that a plugin's entry point names, or None where it is not installed here."""
    held = _held(plugin)
    entries = held.entry_points.select(group="whet") if held is not None else ()
    specs = (importlib.util.find_spec(entry.value.partition(".")[0]) for entry in entries)
    return next((Path(spec.origin).parent for spec in specs if spec and spec.origin), None)


def _tool() -> Tool:
    return "uv" if shutil.which("uv") else "pip"


def _run(command: Sequence[str], log: Path) -> None:
    """Run a command whose output goes to the log. Raises `WhetError`, which quotes the last lines of its output."""
    begin = log.stat().st_size if log.exists() else 0
    try:
        with log.open("a", encoding="utf-8") as output:
            done = subprocess.run(
                command, stdout=output, stderr=output, stdin=subprocess.DEVNULL, check=False,
                timeout=INSTALL_SECONDS, env={**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
            )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise WhetError(f"{command[0]} failed: {error}") from error
    if done.returncode:
        raise WhetError(f"`{' '.join(command)}` failed; its last words:\n{last_words(log, begin)}")


@contextmanager
def _alone(name: str) -> Iterator[Path]:
    """Hold the lock of an environment, and yield its folder. Raises `WhetError` while another process has the lock."""
    home = environments()
    with disk_errors(home):
        home.mkdir(parents=True, exist_ok=True)
        lock = os.open(home / f".{name}.lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield home / name
    except BlockingIOError as error:
        raise WhetError(f"another process works at the environment {name!r}; wait for it") from error
    finally:
        os.close(lock)
