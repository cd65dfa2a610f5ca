"""Keys and values of a config that have new names: an error for an old name states the new name.

A field states its old names in its metadata, so that the config classes of plugins can do the same:

    on_weight_update: Literal["drain", "continue"] = field(metadata=renamed("running", keep="continue"))

An old key or value in a config that somebody wrote is a problem of the config, with its path. What an earlier version
wrote itself is read with the names of today: the `config.yaml` of a run folder (`structure(..., renew=True)`) and the
fingerprint of a run (`renewed`).
"""

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

import attrs

from whet.component import Selection
from whet.config.document import to_line


def _usual(field: "attrs.Attribute[Any]") -> Any:
    """Return the default of a field. NOTHING: it has none, or one that depends on other fields."""
    made = getattr(field.default, "factory", lambda: field.default)
    return attrs.NOTHING if getattr(field.default, "takes_self", False) else made()


def renamed(key: str = "", /, **values: str) -> dict[str, Any]:
    """Return metadata of a field whose key was `key` before, or which had other values: new ones by the old ones."""
    return {"renamed_key": key, "renamed_values": values}


def renamed_keys(fields: "Sequence[attrs.Attribute[Any]]") -> "dict[str, attrs.Attribute[Any]]":
    """Return the fields that had another key before, by this key."""
    return {field.metadata["renamed_key"]: field for field in fields if field.metadata.get("renamed_key")}


def key_words(field: "attrs.Attribute[Any]", value: object) -> str:
    """Return what is wrong with an old key, and the line to write instead; of a section only its key."""
    new = _new_value(field, value)
    return f"was renamed; write {field.alias}" + ("" if isinstance(new, Mapping) else f": {to_line(new)}")


def value_words(field: "attrs.Attribute[Any]", value: object) -> str:
    """Return what is wrong with an old value, and the value to write instead; empty where it is none."""
    new = _new_value(field, value)
    return "" if new is value else f"the value {value} was renamed; write {new}"


def _new_value(field: "attrs.Attribute[Any]", value: object) -> object:
    return field.metadata.get("renamed_values", {}).get(value, value) if isinstance(value, str) else value


def with_new_names(plain: Mapping[str, Any], fields: "Sequence[attrs.Attribute[Any]]") -> dict[str, Any]:
    """Return a mapping with the keys and values of today in place of the old ones of these fields."""
    today, before = {field.alias or field.name: field for field in fields}, renamed_keys(fields)
    found = {key: value for key, value in plain.items() if key in today or key not in before}
    for key in plain.keys() - found.keys():
        found.setdefault(before[key].alias or before[key].name, plain[key])
    return {key: _new_value(today[key], value) if key in today else value for key, value in found.items()}


def renewed(plain: Any, config: Any, new: list[str] | None = None, path: str = "") -> Any:
    """Return a config that an earlier version wrote as builtins, with the keys and values of today.

    `config` is the structured config of today that it is compared with: an instance, a selection, or a collection.
    `new` gets the paths of the keys with their defaults that `plain`, which is at `path`, lacks: an earlier version did
    not know them.
    """
    if isinstance(config, Selection):
        return renewed(plain, config.config, new, path)
    if isinstance(config, Mapping) and isinstance(plain, Mapping):
        return {key: renewed(value, config.get(key), new, f"{path}{key}.") for key, value in plain.items()}
    if isinstance(config, Sequence) and isinstance(plain, list):
        both = enumerate(zip_longest(plain, config[: len(plain)]))
        return [renewed(value, here, new, f"{path}{number}.") for number, (value, here) in both]
    if not attrs.has(type(config)) or not isinstance(plain, Mapping):
        return plain
    found = with_new_names(plain, attrs.fields(type(config)))
    for field in attrs.fields(type(config)):
        key, here = field.alias or field.name, getattr(config, field.name)
        if field.metadata.get("inline"):
            found = renewed(found, here, new, path)
        elif key in found:
            found[key] = renewed(found[key], here, new, f"{path}{key}.")
        elif new is not None and here == _usual(field):
            new.append(f"{path}{key}")
    return found
