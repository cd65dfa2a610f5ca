"""A reward for JSON that fits a schema. Parsing and comparing happen in a process with limits.

A schema may have patterns, and a text of the model may make them slow; JSON may be nested a million times.
"""

import json
import re
from typing import Any

from whet.errors import EpisodeError
from whet_data.finished import Finished
from whet_env_rewards.config import JsonSchemaConfig
from whet_sandbox.pool import GraderPool

_FENCE = re.compile(r"^[ \t]{0,3}(`{3,}+)([^`\n]*+)$", re.MULTILINE)
LONGEST = 1 << 20
"""A longer response is not read."""


class JsonSchema:
    """1 for JSON that fits the schema, `parsed` for other JSON, else 0. JSON Schema 2020-12, or as `$schema` says."""

    def __init__(self, config: JsonSchemaConfig) -> None:
        self._config = config
        self._pool = GraderPool("whet_env_rewards.json_schema:fits", config.graders, config.timeout_seconds)

    async def __call__(self, episode: Finished) -> float:
        """Return the reward. Raises `Undecided` for a text that needs too much time or memory."""
        text = fenced(episode.text) if self._config.fenced else episode.text
        if len(text) > LONGEST:
            return 0.0
        return {"fits": 1.0, "parsed": self._config.parsed}.get(await self._pool.call(text, self._schema(episode)), 0.0)

    def _schema(self, episode: Finished) -> str:
        """Return the schema as text."""
        if not self._config.schema_key:
            return json.dumps(self._config.schema)
        found = episode.data.get(self._config.schema_key)
        if not isinstance(found, str | dict):
            words = f"the task has the schema {found!r:.60} under {self._config.schema_key!r}"
            raise EpisodeError(f"{words}, wanted text or an object; there are {', '.join(episode.data) or 'no data'}")
        return found if isinstance(found, str) else json.dumps(found)

    def close(self) -> None:
        """Stop the processes."""
        self._pool.close()


def fenced(text: str) -> str:
    """Return the content of the last block between fences, or the whole text where there is none.

    A fence is a line, so no line of a JSON text is one: its texts have no line ends.
    """
    found, begun = text, None
    for fence in _FENCE.finditer(text):
        if begun is None:
            begun = fence
        elif len(fence[1]) >= len(begun[1]) and not fence[2].strip():
            found, begun = text[begun.end() + 1 : fence.start()], None
    return found


def fits(text: str, schema: str) -> str:
    """Return `fits`, `parsed` or an empty text. It runs in a grader process."""
    import jsonschema

    try:
        value: Any = json.loads(text, parse_constant=_refused)
    except (ValueError, RecursionError):
        return ""
    wanted = json.loads(schema)
    kind = jsonschema.validators.validator_for(wanted, default=jsonschema.Draft202012Validator)
    kind.check_schema(wanted)
    return "fits" if kind(wanted).is_valid(value) else "parsed"


def _refused(name: str) -> None:
    """Refuse NaN and Infinity, which are no JSON."""
    raise ValueError(f"{name} is no JSON")
