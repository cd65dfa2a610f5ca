"""Python interpreters that roles may run in: where one is, what is installed in it, and whether that fits the driver.

A short process of the other interpreter reports its contents. It imports this module from its own whet, so this module
imports nothing heavy.
"""

import importlib.util
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import field, frozen

from whet import installed
from whet.component import CORE_VERSION, Package
from whet.config.cluster import is_path
from whet.errors import ConfigError
from whet.installed import entry_points, normal
from whet.runtime import WIRE_FORMAT
from whet.runtime.last_words import last_error

PROBE = """
import json, sys
found = {"python": "%d.%d.%d" % sys.version_info[:3], "executable": sys.executable}
try:
    import whet
    found["whet"] = whet.__version__
    from whet.runtime.interpreters import contents
    found.update(contents(*json.loads(sys.argv[1])))
except Exception as error:
    found["fault"] = "%s: %s" % (type(error).__name__, error)
print(json.dumps(found))
"""
"""Runs in any Python 3. The whet that is installed there adds the rest."""
PROBE_SECONDS = 60.0
"""The probe takes a tenth of a second, or longer when its files are on a network disk that must wake up."""
OLDEST_PYTHON = (3, 11)
ENGINES = "whet.engines"
"""The entry-point group in which a plugin names the distributions of an engine, each with its module: `x = "x"`."""
LIBRARIES = frozenset({"torch", "transformers", "numpy", "tokenizers", "safetensors", "ray"})
"""Distributions whose versions matter to a run, besides whet, its plugins and their engines."""
_HIDDEN = frozenset({"python", "whet", "numpy", "tokenizers", "safetensors", "ray"})
_OF_THE_DRIVER = ("PYTHONHOME", "PYTHONEXECUTABLE", "VIRTUAL_ENV", "CONDA_PREFIX")
"""Variables that hold the folders of the driver's own interpreter."""


@frozen
class Interpreter:
    """An interpreter and what the probe found in it."""

    executable: str
    python: str = ""
    """Version of Python."""
    whet: str = ""
    """Version of whet; empty: whet cannot be imported there."""
    wire: int = 0
    """See `whet.runtime.WIRE_FORMAT`; 0: this whet is too old to report it."""
    versions: Mapping[str, str] = field(factory=dict)
    """Versions of the distributions that matter, by name in lower case with dashes."""
    missing: tuple[str, ...] = ()
    """The modules among those asked for that are not installed."""
    fault: str = ""
    """The exception that whet raised there; empty: none."""

    def __str__(self) -> str:
        told = {name: held for name, held in self.versions.items() if name not in _HIDDEN and name[:5] != "whet-"}
        listed = [f"Python {self.python}", f"whet {self.whet}", *(f"{name} {held}" for name, held in told.items())]
        return f"{self.executable}: {', '.join(listed)}"


def environments() -> Path:
    """Return the folder of the named environments: `WHET_ENVIRONMENTS`, by default a folder in the home folder."""
    folder = os.path.expanduser(os.environ.get("WHET_ENVIRONMENTS") or "~/.local/share/whet/environments")
    if folder.startswith("~"):
        raise ConfigError("there is no home folder for environments: set HOME, or WHET_ENVIRONMENTS to a folder")
    return Path(folder).absolute()


def located(named: str) -> Path:
    """Return the path of the interpreter for a name or a path: of the interpreter, or of its environment's folder.

    The interpreter need not exist.
    """
    place = Path(named).expanduser().absolute() if is_path(named) else environments() / named
    return place if place.is_file() else place / "bin" / "python"


def find(named: str) -> Path:
    """Return the path of the interpreter for a name or a path. Raises `ConfigError` if there is none."""
    place = located(named)
    if place.is_file():
        return place
    if is_path(named):
        raise ConfigError(f"is {named!r}, where there is no Python; give that of an interpreter or of an environment")
    known = ", ".join(sorted(folder.parent.parent.name for folder in environments().glob("*/bin/python")))
    raise ConfigError(
        f"is {named!r}, and there is no such environment; there are: {known or 'none'}. Make one of "
        "that name, or give a path, which has a slash in it"
    )


def probe(
    executable: Path, modules: Sequence[str] = (), distributions: Iterable[str] = (), folders: Sequence[str] = (),
    seconds: float = PROBE_SECONDS,
) -> Interpreter:  # fmt: skip
    """Run an interpreter and return what is installed in it. Raises `ConfigError` if it gives no usable answer.

    `folders` are folders of the driver from which its workers import as well.
    """
    command = [str(executable), "-c", PROBE, json.dumps([list(modules), list(distributions), list(folders)])]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=seconds, cwd=executable.parent, check=False,
            env=surroundings(str(executable), os.environ),
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{executable} does not answer: {error}") from error
    try:
        answer = json.loads(done.stdout.splitlines()[-1])
        return Interpreter(**{**answer, "executable": str(executable), "missing": tuple(answer.get("missing", ()))})
    except (ValueError, IndexError, TypeError):
        said = last_error(done.stderr) or (done.stderr.strip() or done.stdout.strip()).rpartition("\n")[2]
        raise ConfigError(
            f"{executable} is no Python that can be used: {said or f'exit code {done.returncode}'}"
        ) from None


def contents(modules: Sequence[str], distributions: Sequence[str], folders: Sequence[str]) -> dict[str, Any]:
    """Return the wire format and versions of this interpreter, and the missing modules, without importing them."""
    sys.path += folders
    missing = [module for module in modules if importlib.util.find_spec(module.partition(".")[0]) is None]
    return {"wire": WIRE_FORMAT, "versions": versions(distributions), "missing": missing}


def versions(also: Iterable[str] = ()) -> dict[str, str]:
    """Return the versions of Python, whet, every plugin, its engine, `LIBRARIES` and the distributions in `also`.

    Nothing is imported.
    """
    found = {"python": platform.python_version(), "whet": CORE_VERSION}
    wanted = LIBRARIES | engines() | {normal(name) for name in also}
    for name, version in installed.versions().items():
        if name not in found and (name in wanted or name.startswith("whet-")):
            found[name] = version
    return dict(sorted(found.items()))


def engines() -> set[str]:
    """Return the distributions of the engines that installed plugins name."""
    return {normal(entry.name) for entry in entry_points(ENGINES)}


def faults(
    found: Interpreter, distributions: Mapping[str, str] | None = None, packages: Iterable[Package] = ()
) -> list[str]:
    """Return the reasons why workers cannot run in an interpreter; empty: they can.

    `distributions` are the required versions, by name. `packages` tell how to install some of the missing modules.
    """
    where, install = found.executable, f"{found.executable} -m pip install"
    if tuple(map(int, found.python.split(".")[:2])) < OLDEST_PYTHON:
        return [f"{where} has Python {found.python}; whet needs {'.'.join(map(str, OLDEST_PYTHON))} or newer"]
    if not found.whet:
        return [f"{where} has no whet ({found.fault}); wanted whet {CORE_VERSION}: {install} whet=={CORE_VERSION}"]
    if (found.whet, found.wire) != (CORE_VERSION, WIRE_FORMAT):
        return [f"{where} has {_core(found.whet, found.wire)}, and the driver {_core()}; install the same in both"]
    if found.fault:
        return [f"{where} has a whet that cannot be used: {found.fault}"]
    return [*_other_versions(found, distributions or {}), *_missing(found, packages)]


def _other_versions(found: Interpreter, distributions: Mapping[str, str]) -> list[str]:
    told = []
    for name, version in distributions.items():
        there = found.versions.get(normal(name))
        if there != version:
            held = f"{name} {there}" if there else f"no {name}"
            told.append(f"{found.executable} has {held}, and the driver {name} {version}; install the same in both")
    return told


def _missing(found: Interpreter, packages: Iterable[Package]) -> list[str]:
    names = list(dict.fromkeys(module.partition(".")[0] for module in found.missing))
    lacking = [package for package in packages if package.module in names]
    told = [f"{found.executable} has no {one.name}, which its workers stand on; {one.install}" for one in lacking]
    rest = [name for name in names if name not in {one.module for one in lacking}]
    if rest:
        told.append(
            f"{found.executable} lacks {' and '.join(rest)}, which its workers import; install what offers it there"
        )
    return told


def _core(version: str = CORE_VERSION, wire: int = WIRE_FORMAT) -> str:
    return f"whet {version} (wire format {wire})"


def refuse_another_core(version: str, wire: int) -> None:
    """End this worker process if its whet differs from the driver's in version or wire format."""
    if (version, wire) != (CORE_VERSION, WIRE_FORMAT):
        sys.exit(f"{sys.executable} has {_core()}, and the driver {_core(version, wire)}; install the same in both")


def surroundings(executable: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables for a process of another interpreter, whose own programs come first in PATH."""
    folder = Path(executable).parent
    kept = {name: value for name, value in environment.items() if name not in _OF_THE_DRIVER}
    if (folder.parent / "pyvenv.cfg").is_file():
        kept["VIRTUAL_ENV"] = str(folder.parent)
    return {**kept, "PATH": os.pathsep.join([str(folder), *filter(None, [kept.get("PATH")])])}
