"""The installed distributions that declare something to whet by an entry point.

Hundreds of distributions may be installed. Each folder of the import path is read once, and again only if it has
changed since, so that not every question about plugins, commands and launchers reads them anew.
"""

import functools
import os
import re
import sys
from collections.abc import Iterator
from importlib import metadata
from importlib.metadata import Distribution, EntryPoint

GROUP = "whet"
"""The entry-point group of plugins. The names of the groups of other declarations begin with it."""
_NAME = re.compile(r"^Name: *(\S+)", re.MULTILINE)
_VERSION = re.compile(r"^Version: *(\S+)", re.MULTILINE)


def distributions() -> Iterator[Distribution]:
    """Yield the distributions with an entry point in a group of whet, and unreadable ones, in the path's order."""
    for folder in _folders():
        yield from _declaring(*folder)


def entry_points(group: str) -> list[EntryPoint]:
    """Return the entry points of a group of whet. Of two distributions with one name, the first on the path counts.

    A distribution whose entry points cannot be read has none.
    """
    found: dict[str, tuple[EntryPoint, ...]] = {}
    for folder in _folders():
        found |= {name: entries for name, entries in _entries(*folder).items() if name not in found}
    return [entry for entries in found.values() for entry in entries if entry.group == group]


def versions() -> dict[str, str]:
    """Return the versions of all installed distributions by their `normal` names.

    Of two distributions with one name, the first on the path counts: it is imported.
    """
    found: dict[str, str] = {}
    for folder in _folders():
        found |= {name: version for name, version in _versions(*folder).items() if name not in found}
    return found


def normal(name: str) -> str:
    """Return the name of a distribution in the form of the index: lower case with dashes (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _folders() -> Iterator[tuple[str, int]]:
    """Yield each folder of the import path, with the time of its last change in ns."""
    for folder in dict.fromkeys(path or os.getcwd() for path in sys.path):
        try:
            yield folder, os.stat(folder).st_mtime_ns
        except OSError:
            continue


@functools.lru_cache(maxsize=1024)
def _declaring(folder: str, _changed: int) -> tuple[Distribution, ...]:
    return tuple(found for found in metadata.distributions(path=[folder]) if _may_declare(found))


def _may_declare(distribution: Distribution) -> bool:
    """Return whether a group of whet is declared. It is not parsed: most distributions declare nothing to whet."""
    try:
        return f"[{GROUP}" in (distribution.read_text("entry_points.txt") or "")
    except Exception:  # an unreadable file: the reader of the entry points records it
        return True


@functools.lru_cache(maxsize=1024)
def _entries(folder: str, changed: int) -> dict[str, tuple[EntryPoint, ...]]:
    found: dict[str, tuple[EntryPoint, ...]] = {}
    for distribution in _declaring(folder, changed):
        try:
            found.setdefault(normal(distribution.name), tuple(distribution.entry_points))
        except Exception:  # the registry records it as broken
            continue
    return found


@functools.lru_cache(maxsize=1024)
def _versions(folder: str, _changed: int) -> dict[str, str]:
    found: dict[str, str] = {}
    for distribution in metadata.distributions(path=[folder]):
        # Two lines are looked up. To parse the metadata of all that is installed would take long.
        try:
            text = distribution.read_text("METADATA") or distribution.read_text("PKG-INFO") or ""
        except Exception:  # what cannot be read has no version
            continue
        name, version = _NAME.search(text), _VERSION.search(text)
        found.setdefault(normal(name[1]) if name else "", version[1] if version else "")
    return found
