"""The environment `gymnasium`: a game of text over several turns.

    user       rules, first observation, actions     `reset` with the seed of the task
    assistant  ... <action>right</action>
    user       the next observation, or why the action is illegal; an illegal action changes nothing
    assistant  ...

The games run in sandboxes, so a game that hangs, crashes or uses too much memory cannot harm the run. This is a failure
of infrastructure: the episodes are played again. The driver does not import Gymnasium.
"""

import asyncio
import functools
import itertools
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.resources import files
from typing import Any, Final

from attrs import define, evolve

from whet.data.messages import Conversation, Message
from whet.data.randomness import derive_seed
from whet.data.records import Task
from whet.errors import ContextFull, DataError, EpisodeError, InfrastructureError, WhetError
from whet.interfaces.environment import Model
from whet_data.generated import GeneratedTasks
from whet_data.quoting import filled
from whet_env_gymnasium.actions import Actions, actions_of
from whet_env_gymnasium.config import GymnasiumConfig
from whet_env_gymnasium.known import known
from whet_sandbox.open import open_sandbox, why_not
from whet_sandbox.sandbox import ProgramEnded
from whet_sandbox.served import Served, ended, is_installed, with_installed

logger = logging.getLogger(__name__)

_KEPT: Final = 4096
_SEEDS: Final = 1 << 31
_START_SECONDS: Final = 120.0


class Gymnasium:
    """The environment `gymnasium`: rewards `return`, `success` and `illegal`, with the weights of its config."""

    def __init__(self, config: GymnasiumConfig) -> None:
        self._config, self._known = config, known(config.id)
        self._served = _served(config)
        self._facts: Mapping[str, Any] = {}
        self._actions = Actions("choice", ())
        self._keys = itertools.count()
        self._made = functools.lru_cache(maxsize=_KEPT)(self._task)

    @property
    def reward_weights(self) -> Mapping[str, float]:
        """Return the weights of the config. `turns` is recorded only."""
        config = self._config
        weights = {"return": config.return_weight, "success": config.success_weight, "illegal": config.illegal_weight}
        return {**weights, "turns": 0.0}

    def tasks(self, split: str) -> Sequence[Task]:
        """Return the tasks of `train` or `test`. Raises `DataError` where Gymnasium or the game refuses the config."""
        counts = {"train": self._config.train_tasks, "test": self._config.test_tasks}
        if split not in counts:
            raise DataError(f"there is no split {split!r}; there are {', '.join(counts)}")
        self._learn()
        return GeneratedTasks(counts[split], lambda index: self._made(split, index))

    async def run(self, task: Task, model: Model) -> Mapping[str, float]:
        """Play one game. Returns its rewards. Raises `InfrastructureError` where the environment fails."""
        key = next(self._keys)
        process = key % self._config.sandboxes
        game = _Game(self._served, f"{key}", process, self._config.step_seconds)
        try:
            begun = await game.ask({"begin": game.key, "seed": task.data["seed"]})
            if begun["text"] != task.data["observation"]:
                raise EpisodeError(
                    f"{self._config.id} begins otherwise than before with the seed {task.data['seed']}: its beginning "
                    "does not follow from the seed of `reset` alone, so the samples of a group could not be compared"
                )
            return await self._play(task, model, game)
        finally:
            leaving = asyncio.ensure_future(game.ask({"end": game.key}))
            leaving.add_done_callback(lambda done: done.cancelled() or done.exception())
            if not ((own := asyncio.current_task()) and own.cancelling()):  # else its process may be busy for long
                with suppress(InfrastructureError):
                    await leaving

    def close(self) -> None:
        """End all processes."""
        self._served.close()

    async def _play(self, task: Task, model: Model, game: "_Game") -> Mapping[str, float]:
        message: Conversation | str = task.prompt
        total, illegal, turns = 0.0, 0, 0
        last: Mapping[str, Any] = {}
        with suppress(ContextFull):  # the game is then over
            while turns < self._config.turns and illegal < self._config.illegal_actions and not last.get("ended"):
                reply = await model.reply(message)
                turns += 1
                try:
                    told = await game.ask({"act": game.key, "action": self._actions.read(reply.text)})
                    if told.get("illegal"):
                        raise ValueError("The environment has no such action.")
                except ValueError as error:
                    illegal += 1
                    message = f"Illegal action. {error}"
                    continue
                last, total = told, total + told["reward"]
                message = told["text"]
        model.record("end", last.get("text", ""))
        success = float(self._succeeded(total, last))
        return {"return": total, "success": success, "illegal": float(illegal), "turns": float(turns)}

    def _succeeded(self, total: float, last: Mapping[str, Any]) -> bool:
        wanted = self._config.success_return
        if wanted is None and "success" in last:
            return bool(last["success"])
        if wanted is None and self._known is not None and self._known.ends_well:
            return bool(last.get("terminated"))
        if wanted is None:
            wanted = self._facts["threshold"]
        if wanted is None:
            return total > 0
        # a game that was broken off has not paid for the steps that it lacks
        return total >= wanted and (wanted > 0 or bool(last.get("ended")))

    def _learn(self) -> None:
        """Request the facts about the environment, once."""
        if not self._facts:
            facts = self._served.greeting()
            if "kind" not in facts:
                raise DataError(facts.get("refused") or f"{self._config.id} cannot be made: {facts.get('raised')}")
            words = self._config.actions or (self._known.actions if self._known else ())
            self._actions = actions_of(facts, words)
            self._facts = facts
            self._warn_of_costly_steps()

    def _warn_of_costly_steps(self) -> None:
        """Warn where no play is worth more than a good game: steps cost reward, and nothing else counts."""
        config = self._config
        costly = (self._known is not None and self._known.ends_well) or (self._facts["threshold"] or 0) < 0
        if costly and config.return_weight > 0 and config.illegal_weight >= 0:
            logger.warning(
                f"{config.id}: steps cost reward, so {config.illegal_actions} illegal actions are worth more than a "
                "good game; train on success (`return_weight: 0, success_weight: 1`), or set an `illegal_weight` that "
                "costs more than a game"
            )

    def _task(self, split: str, index: int) -> Task:
        config = self._config
        seed = derive_seed(config.seed, f"gymnasium-{split}", index) % _SEEDS
        try:
            told = self._served.ask_now({"look": seed}, config.step_seconds)
        except ProgramEnded as error:
            told = {"raised": ended(error)}
        if "text" not in told:
            raise DataError(
                f"{config.id} cannot be begun with the seed {seed}: {told.get('refused') or told.get('raised')}"
            )
        rules = config.rules or (self._known.rules if self._known else f"You play {config.id}.")
        shown = {"rules": rules, "observation": told["text"], "actions": self._actions.named}
        system = (Message("system", config.system),) if config.system else ()
        prompt = (*system, Message("user", filled(config.prompt, shown)))
        return Task(prompt, {"seed": seed, "observation": told["text"]}, id=f"{config.id}-{split}-{index}")


@define
class _Game:
    """One game in one of the processes."""

    served: Served
    key: str
    process: int
    seconds: float

    async def ask(self, question: Mapping[str, Any]) -> Any:
        """Return the answer of the environment. Raises `InfrastructureError`."""
        try:
            asked = asyncio.ensure_future(self.served.ask(question, self.seconds, self.process))
            asked.add_done_callback(lambda done: done.cancelled() or done.exception())  # it may outlive its game
            told = await asyncio.shield(asked)  # to cancel a question would end the games of others, too
        except ProgramEnded as error:
            raise InfrastructureError(f"an environment of Gymnasium failed: {ended(error)}") from error
        if reason := told.get("raised") or told.get("refused"):
            raise InfrastructureError(f"an environment of Gymnasium failed: {reason}")
        if told.get("lost"):
            raise InfrastructureError("the process of this game has ended, with another game")
        return told


def problem(config: GymnasiumConfig) -> tuple[str, str] | None:
    """Return the wrong field and the reason, if the game cannot be played on this machine."""
    chosen = config.sandbox
    if reason := why_not(chosen):
        return "sandbox", f"no game can be played in the sandbox {chosen.component.name!r} on this machine: {reason}"
    if not is_installed(chosen, "gymnasium"):
        return "use", "Gymnasium is not installed where the sandbox looks; run `pip install gymnasium`"
    key = repr((config.id, config.options, config.actions, config.observation, config.show, chosen))
    if key not in _REFUSALS:
        environment = Gymnasium(evolve(config, sandboxes=1))
        try:
            environment.tasks("train")[0]
            _REFUSALS[key] = None
        except WhetError as error:
            _REFUSALS[key] = ("id", str(error))
        finally:
            environment.close()
    return _REFUSALS[key]


_REFUSALS: dict[str, tuple[str, str] | None] = {}


def _served(config: GymnasiumConfig) -> Served:
    template = config.observation
    if not template and (texts := known(config.id)):
        template = texts.observation
    setup = {
        "id": config.id, "options": config.options, "template": template,
        "render": config.show in ("auto", "render"),
        "observation": config.show in ("auto", "observation"),
    }  # fmt: skip
    sandbox = open_sandbox(with_installed(config.sandbox), config.limits, at_once=config.sandboxes)
    code = files("whet_env_gymnasium.inside").joinpath("player.py").read_text()
    return Served(sandbox, code, setup, processes=config.sandboxes, start_seconds=_START_SECONDS)
