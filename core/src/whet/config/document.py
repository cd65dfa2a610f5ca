"""Reads and writes YAML: numbers as people write them, no duplicate keys, and a line for every error.

Scalars follow YAML 1.2: `1e-6` is a number, `no` and `2024-01-01` are text.
"""

import json
import math
import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

import yaml
from attrs import field, frozen

from whet.errors import ConfigError


@frozen
class Document:
    """A parsed YAML text."""

    value: Any
    problems: tuple[str, ...] = ()
    """Keys that appear twice. The last value is used."""
    node: yaml.Node | None = field(default=None, repr=False, eq=False)
    """The tree of YAML nodes, which know their lines."""

    def line(self, path: Sequence[str]) -> int | None:
        """Return the line of a key or item, or of the deepest part of its path that exists. None: no part exists."""
        node, line = self.node, None
        for key in path:
            found = _step(node, key)
            if found is None:
                break
            node, line = found
        return line


def _step(node: yaml.Node | None, key: str) -> tuple[yaml.Node, int] | None:
    """Return the node under a key or index, with the line of the key."""
    if isinstance(node, yaml.MappingNode):  # keys that `<<` merges in come before the node's own
        for name, value in reversed(node.value):
            if name.value == key:
                return value, name.start_mark.line + 1
    if isinstance(node, yaml.SequenceNode) and key.isdecimal() and int(key[:9]) < len(node.value):
        item = node.value[int(key)]
        return item, item.start_mark.line + 1
    return None


def read_file(path: Path) -> Document:
    """Read a YAML file. Raises `ConfigError` with file, line and column of text that is not YAML."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"there is no file {str(path)!r}") from None
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ConfigError(f"{path}:{line}: the file is not UTF-8 text ({error.reason})") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{str(path)!r} cannot be read: {reason}") from None
    return read_text(text, str(path))


def read_text(text: str, source: str) -> Document:
    """Parse a YAML text. `source` is its name in errors."""
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        value = None if node is None else loader.construct_document(node)
    except yaml.reader.ReaderError as error:
        raise ConfigError(f"{source}: a character that YAML does not allow: {error.character!r}") from None
    except yaml.MarkedYAMLError as error:
        raise ConfigError(f"{source}{_place(error)}: {_what(error)}") from None
    except RecursionError:
        raise ConfigError(f"{source}: nested too deeply") from None
    return Document(value, tuple(f"{source}:{twice}" for twice in loader.twice), node)


def read_mapping(value: Mapping[str, Any], source: str) -> Document:
    """Return a copy of a mapping as if it had been read from a file. A path becomes text, and no key has a line."""

    def copy(value: Any, keys: tuple[str, ...]) -> Any:
        if isinstance(value, Mapping):
            return {key: copy(item, (*keys, str(key))) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [copy(item, (*keys, str(index))) for index, item in enumerate(value)]
        if callable(number := getattr(value, "item", None)) and getattr(value, "shape", None) == ():
            value = number()  # of NumPy
        if value is None or isinstance(value, bool):
            return value
        for kind in (str, int, float):
            if isinstance(value, kind):
                return str.__str__(value) if isinstance(value, str) else kind(value)  # of an enum, say
        if isinstance(value, PurePath):
            return str(value)
        raise ConfigError(f"{source}: {'.'.join(keys)}: wanted a mapping, list, text or number, found {value!r:.80}")

    try:
        return Document(copy(value, ()))
    except RecursionError:
        raise ConfigError(f"{source}: nested too deeply") from None


def to_text(value: object) -> str:
    """Return builtins as YAML that every reader takes for the same value: the text `1e5` is quoted."""
    text = yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)
    if any(odd in text for odd in "\x85\u2028\u2029\ufeff"):  # line breaks in YAML, which PyYAML does not quote
        text = yaml.dump(value, Dumper=_Dumper, sort_keys=False, width=100)
    return str(text)


def to_line(value: object) -> str:
    """Return builtins as YAML on one line."""
    text = yaml.dump(value, Dumper=_Dumper, sort_keys=False, default_flow_style=True, width=math.inf)
    line = str(text).removesuffix("\n").removesuffix("...").strip()
    return line if len(line.splitlines()) < 2 else json.dumps(value)  # text of several lines


def _place(error: yaml.MarkedYAMLError) -> str:
    mark = error.problem_mark or error.context_mark
    return f":{mark.line + 1}:{mark.column + 1}" if mark else ""


def _what(error: yaml.MarkedYAMLError) -> str:
    problem = error.problem or "no YAML"
    if not error.context:
        return problem
    began, found = error.context_mark, error.problem_mark
    since = f" that begins in line {began.line + 1}" if began and found and began.line < found.line else ""
    return f"{problem} ({error.context}{since})"


class _Loader(yaml.SafeLoader):
    """A safe loader that refuses recursion and records duplicate keys."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.twice: list[str] = []

    def mapping(self, node: yaml.MappingNode) -> dict[Hashable, Any]:
        """Build a mapping and record duplicate keys. Keys that `<<` merges in may be overridden."""
        lines: dict[Hashable, int] = {}
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key, line = self.construct_object(key_node, deep=True), key_node.start_mark.line + 1
            if not isinstance(key, Hashable):
                continue  # construct_mapping below refuses it with its line
            if key in lines:
                self.twice.append(f"{line}: the key {key!r} is given twice, first in line {lines[key]}")
            lines.setdefault(key, line)
        return dict(self.construct_mapping(node, deep=True))

    def sequence(self, node: yaml.SequenceNode) -> list[Any]:
        """Build a list."""
        return list(self.construct_sequence(node, deep=True))

    def scalar(self, node: yaml.ScalarNode) -> bool | int | float:
        """Return a number, or true or false. Refuse text that a tag such as `!!int` wrongly calls a number."""
        text, kind = str(self.construct_scalar(node)).replace("_", "").lower(), node.tag.rpartition(":")[2]
        if kind == "int" and len(text) > 100:
            raise _refused("an integer of so many digits", node)
        try:
            return _READ[kind](text)
        except (ValueError, KeyError):
            raise _refused(f"{node.value!r:.60} is no {kind}", node) from None

    def unknown(self, node: yaml.Node) -> None:
        """Refuse a tag such as `!!python/object`."""
        raise _refused(f"the tag {node.tag!r} is not allowed", node)


def _refused(problem: str, node: yaml.Node) -> yaml.MarkedYAMLError:
    return yaml.constructor.ConstructorError(None, None, problem, node.start_mark)


_READ: dict[str, Callable[[str], bool | int | float]] = {
    "bool": lambda text: {"true": True, "false": False}[text],
    "int": lambda text: int(text, 10 if text.lstrip("+-").isdigit() else 0),
    "float": lambda text: float(text.replace(".inf", "inf").replace(".nan", "nan")),
}

_SCALARS = {
    "null": r"~|null|Null|NULL|",
    "bool": r"true|True|TRUE|false|False|FALSE",
    "int": r"[-+]?[0-9][0-9_]*|0o[0-7]+|0x[0-9a-fA-F]+",
    "float": r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9_]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
    "merge": r"<<",
}
_Loader.yaml_implicit_resolvers = {
    None: [(f"tag:yaml.org,2002:{name}", re.compile(rf"^(?:{pattern})$")) for name, pattern in _SCALARS.items()]
}
_Loader.yaml_constructors = {
    **{f"tag:yaml.org,2002:{name}": yaml.SafeLoader.yaml_constructors[f"tag:yaml.org,2002:{name}"]
       for name in ("null", "str")},
    **{f"tag:yaml.org,2002:{name}": _Loader.scalar for name in _READ},
    "tag:yaml.org,2002:map": _Loader.mapping,
    "tag:yaml.org,2002:seq": _Loader.sequence,
    None: _Loader.unknown,
}  # fmt: skip


class _Dumper(yaml.SafeDumper):
    """A safe dumper. It quotes text that YAML 1.1 or 1.2 would read as something else, and writes no aliases."""

    yaml_implicit_resolvers = {**yaml.SafeDumper.yaml_implicit_resolvers, **_Loader.yaml_implicit_resolvers}  # noqa: RUF012 - as in PyYAML

    def ignore_aliases(self, data: Any) -> bool:
        """Write an object that appears in two places twice."""
        return True
