"""Call a method of a contract in another interpreter: the hashes of texts, addresses and process id are others there.

test ── class, attributes, name of the method ──> server ── fork ──> import the file of the class, call
test <───────────────────────────── what the method returned ────────────────────────────────────┘
"""

import importlib
import importlib.util
import inspect
import os
import pickle
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from whet_testing.forking import Programs

SEED = "PYTHONHASHSEED"
_ANSWER = "import sys; from whet_testing.another_interpreter import answer; answer(*sys.argv[1:])"


class NotThereError(Exception):
    """The method could not be called there: what it needs exists in the process of the test only."""


class AnotherInterpreter:
    """An interpreter that starts once, and calls each method in a fork of its own."""

    def __init__(self) -> None:
        other = "2" if os.environ.get(SEED) == "1" else "1"
        self._programs = Programs(["whet_testing.contracts.environment"], {SEED: other})
        self._seed = other

    def call(self, contract: object, method: str, seconds: float = 120.0) -> Any:
        """Return what a method of a fresh object of the same class returns there. Raises `NotThereError`.

        The fresh object has the attributes of this one, those that fixtures have set included, as far as pickle can
        store them.
        """
        cls = type(contract)
        if "<locals>" in cls.__qualname__:
            raise NotThereError(f"{cls.__qualname__} is made inside of a function; move the class out")
        order = {
            "module": cls.__module__, "file": inspect.getfile(cls), "path": sys.path, "name": cls.__qualname__,
            "method": method, "attributes": _attributes(contract),
        }  # fmt: skip
        with tempfile.TemporaryDirectory() as folder:
            asked, found = Path(folder, "asked"), Path(folder, "found")
            asked.write_bytes(pickle.dumps(order))
            variables = {**os.environ, SEED: self._seed}
            try:
                done = self._programs.run(_ANSWER, [str(asked), str(found)], variables=variables, seconds=seconds)
            except (subprocess.TimeoutExpired, ChildProcessError) as error:
                raise NotThereError(f"the other interpreter gave no answer in {seconds:g} seconds") from error
            if done.returncode:
                raise NotThereError(done.stderr.strip().rpartition("\n")[2][:500])
            return pickle.loads(found.read_bytes())

    def __enter__(self) -> "AnotherInterpreter":
        return self

    def __exit__(self, *error: object) -> None:
        """End the interpreter."""
        self._programs.__exit__(*error)


def answer(asked: str, found: str) -> None:
    """Call the method of an order, and write what it returns. Runs in the other interpreter."""
    order = pickle.loads(Path(asked).read_bytes())
    sys.path[:], sys.dont_write_bytecode = order["path"], True
    cls: Any = _module(order["module"], order["file"])
    for part in order["name"].split("."):
        cls = getattr(cls, part)
    contract = cls()
    for name, value in order["attributes"].items():
        setattr(cls, name, pickle.loads(value))
    Path(found).write_bytes(pickle.dumps(getattr(contract, order["method"])()))


def _attributes(contract: object) -> dict[str, bytes]:
    """Return the values of an object and its classes that pickle can store, each by itself."""
    names = {name for cls in type(contract).__mro__ for name in vars(cls)} | set(vars(contract))
    found = {}
    for name in (name for name in names if not name.startswith("__")):
        value = inspect.getattr_static(contract, name)
        if not inspect.isroutine(value) and not isinstance(value, property | classmethod | staticmethod):
            with suppress(Exception):  # pickle may raise anything, and a server of a test has no copy there
                found[name] = pickle.dumps(value)
    return found


def _module(name: str, file: str) -> ModuleType:
    """Import a file of tests under the name that pytest gave it."""
    with suppress(ImportError, ValueError):
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin == file:
            return importlib.import_module(name)
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
