"""The config of the environment `openenv`, and its facts for planning."""

from typing import Any, Literal

from attrs import field, frozen

from whet.component import EnvironmentFacts
from whet.config.bounds import BYTES, FACTOR, GROUP, PROCESSES, RECORDS, SECONDS, SEED, above, between
from whet.data.model_info import ModelInfo
from whet_data.quoting import template_with
from whet_data.servers import server_address

PROMPT = """You act in an environment, step by step. {actions}

{observation}"""


@frozen(kw_only=True)
class OpenEnvConfig:
    """An environment that an OpenEnv server runs. Each task is a seed, with which the server resets it."""

    url: str = field(validator=server_address)
    """The address of the server, e.g. `http://127.0.0.1:8000`."""
    token_variable: str = ""
    """The environment variable with a token for the server, which is sent as `Authorization: Bearer`. Empty: none."""
    sessions: int = field(default=1, validator=between(1, PROCESSES))
    """Most sessions of the server at a time. Other episodes wait. It must not exceed the server's
    `max_concurrent_envs`, which is 1 if the server does not set it."""
    seconds: float = field(default=60.0, validator=above(0, SECONDS))
    """Deadline of each answer of the server."""
    turns: int = field(default=16, validator=between(1, GROUP))
    """Most responses of the model in an episode. A response with an invalid action counts, too."""
    action: Literal["auto", "text", "json"] = "auto"
    """How the model writes an action. `json`: as a JSON object of the server's schema. `text`: as the value of one
    field. `auto`: as text if the schema has one field that an action needs, and a text or number is its value."""
    action_field: str = ""
    """The field of the action that text is the value of. Empty: the field that an action needs."""
    within: Literal["tag", "response"] = "tag"
    """Where a response has its action. `tag`: in its last `<action>...</action>`. `response`: all of it is the action;
    of JSON, what is between the first and the last brace."""
    observation_field: str = ""
    """The field of the observation that the model sees. Empty: all fields, as JSON; or the only one."""
    observation_characters: int = field(default=4000, validator=between(1, RECORDS))
    """Most characters of an observation that the model sees."""
    message_bytes: int = field(default=1 << 20, validator=between(1, BYTES))
    """Most bytes of a message of the server. A longer one is an error of the server."""
    reward: Literal["sum", "last"] = "sum"
    """What the reward of an episode is: the sum of the rewards of its steps, or the reward of its last step."""
    invalid_weight: float = field(default=0.0, validator=between(-FACTOR, 0))
    """Weight of the reward `invalid`, the number of invalid actions. E.g. -0.1 is a price of 0.1 for each."""
    reset: dict[str, Any] = field(factory=dict)
    """Further arguments of each reset, e.g. `{difficulty: 2}`. The server ignores those that it does not know."""
    prompt: str = field(default=PROMPT, validator=template_with(("actions", "observation"), ("observation",)))
    """The first message. `{actions}` is replaced by how to write an action, `{observation}` by the first one."""
    system: str = ""
    """A system message before the prompt. Empty: none."""
    train_tasks: int = field(default=1_000_000, validator=between(1, RECORDS))
    """Number of seeds in the split `train`."""
    test_tasks: int = field(default=128, validator=between(1, RECORDS))
    """Number of seeds in the split `test`. They differ from the seeds of `train`."""
    seed: int = field(default=0, validator=between(0, SEED))
    """Seed of the tasks. Another seed gives other tasks."""


def facts(config: OpenEnvConfig, model: ModelInfo) -> EnvironmentFacts:
    """Return the facts for planning: the splits. No answer can be voted on."""
    return EnvironmentFacts(states_answers=False, splits=("train", "test"))
