"""Environments whose rewards have an address, or follow the group or a curriculum. A random model can learn each."""

import os
import signal

from attrs import evolve, frozen

from whet import Component, EnvironmentFacts, RoleNeed, Task, hookimpl
from whet_ops.curriculum import PassRateCurriculum
from whet_testing.processes import descendants


@frozen
class Nothing:
    """Nothing to set."""


@frozen
class TurnsConfig:
    """Several turns, each with a wish of its own."""

    per_turn: bool = True
    """Whether each turn has its own reward, or the episode their sum."""
    turns: int = 4


def share(text, wanted="02468"):
    """Return the share of wanted letters among eight."""
    return sum(letter in wanted for letter in text) / 8


class Duel:
    """A game of two players against each other: who writes more even digits wins what the other one loses."""

    reward_weights = {"even": 0.0}

    def __init__(self, config):
        pass

    def tasks(self, split):
        return [Task(f"Say {n}") for n in range(50)]

    async def run(self, task, model):
        white, black = model.fork("white"), model.fork("black")
        first = share((await white.reply(task.prompt)).text)
        second = share((await black.reply(task.prompt)).text)
        white.reward("won", first - second, of="agent")
        black.reward("won", second - first, of="agent")
        return {"even": (first + second) / 2}

    def close(self):
        pass


class Turns(Duel):
    """Turns that want even digits and turns that want odd ones, in an order that the task does not tell."""

    reward_weights = {}

    def __init__(self, config):
        self._config = config

    async def run(self, task, model):
        total = 0.0
        for turn in range(self._config.turns):
            asked = task.prompt if turn == 0 else f"Now {'2468' if turn % 2 == 0 else '1357'}"
            wished = share((await model.reply(asked)).text, "02468" if turn % 2 == 0 else "13579")
            total += wished
            if self._config.per_turn:
                model.reward("wished", wished)
        return {} if self._config.per_turn else {"wished": total}


class Ranked(Duel):
    """The sample with the most even digits of its group is worth 1, the one with the fewest 0."""

    reward_weights = {"even": 0.0}

    async def run(self, task, model):
        return {"even": share((await model.reply(task.prompt)).text)}

    async def group_rewards(self, task, episodes):
        found = [episode.rewards["even"] for episode in episodes]
        return [{"rank": sum(own > other for other in found) / max(len(found) - 1, 1)} for own in found]


class Climbing(Duel):
    """Wants as many even digits as the difficulty tells, which rises as episodes pass."""

    reward_weights = {"even": 0.0}

    def __init__(self, config):
        curriculum = PassRateCurriculum(1, 8, up=0.5, window=4, passes=lambda episode: episode.rewards["enough"] == 1)
        self.difficulty, self.observe = curriculum.difficulty, curriculum.observe
        self.state, self.load = curriculum.state, curriculum.load

    def adapted(self, task, difficulty):
        return evolve(task, data={"answer": str(int(difficulty))})

    async def run(self, task, model):
        even = share((await model.reply(task.prompt)).text) * 8
        assert task.data["answer"] == str(int(model.episode.difficulty))
        return {"even": even, "enough": float(even >= model.episode.difficulty)}


@frozen
class MatchConfig:
    """A game against a further model."""

    temperature: float = 1.0
    """Of the opponent."""
    kill_at: int = 0
    """The number of the episode, over the whole process, before which the opponent's process is killed; 0: none."""


class Match(Duel):
    """A game against an opponent that is no pupil: it is a role, with weights that stay or follow the policy."""

    def __init__(self, config, roles):
        self._opponent, self._temperature = roles["opponent"], config.temperature
        self._left = config.kill_at

    async def run(self, task, model):
        own = share((await model.reply(task.prompt)).text)
        self._left -= 1
        if self._left == 0:
            for process in descendants():
                if process.command.endswith("opponent-0"):
                    os.kill(process.pid, signal.SIGKILL)
        answer = await self._opponent.reply(task.prompt, seed=model.episode.seed, temperature=self._temperature)
        model.record("opponent", answer.text)
        return {"won": own - share(answer.text), "even": own}


def match_facts(config, model):
    return EnvironmentFacts(roles={"opponent": RoleNeed(generates=True)})


@hookimpl
def whet_environments():
    return [
        Component("duel", Nothing, ":Duel"),
        Component("turns", TurnsConfig, ":Turns"),
        Component("ranked", Nothing, ":Ranked"),
        Component("climbing", Nothing, ":Climbing"),
        Component("match", MatchConfig, ":Match", ":match_facts"),
    ]
