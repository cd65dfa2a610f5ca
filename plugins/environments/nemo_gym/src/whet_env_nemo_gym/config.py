"""The config of the environment `nemo-gym`, and its facts for planning."""

from typing import Any

from attrs import field, frozen, validators

from whet.component import EnvironmentFacts
from whet.config.bounds import BYTES, GROUP, PROCESSES, RECORDS, SECONDS, above, between
from whet.data.model_info import ModelInfo
from whet_data.servers import server_address


def _addresses(instance: object, attribute: Any, value: dict[str, str]) -> None:
    for address in value.values():
        server_address(instance, attribute, address)


def _not_taken(instance: object, attribute: Any, value: tuple[str, ...]) -> None:
    if taken := {"reward", "turns", "calls"} & set(value):
        raise ValueError(f"has {sorted(taken)}, which are recorded already; leave them out")


@frozen(kw_only=True)
class NemoGymConfig:
    """Tasks of NeMo Gym, played with a resources server, or by agent servers."""

    url: str = field(default="", validator=validators.or_(validators.in_([""]), server_address))
    """The address of a resources server, e.g. `http://127.0.0.1:8000`. It runs the tools of the records that no agent
    server plays, and verifies their responses. Empty: there are no such records."""
    agents: dict[str, str] = field(factory=dict, validator=_addresses)
    """The address of each agent server by its name, e.g. `{simple_agent: "http://127.0.0.1:8001"}`. The `agent_ref` of
    a record names the server that plays it. The agents call the model at `endpoint.host` and `endpoint.port`."""
    dataset: str | dict[str, str] = field(validator=validators.min_len(1), metadata={"path": True})
    """A JSONL file of NeMo Gym, a folder with one file for each split, or a name on the Hugging Face hub; or one file
    for each split, e.g. `{train: a.jsonl, test: b.jsonl}`. A single file is used for every split."""
    subset: str = ""
    """The subset of a hub data set that has several subsets."""
    token_variable: str = ""
    """The environment variable with a token for the servers, which is sent as `Authorization: Bearer`. Empty: none."""
    system: str = ""
    """A system message before the input of a record. Empty: none."""
    turns: int = field(default=16, validator=between(1, GROUP))
    """Most responses of the model in an episode. Agent servers have limits of their own."""
    sessions: int = field(default=64, validator=between(1, PROCESSES))
    """Most episodes at a time that talk to servers. Others wait."""
    seconds: float = field(default=60.0, validator=above(0, SECONDS))
    """Deadline of each answer of the resources server."""
    agent_seconds: float = field(default=1800.0, validator=above(0, SECONDS))
    """Deadline of an episode that an agent server plays."""
    reply_bytes: int = field(default=8 << 20, validator=between(1, BYTES))
    """Most bytes of an answer of a server. A longer one is an error of the server."""
    tool_characters: int = field(default=4000, validator=between(1, RECORDS))
    """Most characters of a tool's answer that the model sees."""
    reasoning_end: str = "</think>"
    """What ends the reasoning in a response. The server gets what stands before the last one as reasoning, and the rest
    as the message. Empty: all is the message."""
    components: tuple[str, ...] = field(default=(), validator=_not_taken)
    """Names in `reward_components` of the server's answers that are recorded as rewards of weight 0."""
    max_records: int = field(default=0, validator=between(0, RECORDS))
    """Use only the first records of a split, at most this many. 0: all."""
    max_bad_records: float = field(default=0.0, validator=[validators.ge(0), validators.le(1)])
    """Largest share of records that may be left out because they have no `responses_create_params`, or because no
    server plays them."""

    def __attrs_post_init__(self) -> None:
        if not self.url and not self.agents:
            raise ValueError("names no server: wanted the `url` of a resources server, or `agents`")


def facts(config: NemoGymConfig, model: ModelInfo) -> EnvironmentFacts:
    """Return the facts for planning: the splits that are named. No answer can be voted on."""
    splits = tuple(config.dataset) if isinstance(config.dataset, dict) else None
    return EnvironmentFacts(states_answers=False, splits=splits)
