"""The rules that every environment must keep.

    class TestArithmetic(EnvironmentContract):
        splits = ("train", "test")

        def make(self) -> Arithmetic:
            return Arithmetic(ArithmeticConfig(terms=3))

        def gold(self, task: Task) -> str:
            return task.data["answer"]

The tests prove two properties: right answers score full reward, and hostile answers neither raise, nor hang, nor score
full reward.
"""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest

from whet.data.messages import ROLES, Message
from whet.data.records import Task
from whet.errors import DataError
from whet.interfaces.environment import Environment, checked_rewards, stated_answer, states_answers
from whet_testing.deadline import deadline
from whet_testing.fakes import FakeModel
from whet_testing.hostile import HOSTILE_ANSWERS

Gold = str | Sequence[str] | None
BUILTINS = (str, int, float, bool, bytes, type(None))


class EnvironmentContract:
    """Inherit this class and override `make`. Override `gold` too where right answers are known."""

    splits: tuple[str, ...] = ("train",)
    """Splits of the environment."""
    full_reward: float = 1.0
    """Weighted sum of the rewards for a right answer."""
    deadline_seconds: float = 30.0
    """Deadline of an episode in which the model answers at once."""
    gold_samples: int = 16
    """Number of tasks of each split that are answered with `gold`."""
    states_answers: bool | None = None
    """`EnvironmentFacts.states_answers` of the component; None skips the comparison."""

    def make(self) -> Environment:
        """Build the environment under test."""
        raise NotImplementedError("override `make` to build the environment")

    def gold(self, task: Task) -> Gold:
        """Return the right answer of a task, or a right answer for each turn. None skips the tests of right answers."""
        return None

    @pytest.fixture
    def environment(self) -> Iterable[Environment]:
        """Yield a fresh environment, and close it after the test."""
        environment = self.make()
        yield environment
        environment.close()

    def test_it_is_an_environment(self, environment: Environment) -> None:
        assert isinstance(environment, Environment)

    def test_it_states_answers_as_its_facts_say(self, environment: Environment) -> None:
        if self.states_answers is None:
            pytest.skip("its facts do not say whether it states answers")
        assert states_answers(environment) == self.states_answers

    def test_tasks_of_a_split_are_a_sequence(self, environment: Environment) -> None:
        for split in self.splits:
            tasks = environment.tasks(split)
            assert len(tasks) > 0, f"the split {split!r} is empty"
            assert isinstance(tasks[0], Task)
            assert isinstance(tasks[len(tasks) - 1], Task)

    def test_the_index_past_the_end_raises_IndexError(self, environment: Environment) -> None:
        for split in self.splits:
            tasks = environment.tasks(split)
            with pytest.raises(IndexError):
                tasks[len(tasks)]

    def test_an_item_is_the_same_every_time(self, environment: Environment) -> None:
        for split in self.splits:
            tasks = environment.tasks(split)
            backwards = {i: tasks[i] for i in reversed(_sample(len(tasks), 5))}
            assert all(tasks[i] == task for i, task in backwards.items())

    def test_a_fresh_instance_has_the_same_items(self, environment: Environment) -> None:
        other = self.make()
        for split in self.splits:
            one, two = environment.tasks(split), other.tasks(split)
            assert len(one) == len(two)
            assert [one[i] for i in _sample(len(one), 5)] == [two[i] for i in _sample(len(two), 5)]
        other.close()

    def test_an_unknown_split_raises_DataError_naming_the_splits(self, environment: Environment) -> None:
        with pytest.raises(DataError) as caught:
            environment.tasks("no-such-split")
        missing = [split for split in self.splits if split not in str(caught.value)]
        assert not missing, f"the message {str(caught.value)!r} does not name {missing}"

    def test_prompts_are_conversations_that_the_model_can_answer(self, environment: Environment) -> None:
        for task in _tasks(environment, self.splits, 5):
            assert task.prompt, "the prompt is empty"
            assert all(isinstance(m, Message) and m.role in ROLES for m in task.prompt)
            assert task.prompt[-1].role != "assistant", "the prompt ends with the assistant's own words"
            assert any(m.text.strip() for m in task.prompt), "the prompt says nothing"

    def test_task_data_is_builtins(self, environment: Environment) -> None:
        for task in _tasks(environment, self.splits, 5):
            assert _is_plain(task.data), f"{task.data!r:.200} holds something that is no builtin"

    def test_an_episode_gives_finite_named_rewards(self, environment: Environment) -> None:
        for task in _tasks(environment, self.splits, 2):
            assert self._play(environment, task, "I do not know.")

    def test_reward_weights_name_rewards_that_exist(self, environment: Environment) -> None:
        rewards = self._play(environment, environment.tasks(self.splits[0])[0], "I do not know.")
        assert set(environment.reward_weights) <= set(rewards)

    def test_gold_answers_score_full_reward(self, environment: Environment) -> None:
        for task in _tasks(environment, self.splits, self.gold_samples):
            rewards = self._play(environment, task, self._gold_or_skip(task))
            total = _total(environment, rewards)
            assert total == pytest.approx(self.full_reward), f"{task!r:.300} answered with gold gave {rewards}"

    def test_the_same_answer_gives_the_same_rewards(self, environment: Environment) -> None:
        task = environment.tasks(self.splits[0])[0]
        answer = self.gold(task) or "I do not know."
        assert self._play(environment, task, answer) == self._play(environment, task, answer)

    @pytest.mark.parametrize("what", HOSTILE_ANSWERS)
    def test_a_hostile_answer_neither_raises_nor_hangs_nor_wins(self, environment: Environment, what: str) -> None:
        task = environment.tasks(self.splits[0])[0]
        rewards = self._play(environment, task, HOSTILE_ANSWERS[what])
        if self.gold(task) is not None:
            assert _total(environment, rewards) < self.full_reward

    def test_gold_is_an_answer_that_can_be_voted_for(self, environment: Environment) -> None:
        for task in _tasks(environment, self.splits, self.gold_samples):
            gold = self._gold_or_skip(task)
            stated = self._stated(environment, task, gold if isinstance(gold, str) else gold[-1])
            assert stated, f"{task!r:.300} answered with gold {gold!r:.120} is no answer by `final_answer`"

    @pytest.mark.parametrize("what", HOSTILE_ANSWERS)
    def test_what_a_hostile_answer_says_is_stated_in_time(self, environment: Environment, what: str) -> None:
        self._stated(environment, environment.tasks(self.splits[0])[0], HOSTILE_ANSWERS[what])

    def test_an_answer_cut_by_length_is_graded_too(self, environment: Environment) -> None:
        task = environment.tasks(self.splits[0])[0]
        with deadline(self.deadline_seconds, "the episode"):
            checked_rewards(asyncio.run(environment.run(task, FakeModel("Let me think", stop="length"))), "it")

    def test_concurrent_episodes_do_not_disturb_each_other(self, environment: Environment) -> None:
        tasks = _tasks(environment, self.splits[:1], 8)
        answers = [(self.gold(task) or "I do not know.") if i % 2 else "" for i, task in enumerate(tasks)]
        alone = [self._play(environment, task, answer) for task, answer in zip(tasks, answers, strict=True)]

        async def together() -> list[Mapping[str, float]]:
            models = [FakeModel(answer) for answer in answers]
            return await asyncio.gather(*[environment.run(t, m) for t, m in zip(tasks, models, strict=True)])

        with deadline(self.deadline_seconds * 2, "playing 8 episodes at a time"):
            assert [dict(rewards) for rewards in asyncio.run(together())] == alone

    def test_closing_twice_is_safe(self) -> None:
        environment = self.make()
        environment.close()
        environment.close()

    def test_closing_leaves_no_process_behind(self, no_orphans: None) -> None:
        environment = self.make()
        task = environment.tasks(self.splits[0])[0]
        self._play(environment, task, self.gold(task) or "I do not know.")
        environment.close()

    def _gold_or_skip(self, task: Task) -> str | Sequence[str]:
        gold = self.gold(task)
        if gold is None:
            pytest.skip("override `gold` to prove that right answers score full reward")
        return gold

    def _stated(self, environment: Environment, task: Task, answer: str) -> str | None:
        if not states_answers(environment):
            pytest.skip("it has no `final_answer`, so evaluations take no majority votes")
        with deadline(self.deadline_seconds, f"stating the answer of {answer!r:.60}"):
            return stated_answer(environment, (*task.prompt, Message("assistant", answer)))

    def _play(self, environment: Environment, task: Task, answer: str | Sequence[str]) -> dict[str, float]:
        with deadline(self.deadline_seconds, f"an episode answered with {answer!r:.60}"):
            return checked_rewards(asyncio.run(environment.run(task, FakeModel(answer))), "it")


def _total(environment: Environment, rewards: Mapping[str, float]) -> float:
    return sum(environment.reward_weights.get(name, 1.0) * value for name, value in rewards.items())


def _sample(length: int, most: int) -> list[int]:
    """Return at most `most` positions spread over a sequence, the first and the last included."""
    if length <= most:
        return list(range(length))
    return sorted({round(i * (length - 1) / (most - 1)) for i in range(most)})


def _tasks(environment: Environment, splits: Iterable[str], most: int) -> list[Task]:
    found = []
    for split in splits:
        tasks = environment.tasks(split)
        found += [tasks[i] for i in _sample(len(tasks), most)]
    return found


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return all(_is_plain(item) for item in value)
    return type(value) in BUILTINS
