"""The environment `simulated-user`: the policy talks to a user that a further model plays.

    scenario -> user: opening -> policy -> user -> policy ... -> user: [END], or `turns` responses
             -> "Did the assistant give you what you wanted?" -> "Satisfied: yes" -> reward

The user's model is the assistant of its own conversation. The policy's responses are the messages of the other side.
The verdict is asked in another conversation, with a quoted transcript, so that no response is next to the question.
"""

import re
from collections.abc import Mapping, Sequence

from whet.data.messages import Conversation, Message, conversation
from whet.data.randomness import derive_seed
from whet.data.records import GOLD, Task
from whet.errors import ContextFull, DataError, EpisodeError
from whet.interfaces.environment import Model, Responder
from whet.interfaces.undecided import note
from whet_data.quoting import answer_line, filled, quoted, without_markers
from whet_data.readers import Row
from whet_data.tasks import DatasetTasks
from whet_env_dialogue.config import SimulatedUserConfig

UNWRITTEN = "(The simulated user writes the first message.)"
"""The prompt of a task without an opening, for records. No model sees it."""


class SimulatedUser:
    """The environment `simulated-user`. A split is loaded when it is first used."""

    def __init__(self, config: SimulatedUserConfig, roles: Mapping[str, Responder]) -> None:
        self._config, self._user = config, roles[config.role]
        self._tasks = DatasetTasks(config, self._task)

    @property
    def reward_weights(self) -> Mapping[str, float]:
        """Return the weights of `satisfied` and, with a right answer, of `gold`. `turns` has weight 0."""
        gold = {"gold": self._config.gold_weight} if self._config.gold else {}
        return {"satisfied": self._config.satisfied_weight, **gold, "turns": 0.0}

    def tasks(self, split: str) -> Sequence[Task]:
        """Return the tasks of a split. Raises `DataError` with file and line."""
        return self._tasks(split)

    async def run(self, task: Task, model: Model) -> Mapping[str, float]:
        """Play one conversation, then ask the user for a verdict. Returns the rewards.

        Raises `DataError` if the conversation leaves no room for a message in the positions of the user's model.
        """
        *before, first = task.prompt
        text = first.text if first.text != UNWRITTEN else await self._message(task, model, ())
        if not text:
            raise EpisodeError("the simulated user began with an empty message")
        asked, talk = [*before, Message("user", text)], list[Message]()
        while text:
            try:
                reply = await model.reply(asked)
            except ContextFull:
                if not talk:
                    raise
                break
            talk += [Message("user", text), Message("assistant", reply.text)]
            if len(talk) >= 2 * self._config.turns:
                break
            text = await self._message(task, model, tuple(talk))
            asked = [Message("user", text)]
        rewards = {"satisfied": await self._satisfied(task, model, talk), "turns": len(talk) / 2}
        if self._config.gold:
            rewards["gold"] = float(self._is_right(talk[-1].text, task.data[GOLD]))
        return rewards

    def close(self) -> None:
        """Do nothing: no resource is held."""

    async def _message(self, task: Task, model: Model, talk: Conversation) -> str:
        """Return the next message of the user. Empty: the user ends the conversation."""
        config = self._config
        played = {"scenario": task.data["scenario"], "end": config.end}
        swapped = [
            Message("user", without_markers(message.text)) if message.role == "assistant" else
            Message("assistant", message.text) for message in talk
        ]  # fmt: skip
        reply = await self._user.reply(
            [Message("user", filled(config.instructions, played)), *swapped],
            seed=derive_seed(model.episode.seed, config.role, len(talk)),
            max_tokens=config.max_tokens, temperature=config.temperature,
        )  # fmt: skip
        if config.end in reply.text and talk:
            return ""
        return without_markers(reply.text.replace(config.end, "")).strip()

    async def _satisfied(self, task: Task, model: Model, talk: Sequence[Message]) -> float:
        """Return 1 if the user says at the end that it is satisfied, and record its words."""
        config = self._config
        shown = "\n".join(
            f"{'You' if message.role == 'user' else 'Assistant'}:\n{quoted(message.text)}" for message in talk
        )
        asked = filled(config.verdict, {"scenario": task.data["scenario"], "conversation": shown})
        reply = await self._user.reply(
            asked, seed=derive_seed(model.episode.seed, f"{config.role} verdict"),
            max_tokens=config.max_tokens, temperature=0.0, prefill=config.verdict_prefill,
        )  # fmt: skip
        model.record("scenario", task.data["scenario"])
        model.record("verdict", reply.text)
        verdict = answer_line(reply, "Satisfied", "yes|no")
        if verdict is None:
            note(f"the simulated user gave no verdict: {reply.text!r:.200}")
            return 0.0
        return float(verdict.lower() == "yes")

    def _is_right(self, text: str, gold: str) -> bool:
        given, wanted = (" ".join(one.split()).casefold() for one in (text, gold))
        if self._config.gold_match == "exact":
            return given == wanted
        return re.search(rf"(?<!\w){re.escape(wanted)}(?!\w)", given) is not None

    def _task(self, row: Row) -> Task:
        config = self._config
        held = {name: row.record.get(name) for name in (config.scenario, config.opening, config.gold) if name}
        for name in (config.scenario, config.gold):
            if name and (held[name] is None or not str(held[name]).strip()):
                raise DataError(f"the field {name!r} is missing or empty; there are {list(row.record)!r:.120}")
        opening = str(held.get(config.opening) or "").strip() or UNWRITTEN
        system = [Message("system", config.system)] if config.system else []
        gold = {GOLD: str(held[config.gold]).strip()} if config.gold else {}
        prompt = conversation([*system, Message("user", opening)])
        return Task(prompt, {"scenario": str(held[config.scenario]), **gold}, id=row.where)
