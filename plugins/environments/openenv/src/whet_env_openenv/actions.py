"""Turns a response into an action of the server's schema. The text comes from a model, the schema from a server."""

import json
import math
import re
from collections.abc import Mapping
from typing import Any, Literal

from attrs import frozen

from whet.errors import ConfigError
from whet_env_openenv.config import OpenEnvConfig

SCALARS = ("string", "integer", "number", "boolean")
LONGEST_SCHEMA = 16_384
"""Characters. A longer schema is not shown to the model whole."""
_INTEGER = re.compile(r"[-+]?\d{1,64}", re.ASCII)
_NUMBER = re.compile(r"[-+]?(?:\d{1,64}(?:\.\d{0,64})?|\.\d{1,64})(?:[eE][-+]?\d{1,4})?", re.ASCII)
OPENING, CLOSING = "<action>", "</action>"


class InvalidAction(Exception):  # noqa: N818 - it says what came of a response
    """A response has no action that the server can take. The message is for the model."""


@frozen
class ActionFormat:
    """How the model writes actions."""

    within: Literal["tag", "response"]
    schema: Mapping[str, Any]
    field: str = ""
    """The field whose value is the text of the action. Empty: an action is JSON."""

    def described(self) -> str:
        """Return the text about actions for the model."""
        place = "all of the message" if self.within == "response" else f"write it as {OPENING}...{CLOSING}"
        if not self.field:
            schema = json.dumps(_plain(self.schema), ensure_ascii=False)[:LONGEST_SCHEMA]
            return f"Each of your messages takes one action, a JSON object; {place}. Its schema is {schema}"
        held = self.schema["properties"][self.field]
        parts = [_kind(held), str(held.get("description") or "")]
        about = "; ".join(part for part in parts if part)
        return f"Each of your messages takes one action, `{self.field}` ({about}); {place}."

    def action(self, text: str) -> dict[str, Any]:
        """Return the action in a response, or raise `InvalidAction`."""
        if self.within == "tag":
            before, closing, _ = text.rpartition(CLOSING)
            _, opening, found = before.rpartition(OPENING)
            if not (opening and closing):
                raise InvalidAction(f"The message has no {OPENING}...{CLOSING}.")
            text = found
        return {self.field: self._value(text.strip())} if self.field else _json_object(text)

    def _value(self, text: str) -> Any:
        kind = _kind(self.schema["properties"][self.field])
        try:
            if kind == "integer" and _INTEGER.fullmatch(text):
                return int(text)
            if kind == "number" and _NUMBER.fullmatch(text) and math.isfinite(value := float(text)):
                return value
            if kind == "boolean":
                return {"true": True, "false": False}[text.lower()]
        except (ValueError, KeyError):
            pass
        if kind in ("integer", "number", "boolean"):
            raise InvalidAction(f"{self.field} must be of the type {kind}.")
        return text


def action_format(config: OpenEnvConfig, schema: Mapping[str, Any]) -> ActionFormat:
    """Return how the model writes actions of a server. Raises `ConfigError` if the schema does not allow the config."""
    held = schema.get("properties")
    held = {name: one for name, one in held.items() if isinstance(one, Mapping)} if isinstance(held, Mapping) else {}
    schema = {**schema, "properties": held}
    names = [name for name in held if name != "metadata"]
    needed = [name for name in schema.get("required") or () if name in names] or names
    name = config.action_field or (needed[0] if len(needed) == 1 else "")
    if config.action_field and name not in names:
        raise ConfigError(
            f"openenv.action_field: the actions of {config.url} have no field {name!r}; there are {names}"
        )
    if config.action == "text" and not name:
        raise ConfigError(
            f"openenv.action: the actions of {config.url} need {len(needed)} fields, so text is no action; set "
            f"action_field to one of {names}, or action to json"
        )
    wanted = config.action == "text" or (config.action == "auto" and name and _kind(held[name]) in SCALARS)
    return ActionFormat(config.within, schema, name if wanted else "")


def _kind(held: Mapping[str, Any]) -> str:
    """Return the type of a field, also of an optional one."""
    options = [one for one in held.get("anyOf") or () if isinstance(one, Mapping) and one.get("type") != "null"]
    return str(held.get("type") or (options[0].get("type") if len(options) == 1 else "") or "")


def _plain(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the model needs of a schema."""
    held = {name: one for name, one in schema["properties"].items() if name != "metadata"}
    return {key: schema[key] for key in ("required", "$defs") if schema.get(key)} | {"properties": held}


def _json_object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text[text.index("{") : text.rindex("}") + 1], parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise InvalidAction("The action must be one JSON object.") from error
    if not isinstance(found, dict):
        raise InvalidAction("The action must be one JSON object.")
    return found


def _no_number(name: str) -> None:
    raise ValueError(name)
