"""The environment `rubric-judge`: plays the tasks of a data set or another environment, and asks a model for a score.

    task -> episode, recorded -> prompt with rubric and quoted conversation -> judge writes ... "Score: 7" -> reward
                              -> the environment's own rewards

With `compare: rank`, the judge gets two responses of a group at a time, in both orders: "Better: A".

The judge reads the first sequence of an episode, up to the model's last response. Its words are recorded in the episode
under the name of the reward. The words of comparisons are not recorded: they belong to no single episode.
"""

import asyncio
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from hashlib import blake2b
from statistics import mean, median
from typing import Any, TypeVar

from whet.data.messages import Conversation, Message, conversation
from whet.data.randomness import derive_seed
from whet.data.records import Episode, Reply, Task, gold_answer
from whet.errors import EpisodeError
from whet.interfaces.environment import Model, Responder
from whet.interfaces.undecided import note
from whet_data.quoting import filled, quoted
from whet_env_judge.config import Criterion, RubricJudgeConfig
from whet_env_judge.judged import Judged, Recorder
from whet_env_judge.ranking import Pair, pairs_of, win_rates
from whet_env_judge.verdicts import preference_in, score_in

T = TypeVar("T")


class RubricJudge(Judged):
    """The environment `rubric-judge`, around a data set of prompts or another environment."""

    def __init__(self, config: RubricJudgeConfig, roles: Mapping[str, Responder]) -> None:
        super().__init__(config, roles, config.criteria)
        self._config, self._judge = config, roles[config.role]
        if config.compare == "rank":
            self.group_rewards = self._ranks

    @property
    def _unread(self) -> str:
        """Return the name of the reward of weight 0 that is the share of comparisons without a readable verdict."""
        return f"{self._config.role}_unreadable"

    @property
    def reward_weights(self) -> Mapping[str, float]:
        """Weights of the criteria times `judge_weight`, and the environment's weights times `environment_weight`."""
        factor = self._config.judge_weight
        judged = {name: factor * criterion.weight for name, criterion in self._config.criteria.items()}
        unread = {self._unread: 0.0} if self._config.compare == "rank" else {}
        return {**self.own_weights(), **unread, **judged}

    async def run(self, task: Task, model: Model) -> Mapping[str, float]:
        """Play the episode, then ask the judge, unless it compares groups. Returns all rewards.

        Raises `DataError` if the prompt of the judge leaves no room for a response in the judge's positions.
        """
        recorder = Recorder(model)
        own = await self.played(task, recorder)
        if self._config.compare == "rank":
            return own
        if not recorder.messages:
            raise EpisodeError("there is nothing to judge: the first sequence of the episode has no response")
        criteria = self._config.criteria
        if self._passed(own):
            return {**own, **dict.fromkeys(criteria, 1.0)}
        scored = (self._score(task, recorder, name, criterion) for name, criterion in criteria.items())
        return {**own, **dict(zip(criteria, await _all(scored), strict=True))}

    def _passed(self, own: Mapping[str, float]) -> bool:
        """Return whether the environment has decided already, so that the judge need not be asked."""
        if (name := self._config.unless) and own and name not in own:
            raise EpisodeError(f"`unless` names the reward {name!r}; the environment has {', '.join(own) or 'none'}")
        return bool(name) and own.get(name, 0.0) >= 1

    async def _score(self, task: Task, recorder: Recorder, name: str, criterion: Criterion) -> float:
        """Return the reward for one criterion, and record the judge's words."""
        config, messages = self._config, tuple(recorder.messages)
        asked = filled(
            config.template,
            {
                "rubric": criterion.text,
                "prompt": self._shown(messages[:-1]),
                "response": self._quoted(messages[-1]),
                "conversation": self._shown(messages),
                "gold": gold_answer(task) or "none",
                "lowest": f"{config.lowest:g}",
                "highest": f"{config.highest:g}",
            },
        )
        replies = await self._ask(asked, derive_seed(recorder.episode.seed, name))
        texts = [reply.text for reply in replies]
        recorder.record(name, texts[0] if len(texts) == 1 else texts)
        found = [score_in(reply, config.lowest, config.highest) for reply in replies]
        worst = self._worst(criterion)
        if config.unreadable == "lowest":
            found = [(config.highest if worst else config.lowest) if score is None else score for score in found]
        scores = [score for score in found if score is not None]
        if not scores:
            note(f"the judge gave no score from {config.lowest:g} to {config.highest:g}: {texts[-1]!r:.200}")
            return worst
        score = mean(scores) if config.combine == "mean" else median(scores)
        return (score - config.lowest) / (config.highest - config.lowest)

    def _worst(self, criterion: Criterion) -> float:
        """Return the reward of a criterion that adds least to the training reward."""
        return 1.0 if criterion.weight * self._config.judge_weight < 0 else 0.0

    async def _ranks(self, task: Task, episodes: Sequence[Episode]) -> Sequence[Mapping[str, float]]:
        """Return the share of comparisons that each episode wins, and the rewards of the wrapped environment.

        Equal conversations are one: they get equal rewards, whatever their order in the group.
        """
        own = await self.compared_within(task, episodes)
        talks = [conversation({"role": role, "content": content} for role, content in e.messages) for e in episodes]
        prompt, rests = _divided(talks)
        before, shown = self._shown(prompt), [self._shown(rest) for rest in rests]
        distinct = sorted(set(shown), key=lambda text: _seed(before, text))
        pairs = pairs_of(len(distinct), self._config.pairs)
        rewards: list[dict[str, float]] = [dict(further) for further in own]
        unread = [list[float]() for _ in distinct]
        for name, criterion in self._config.criteria.items():
            values = {"rubric": criterion.text, "prompt": before, "gold": gold_answer(task) or "none"}
            found = await _all(self._compare(name, values, distinct[i], distinct[j]) for i, j in pairs)
            won: dict[Pair, float] = {}
            for pair, verdicts in zip(pairs, found, strict=True):
                if readable := [verdict for verdict in verdicts if verdict is not None]:
                    won[pair] = mean(readable)
                for i in pair:
                    unread[i].append(verdicts.count(None) / len(verdicts))
            rates = dict(zip(distinct, win_rates(len(distinct), won), strict=True))
            lost = {distinct[i] for pair in pairs for i in pair} - {distinct[i] for pair in won for i in pair}
            for reward, text in zip(rewards, shown, strict=True):
                reward[name] = self._worst(criterion) if text in lost else rates[text]
        shares = {text: mean(share or [0.0]) for text, share in zip(distinct, unread, strict=True)}
        return [{**reward, self._unread: shares[text]} for reward, text in zip(rewards, shown, strict=True)]

    async def _compare(self, name: str, values: Mapping[str, str], one: str, other: str) -> list[float | None]:
        """Return 1 for each verdict for `one`, and 0 for each verdict for `other`. Both orders are asked."""

        async def verdicts(first: str, second: str) -> list[float | None]:
            asked = filled(self._config.comparison, {**values, "first": first, "second": second})
            return [preference_in(reply) for reply in await self._ask(asked, derive_seed(_seed(asked), name))]

        forwards, backwards = await _all([verdicts(one, other), verdicts(other, one)])
        return [*forwards, *(None if verdict is None else 1 - verdict for verdict in backwards)]

    async def _ask(self, text: str, seed: int) -> list[Reply]:
        """Return the votes of the judge on a prompt."""
        config = self._config
        how: dict[str, Any] = {
            "max_tokens": config.max_tokens,
            "temperature": config.temperature,
            "prefill": config.prefill,
        }
        seeds = [derive_seed(seed, "vote", vote) for vote in range(config.votes)]
        return await _all(self._judge.reply(text, seed=each, **how) for each in seeds)

    def _quoted(self, message: Message) -> str:
        return quoted(message.text, self._config.max_characters)

    def _shown(self, messages: Conversation) -> str:
        """Return messages as quoted text. A single response of the model stands without its role."""
        if len(messages) == 1 and messages[0].role == "assistant":
            return self._quoted(messages[0])
        return "\n".join(f"{message.role}:\n{self._quoted(message)}" for message in messages)


def _divided(talks: Sequence[Conversation]) -> tuple[Conversation, list[Conversation]]:
    """Return the messages before the first response, and the rest of each conversation. If they differ: no messages,
    and whole conversations.
    """
    begins = [next((i for i, m in enumerate(talk) if m.role == "assistant"), len(talk)) for talk in talks]
    prompts = {talk[:begin] for talk, begin in zip(talks, begins, strict=True)}
    if len(prompts) != 1:
        return (), list(talks)
    return prompts.pop(), [talk[begin:] for talk, begin in zip(talks, begins, strict=True)]


def _seed(*texts: str) -> int:
    """Return a seed that depends on texts alone."""
    digest = blake2b(digest_size=8)
    for text in texts:
        digest.update(f"{len(text)}:{text}".encode(errors="replace"))
    return int.from_bytes(digest.digest(), "little")


async def _all(calls: Iterable[Awaitable[T]]) -> list[T]:
    """Await calls together, and return their results. If one fails, the others are cancelled."""
    running = [asyncio.ensure_future(call) for call in calls]
    try:
        return await asyncio.gather(*running)
    finally:
        for one in running:
            one.cancel()
