"""The config of the environment `gymnasium`, and its facts for planning."""

from typing import Any, Literal

from attrs import field, frozen, validators

from whet.component import EnvironmentFacts, Selection
from whet.config.bounds import FACTOR, GROUP, PROCESSES, RECORDS, SEED, between
from whet.config.sections import selection
from whet.data.model_info import ModelInfo
from whet_data.quoting import template_with
from whet_sandbox.limits import Limits

PROMPT = """{rules}

{observation}

Actions: {actions}
Answer with one action between <action> and </action>."""


@frozen
class GymnasiumConfig:
    """An environment of Gymnasium as a game of text: the model reads what there is, and answers with an action."""

    id: str = field(validator=validators.min_len(1))
    """The environment's id, e.g. `FrozenLake-v1`; `my_module:MyEnvironment-v0` imports a module first."""
    options: dict[str, Any] = field(factory=dict)
    """What `gymnasium.make` gets besides, e.g. `{is_slippery: false}` or `{max_episode_steps: 50}`."""
    rules: str = ""
    """The rules as text. Empty: those that come with this plugin (Blackjack, CliffWalking, FrozenLake, Taxi), else one
    sentence with the id."""
    actions: list[str] = field(factory=list)
    """A word for each action, in the environment's order, e.g. `[left, down, right, up]`. Empty: the words that come
    with this plugin, else numbers from 0."""
    observation: str = ""
    """A template for observations that are numbers, with their positions: `Your cards sum to {0}.` Empty: the one that
    comes with this plugin, else the observation as Python writes it."""
    show: Literal["auto", "render", "observation"] = "auto"
    """What the model sees: the environment's own text (`render_mode: ansi`), or the observation. `auto`: both where
    this plugin has a template, else the text where there is one. What is coloured stands in brackets."""
    prompt: str = field(default=PROMPT, validator=template_with(("rules", "observation", "actions"), ("observation",)))
    """The first message. `{rules}`, `{observation}` and `{actions}` are replaced."""
    system: str = ""
    """A system message before the prompt. Empty: none."""
    turns: int = field(default=32, validator=between(1, GROUP))
    """Most responses of the model in an episode. The game then ends as it stands."""
    illegal_actions: int = field(default=3, validator=between(1, GROUP))
    """The game ends with this many responses without a legal action. Each is told to the model, and changes nothing."""
    return_weight: float = field(default=1.0, validator=between(-FACTOR, FACTOR))
    """Weight of the reward `return`, the sum of the environment's rewards."""
    success_weight: float = field(default=0.0, validator=between(-FACTOR, FACTOR))
    """Weight of the reward `success`, 0 or 1."""
    illegal_weight: float = field(default=0.0, validator=between(-FACTOR, FACTOR))
    """Weight of the reward `illegal`, the number of responses without a legal action. Below 0 it is a penalty."""
    success_return: float | None = field(default=None, validator=validators.optional(between(-FACTOR, FACTOR)))
    """The return from which an episode is a success. None: the environment's own `is_success` or `success`; else, in
    CliffWalking and Taxi, that the game came to its end; else the return at which the environment is registered as
    solved; else a return above 0. Where it is not above 0, the game must also have come to its end."""
    seed: int = field(default=0, validator=between(0, SEED))
    """Seed of the tasks. Another seed gives other tasks."""
    train_tasks: int = field(default=1_000_000, validator=between(1, RECORDS))
    """Tasks in the split `train`. Each is a seed of `reset`."""
    test_tasks: int = field(default=64, validator=between(1, RECORDS))
    """Tasks in the split `test`, of other seeds. An environment without randomness has the same game in all of them."""
    sandboxes: int = field(default=2, validator=between(1, PROCESSES))
    """Processes that play, each in a sandbox. Each plays many games."""
    step_seconds: float = field(default=60.0, validator=between(1, 3600))
    """Most time of one step. An environment that takes longer is stopped, and its episodes are played again."""
    memory_mib: int = field(default=1024, validator=between(64, 1 << 24))
    """Most memory of one process, in MiB."""
    sandbox: Selection = selection("sandboxes", "namespaces")
    """Where games are played. `namespaces` without `python` and `packages` shows what is installed beside whet. So
    Gymnasium may also lie in another environment: set both to that environment's."""

    @property
    def limits(self) -> Limits:
        """Return the limits of a process. It plays as long as the run lasts."""
        return Limits(cpu_seconds=1.0e6, wall_seconds=self.step_seconds, memory_mib=self.memory_mib)


def facts(config: GymnasiumConfig, model: ModelInfo) -> EnvironmentFacts:
    """Return the facts for planning: the splits."""
    return EnvironmentFacts(states_answers=False, splits=("train", "test"))
