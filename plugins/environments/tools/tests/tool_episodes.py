"""Episodes of the environment `tool-use` for tests."""

import asyncio
import json
from pathlib import Path

from attrs import evolve

from whet.config.structure import structure
from whet.plugins.registry import load_plugins
from whet_env_tools.config import ToolUseConfig
from whet_env_tools.environment import ToolUse
from whet_testing.fakes import FakeModel

FILE = Path(__file__).with_name("some_tools.py")
RECORDS = ({"question": "What is 6*7?", "answer": "42"}, {"question": "Which river?", "answer": ["Meuse", "the Maas"]})


def made(folder, *functions, records=RECORDS, **settings):
    """Return the environment with functions of `some_tools`."""
    path = folder / "tasks.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    named = {"functions": [f"{FILE}:{name}" for name in functions]} if functions else {}
    document = {"dataset": str(path), "calls_by": "text", **named, **settings}
    return ToolUse(structure(document, ToolUseConfig, load_plugins()))


def call(name, **arguments):
    """Return a call as the model writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


async def episode(environment, *texts, task=0, seed=1):
    """Play an episode by a script; return its rewards and the results of calls that the model saw."""
    left = list(texts)
    model = FakeModel(lambda messages: left.pop(0) if len(left) > 1 else left[0])
    model.episode = evolve(model.episode, seed=seed)
    rewards = dict(await environment.run(environment.tasks("test")[task], model))
    return rewards, [message.text for message in model.messages[2:] if message.role in ("user", "tool")]


def played(environment, *texts, task=0):
    """Play an episode, and close the environment."""
    try:
        return asyncio.run(episode(environment, *texts, task=task))
    finally:
        environment.close()


def result(*texts):
    """Return results as the model sees them."""
    return "\n".join(f"<tool_response>\n{text}\n</tool_response>" for text in texts)
