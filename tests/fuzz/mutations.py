"""Draws what to change in a document, a text, a record or a folder, and knows which changes must be refused."""

import json
import math
import random
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

from attrs import frozen

At = tuple[str | int, ...]
"""Where something stands in a document."""

LONG = "x" * 10_000
FREE = frozenset(
    {"fields", "ranks", "gpus", "threads", "placement", "resources", "python", "teachers", "weights", "roles",
     "arguments", "environment"}
)  # fmt: skip
"""Keys whose mappings have keys that the user chooses."""
SIGNED = frozenset({"at_least", "judge_weight", "environment_weight", "mean"})
"""Numbers that may be negative."""
LARGE = frozenset({"seed"})
"""Numbers that may be as large as 64 bits."""
INFINITE = frozenset({"cap"})
"""Numbers that may be infinite."""
BOTTOMLESS: frozenset[At] = frozenset({("likelihood", "at_least")})
"""Numbers, each with its section, that have no lower bound and may be infinite there."""
PATHS = frozenset({"folder", "path", "chat_template", "teacher", "dataset", "file"})
NEVER: Sequence[Any] = [math.nan, -math.inf, "a\0b", "half \ud800"]
"""What no field takes."""
WRONG: Mapping[type, Sequence[Any]] = {
    bool: [0, 1, "yes", "true", 2.0, [], {}],
    int: [True, "8", 1.5, 3.0, [], {}, [1], 10**40, -(10**40), -(10**18), 1.0e30],
    float: [True, "0.1", "nan", [], {}, 1.0e30, -1.0e30, -1.0e18, 10**400],
    str: [5, True, 0.5, ["a"], {"a": 1}],
    list: ["x", 5, {"a": 1}, True],
    dict: [5, True, ["a"], [[]]],
}
"""What a field with such a value does not take."""
ODD: Sequence[Any] = [
    None, "", " ", "\n", "no", "~", "../..", LONG, "~nobody-here/x", "a\nb", "\u202e", "\x1b[2J", "\u00e9" * 300, 0, -1,
    1, 1 << 62, 1e-300, 5e-324,
    0.0, -0.0, [], {}, [[]], [None], {"use": "x"}, {"": ""}, {"use": None}, "use", [1, 2, 3],
]  # fmt: skip
"""What some fields take, and others refuse; none may end in a traceback."""


@frozen
class Change:
    """One change, and whether it must be refused."""

    words: str
    must: bool


def leaves(value: Any, at: At = ()) -> Iterator[tuple[At, Any]]:
    """Walk all values of a document, sections included."""
    if at:
        yield at, value
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from leaves(item, (*at, key))


def put(document: Any, at: At, value: Any) -> None:
    """Replace what stands somewhere."""
    for key in at[:-1]:
        document = document[key]
    document[at[-1]] = value


def found(document: Any, at: At) -> Any:
    """Return what stands somewhere."""
    for key in at:
        document = document[key]
    return document


def change_document(chance: random.Random, document: Mapping[str, Any]) -> tuple[Any, Change]:
    """Change a copy of a document in one place."""
    made = deepcopy(dict(document))
    places = list(leaves(made))
    how = chance.choices(("value", "unknown", "typo", "remove", "odd", "deep"), (50, 12, 8, 5, 22, 3))[0]
    if how in ("unknown", "typo"):
        sections = [((), made), *((at, one) for at, one in places if isinstance(one, dict) and one and not is_free(at))]
        at, section = chance.choice(sections)
        if how == "unknown":
            key = chance.choice(("unknown_key", "Lr", "stepz", "use_", "", "a.b", "\u202e", LONG))
            section[key] = 1
            return made, Change(f"{dotted(at)}: unknown key {key!r:.40}", True)
        key = chance.choice(list(section))
        section[f"{key}z"] = section.pop(key)
        return made, Change(f"{dotted((*at, key))}: renamed to {key}z", not is_free(at) and key != "use")
    at, before = chance.choice(places)
    if how == "remove":
        holder = found(made, at[:-1])
        del holder[at[-1]]
        return made, Change(f"{dotted(at)}: removed", False)
    if how == "deep":
        put(made, at, nested(chance.choice((20, 100, 400)), chance.choice(("list", "mapping"))))
        return made, Change(f"{dotted(at)}: nested deeply", False)
    if how == "odd":
        value = chance.choice(ODD)
        put(made, at, deepcopy(value))
        return made, Change(f"{dotted(at)} = {value!r:.60}", value == -1 and is_negative_wrong(at, before))
    value, must = wrong_for(chance, at, before)
    put(made, at, deepcopy(value))
    return made, Change(f"{dotted(at)} = {value!r:.60}", must)


def is_free(at: At) -> bool:
    """Whether a mapping has keys that the user chooses."""
    return bool(at) and (at[-1] in FREE or (len(at) > 1 and at[-2] in FREE and at[-2] != "roles"))


def is_negative_wrong(at: At, before: Any) -> bool:
    """Whether -1 cannot be meant there."""
    number = isinstance(before, (int, float)) and not isinstance(before, bool)
    return number and at[-1] not in SIGNED and not is_free(at[:-1]) and "clip" not in at[:-1]


def is_low(at: At, value: Any) -> bool:
    """Whether a value is a number below 0 that has no lower bound there."""
    return at[-2:] in BOTTOMLESS and isinstance(value, float) and value < 0


def wrong_for(chance: random.Random, at: At, before: Any) -> tuple[Any, bool]:
    """Draw a value, and say whether it must be refused in the place of another."""
    if chance.random() < 0.25:
        value = chance.choice(NEVER)
        return value, not is_low(at, value)
    if chance.random() < 0.1:
        return math.inf, at[-1] not in INFINITE
    kind = next((kind for kind in (bool, int, float, str, list, dict) if isinstance(before, kind)), None)
    if kind is None:  # null, where anything may stand
        return chance.choice((*WRONG[int], *WRONG[str])), False
    value = chance.choice(WRONG[kind])
    if kind is int and is_negative_wrong(at, before) and chance.random() < 0.3:
        value = -chance.randint(1, 1000)
    if kind is float and is_negative_wrong(at, before) and chance.random() < 0.3:
        value = -chance.random()
    if kind is str and at[-1] == "use":
        value = chance.choice((5, True, ["a"]))
    must = not (kind is list and at[-1] == "colocate") and not (kind is dict and at[-1] in ("component",))
    must = must and not is_low(at, value)
    return value, must


def nested(depth: int, kind: str) -> Any:
    """Make a value so deep."""
    value: Any = 1
    for _ in range(depth):
        value = [value] if kind == "list" else {"a": value}
    return value


def dotted(at: At) -> str:
    """Write a place as a path."""
    return ".".join(map(str, at)) or "the document"


def to_text(document: Any) -> str:
    """Write a document as JSON, which is YAML; what JSON lacks as YAML has it."""
    text = json.dumps(document, indent=1)
    for json_word, yaml_word in (("-Infinity", "-.inf"), ("Infinity", ".inf"), ("NaN", ".nan")):
        text = text.replace(f": {json_word}", f": {yaml_word}").replace(f" {json_word}", f" {yaml_word}")
    return text


def change_text(chance: random.Random, content: bytes) -> tuple[bytes, str]:
    """Change a text or a file as broken disks, editors and transfers do."""
    how = chance.choice(("flip", "cut", "insert", "double", "empty", "zeros", "swap"))
    at = chance.randrange(len(content) or 1)
    end = min(len(content), at + chance.randint(1, 40))
    match how:
        case "flip":
            return content[:at] + bytes([content[at] ^ (1 << chance.randrange(8))]) + content[at + 1 :], f"flip at {at}"
        case "cut":
            return content[:at], f"cut at {at}"
        case "insert":
            junk = chance.choice((b"\0", b"\xff\xfe", b"{", b"]", b"\n- ", b"\t", b"NaN", b"1e999", b"\\ud800", b": :"))
            return content[:at] + junk + content[at:], f"insert {junk!r} at {at}"
        case "double":
            return content[:end] + content[at:], f"double {at} to {end}"
        case "empty":
            return b"", "emptied"
        case "zeros":
            return content[:at] + bytes(end - at) + content[end:], f"zeros from {at} to {end}"
    return content[:at] + content[at:end][::-1] + content[end:], f"swap {at} to {end}"


BAD_RECORDS: Sequence[Callable[[dict[str, Any]], Any]] = [
    lambda record: [],
    lambda record: 5,
    lambda record: None,
    lambda record: "text",
    lambda record: {},
    lambda record: {"text": ""},
    lambda record: {"text": 5},
    lambda record: {"text": "half \ud800"},
    lambda record: {"messages": []},
    lambda record: {"messages": "x"} if "chosen" in record else {"messages": {}},
    lambda record: {"messages": [{"role": "user"}]},
    lambda record: {"messages": [{"role": "robot", "content": "x"}]},
    lambda record: {"messages": [{"role": [], "content": "x"}]},
    lambda record: {"messages": [{"role": "assistant", "content": 5}]},
    lambda record: {"messages": [{"role": "assistant", "content": None}]},
    lambda record: {"messages": [{"role": "assistant", "content": [{"type": "text"}]}]},
    lambda record: {"messages": [{"role": "assistant", "content": [{"type": "text", "text": 5}]}]},
    lambda record: {"messages": [{"role": "assistant", "content": [{"type": "image", "url": "x"}]}]},
    lambda record: {"messages": [{"role": "assistant", "content": ["x"]}]},
    lambda record: {"messages": [{"role": "assistant", "content": "half \udfff"}]},
    lambda record: {"prompt": "x", "completion": 5},
    lambda record: {"prompt": 5, "completion": "x"},
    lambda record: {"prompt": "x", "completion": []},
    lambda record: {"prompt": "x", "chosen": 5, "rejected": "y"},
    lambda record: {"prompt": "x", "chosen": "y"},
    lambda record: {"prompt": {"a": 1}, "chosen": "y", "rejected": "z"},
    lambda record: {"messages": nested(300, "list")},
]
"""Records that cannot be trained on."""


def change_folder(chance: random.Random, folder: Path, within: Sequence[str]) -> str:
    """Change one file or folder below a folder; return what was done."""
    files = sorted(path for pattern in within for path in folder.glob(pattern))
    path = chance.choice(files)
    name = str(path.relative_to(folder))
    if path.is_dir():
        how = chance.choice(("remove", "empty", "file"))
        shutil.rmtree(path)
        if how == "empty":
            path.mkdir()
        elif how == "file":
            path.write_text("x")
        return f"{name}: {how}"
    how = chance.choice(("text", "text", "text", "remove", "folder", "strange rows"))
    match how:
        case "remove":
            path.unlink()
        case "folder":
            path.unlink()
            path.mkdir()
        case "strange rows":
            rows = [strange_row(chance) for _ in range(3)]
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        case "text":
            content, words = change_text(chance, path.read_bytes())
            path.write_bytes(content)
            return f"{name}: {words}"
    return f"{name}: {how}"


def strange_row(chance: random.Random) -> Any:
    """Make a row that no run writes."""
    values = (1e300, -1, None, "x", [], {}, True, 10**400, math.nan, math.inf, "\ud800", [1, "a"], {"a": {}})
    keys = ("step", "time", "event", "begin", "seconds", "role", "phase", "group", "sample", "messages", "sequences",
            "rewards", "versions", "reward", "after_step", "loss", "seconds/step")  # fmt: skip
    row: Any = {key: chance.choice(values) for key in chance.sample(keys, chance.randint(0, len(keys)))}
    return chance.choice((row, row, row, [], 5, "x", None))
