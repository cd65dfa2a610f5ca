"""Make virtual environments and wheels from the distributions installed here, without downloads or copies."""

import os
import sysconfig
import venv
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from whet.installed import normal


def make_environment(folder: Path, without: Sequence[str] = (), also: Mapping[str, str] | None = None) -> Path:
    """Make an environment with the distributions of this one, and return the path of its Python.

    The environment lacks the distributions in `without`. `also` holds texts of further files by their paths in
    site-packages.
    """
    site = bare_environment(folder)
    left_out = {part for name in without for part in _parts(name)}
    for entry in Path(sysconfig.get_paths()["purelib"]).iterdir():
        if entry.name not in left_out and entry.name != "__pycache__":
            (site / entry.name).symlink_to(entry)
    for name, text in (also or {}).items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text(text, encoding="utf-8")
    return folder / "bin" / "python"


def bare_environment(folder: Path) -> Path:
    """Make an environment that holds only Python, and return its site-packages."""
    venv.create(folder, with_pip=False, symlinks=os.name != "nt")
    return next(folder.glob("lib/python*/site-packages"))


def _parts(name: str) -> set[str]:
    """Return the entries of site-packages that belong to a distribution; none if it is not installed."""
    try:
        files = metadata.files(name) or ()
    except metadata.PackageNotFoundError:
        return set()
    return {file.parts[0] for file in files if file.parts[0] not in ("..", "__pycache__")}


def make_wheels(names: Iterable[str], folder: Path) -> Path:
    """Make wheels of installed distributions and of all their requirements. Return the folder of the wheels.

    pip can install the wheels elsewhere with `--find-links`. A wheel is like that of an editable install: it holds a
    path to the code in place of the code.
    """
    wheels = folder / "wheels"
    wheels.mkdir(parents=True)
    for name in _needed(names):
        _make_wheel(metadata.distribution(name), wheels, folder / "code" / name)
    return wheels


def _make_wheel(distribution: metadata.Distribution, wheels: Path, code: Path) -> None:
    """Link the distribution's entries of site-packages into a folder. Write a wheel with the path of the folder."""
    site = Path(sysconfig.get_paths()["purelib"])
    code.mkdir(parents=True)
    for part in _parts(distribution.name):
        if not part.endswith((".dist-info", ".pth")):
            (code / part).symlink_to(site / part)
    lines = (distribution.read_text("WHEEL") or "").splitlines()
    tags = zip(
        *(line.removeprefix("Tag:").strip().split("-") for line in lines if line.startswith("Tag:")), strict=True
    )
    tag = "-".join(".".join(dict.fromkeys(part)) for part in tags)
    stem = f"{distribution.name.replace('-', '_')}-{distribution.version}"
    info = {
        f"{stem}.dist-info/{name}": distribution.read_text(name) or ""
        for name in ("METADATA", "WHEEL", "entry_points.txt")
    }
    files = {**info, f"_code_of_{stem}.pth": f"{code}\n"}
    with zipfile.ZipFile(wheels / f"{stem}-{tag}.whl", "w") as wheel:
        for name, text in files.items():
            wheel.writestr(name, text)
        wheel.writestr(f"{stem}.dist-info/RECORD", "".join(f"{name},,\n" for name in files))


def _needed(names: Iterable[str]) -> list[str]:
    """Return the names of distributions and of all their requirements."""
    found, seen, left = list[str](), set[tuple[str, str]](), [(normal(name), "") for name in names]
    while left:
        name, extra = left.pop()
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        found += [name] * (name not in found)
        for one in map(Requirement, metadata.requires(name) or ()):
            if one.marker is None or one.marker.evaluate({"extra": extra}):
                left += [(normal(one.name), wanted) for wanted in ("", *one.extras)]
    return found
