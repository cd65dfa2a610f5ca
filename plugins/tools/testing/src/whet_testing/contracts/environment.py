"""The rules that every environment must keep.

    class TestArithmetic(EnvironmentContract):
        splits = ("train", "test")

        def make(self) -> Arithmetic:
            return Arithmetic(ArithmeticConfig(terms=3))

        def gold(self, task: Task) -> str:
            return task.data["answer"]

The tests prove that right answers score full reward, and that wrong and hostile answers do not. Hostile answers neither
raise nor hang.
"""

import asyncio
import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import pytest
from attrs import evolve

from whet.data.messages import ROLES, Conversation, Message
from whet.data.records import Episode, Group, Task
from whet.errors import ContextFull, DataError
from whet.interfaces.environment import (
    Adaptive,
    Environment,
    GroupRewarding,
    check_weights,
    checked_rewards,
    stated_answer,
    states_answers,
)
from whet.interfaces.state import Stateful, check_ran, states
from whet_testing.another_interpreter import AnotherInterpreter, NotThereError
from whet_testing.deadline import deadline
from whet_testing.fakes import FakeModel
from whet_testing.hostile import HOSTILE_ANSWERS
from whet_testing.resuming import assert_resumes
from whet_testing.watchdog import run_unblocked
from whet_testing.wrong_answers import holds, wrong_variants

Gold = str | Sequence[str] | None
Script = str | Sequence[str] | Callable[[Conversation], str]
Drawn = dict[str, tuple[int, dict[int, Task]]]
"""By split: how many tasks there are, and some of them by position."""
OF_A_PROCESS = (
    "a resumed run, its workers and the next machine would play other tasks. Draw from a seed with "
    "whet.data.randomness.derive_seed, and leave out what differs from process to process: hash(), id(), the order of "
    "a set, the time, `random` without a seed. Fixtures do not run in the other process: where one makes the tasks, "
    "set `test_another_process_has_the_same_items = None` in the class"
)
LATE_SECONDS = 0.1
"""How long a task that an episode leaves behind is watched."""
BUILTINS = (str, int, float, bool, bytes, type(None))


class EnvironmentContract:
    """Inherit this class and override `make`. Override `gold` too where right answers are known."""

    splits: tuple[str, ...] = ("train",)
    """Splits of the environment."""
    full_reward: float = 1.0
    """Weighted sum of the rewards for a right answer. Rewards of `group_rewards` are not in it."""
    deadline_seconds: float = 30.0
    """Deadline of an episode in which the model answers at once."""
    gold_samples: int = 16
    """Number of tasks of each split that are answered with `gold`."""
    states_answers: bool | None = None
    """`EnvironmentFacts.states_answers` of the component; None skips the comparison."""
    answer_in_prompt: bool = False
    """Whether prompts may hold the right answer, as where the model chooses or copies."""
    mentions_win: bool = False
    """Whether a response wins that holds the right answer among others."""
    largest_shared: float = 0.5
    """Largest share of a split's tasks that another split may have too. 1: splits may be equal."""
    most_blocked_seconds: float = 2.0
    """Longest time for which an episode may keep the event loop from turning."""

    def make(self) -> Environment:
        """Build the environment under test."""
        raise NotImplementedError("override `make` to build the environment")

    def gold(self, task: Task) -> Gold:
        """Return the right answer of a task, or a right answer for each turn. None skips the tests of right answers."""
        return None

    def wrong(self, task: Task) -> Sequence[str | Sequence[str]]:
        """Return further wrong responses of which a lenient grader might think that they are right."""
        return ()

    @pytest.fixture
    def environment(self) -> Iterable[Environment]:
        """Yield a fresh environment, and close it after the test."""
        environment = self.make()
        yield environment
        environment.close()

    def test_it_is_an_environment(self, environment: Environment) -> None:
        assert isinstance(environment, Environment)

    def test_its_methods_are_async_only_where_they_are_awaited(self, environment: Environment) -> None:
        one: Any = environment  # a wrong one has methods of other types
        check_ran(one.tasks(self.splits[0]), "`tasks`")
        check_weights(one.reward_weights)
        task = one.tasks(self.splits[0])[0]
        if states_answers(one):
            check_ran(one.final_answer((*task.prompt, Message("assistant", "I do not know."))), "`final_answer`")
        if isinstance(environment, Adaptive):
            check_ran(difficulty := one.difficulty(), "`difficulty`")
            check_ran(one.adapted(task, difficulty), "`adapted`")
            check_ran(one.observe([]), "`observe`")
        _check_awaited("run", lambda: one.run(task, FakeModel("I do not know.")))
        if isinstance(environment, GroupRewarding):
            episode = self._episode(environment, task, "I do not know.", 0)
            _check_awaited("group_rewards", lambda: one.group_rewards(task, [episode]))

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

    def test_another_process_has_the_same_items(
        self, environment: Environment, another_interpreter: AnotherInterpreter
    ) -> None:
        try:
            there = another_interpreter.call(self, "drawn")
        except NotThereError as error:
            pytest.skip(f"`make` needs what only the process of the test has: {error}")
        for split, (length, tasks) in _drawn(environment, self.splits).items():
            found, others = there[split]
            assert found == length, f"{split!r} has {length} tasks, and {found} in another process; {OF_A_PROCESS}"
            changed = [i for i in tasks if tasks[i] != others[i]]
            assert not changed, (
                f"task {changed[0]} of {split!r} is {tasks[changed[0]]!r:.200}, and in another process it is "
                f"{others[changed[0]]!r:.200}; {OF_A_PROCESS}"
            )

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

    def test_prompts_do_not_hold_the_answer(self, environment: Environment) -> None:
        if self.answer_in_prompt:
            return
        for split in self.splits:
            tasks = [task for task in _tasks(environment, [split], self.gold_samples) if self.gold(task) is not None]
            found = [(task, self._answer(environment, task)) for task in tasks]
            held = [(task, answer) for task, answer in found if any(holds(m.text, answer) for m in task.prompt)]
            assert 2 * len(held) <= len(found), (
                f"the prompt holds the right answer in {len(held)} of {len(found)} tasks of {split!r}, for instance "
                f"{held[0][1]!r:.60} in {held[0][0].prompt[-1].text!r:.200}: the model would learn to copy. Keep the "
                "answer in `task.data`; where the model is to choose or to copy, set `answer_in_prompt = True`"
            )

    def test_splits_have_tasks_of_their_own(self, environment: Environment) -> None:
        for one, other in pairwise(self.splits):
            fewer, more = sorted((environment.tasks(one), environment.tasks(other)), key=len)
            there = {repr((more[i].prompt, more[i].data)) for i in range(min(len(more), 5_000))}
            some = [fewer[i] for i in _sample(min(len(fewer), 5_000), 200)]
            shared = sum(repr((task.prompt, task.data)) in there for task in some)
            assert shared <= self.largest_shared * len(some), (
                f"{shared} of {len(some)} tasks of a split are in both {one!r} and {other!r}: an evaluation would "
                "measure what was trained on. Divide the tasks; where there are too few, raise `largest_shared`"
            )

    def test_task_data_is_builtins(self, environment: Environment) -> None:
        for task in _tasks(environment, self.splits, 5):
            assert _is_plain(task.data), f"{task.data!r:.200} holds something that is no builtin"
            assert isinstance(task.id, str), f"the id of {task!r:.200} is {task.id!r:.60}, wanted text: write str(...)"

    def test_its_state_is_stored_and_loaded(self, environment: Environment) -> None:
        self._play(environment, environment.tasks(self.splits[0])[0], "I do not know.")
        saved = states({"the environment": environment})
        if not saved:
            pytest.skip("it has no state")
        again: Any = self.make()
        check_ran(again.load(saved["the environment"]), "`load`")
        again.close()

    def test_an_episode_gives_finite_named_rewards(self, environment: Environment) -> None:
        for task in _tasks(environment, self.splits, 2):
            with deadline(self.deadline_seconds, "an episode"):
                rewards, late = asyncio.run(_watched(environment, task, FakeModel("I do not know.")))
            assert rewards or isinstance(environment, GroupRewarding)
            assert not late, (
                f"`run` has returned, and a task that it started calls model.{min(late)}, which a run refuses; await "
                "the task before `run` returns"
            )

    def test_reward_weights_name_rewards_that_exist(self, environment: Environment) -> None:
        task = environment.tasks(self.splits[0])[0]
        rewards = self._play(environment, task, "I do not know.")
        if isinstance(environment, GroupRewarding):
            episode = self._episode(environment, task, "I do not know.", 0)
            (further,) = asyncio.run(environment.group_rewards(task, [episode]))
            rewards = {**rewards, **further}
        assert set(environment.reward_weights) <= set(rewards)

    def test_gold_answers_score_full_reward(self, environment: Environment) -> None:
        for task in _tasks(environment, self.splits, self.gold_samples):
            rewards = self._play(environment, task, self._gold_or_skip(task))
            total = _total(environment, rewards)
            assert total == pytest.approx(self.full_reward), f"{task!r:.300} answered with gold gave {rewards}"

    def test_wrong_answers_do_not_win(self, environment: Environment) -> None:
        for task in _tasks(environment, self.splits[:1], 4):
            for turns in [*self._wrong_variants(environment, task), *self.wrong(task)]:
                total = _total(environment, self._play(environment, task, _repeating(turns)))
                assert total < self.full_reward, (
                    f"{task!r:.300} has the right answer {self.gold(task)!r:.120}, and the wrong response "
                    f"{turns!r:.200} scores full reward too. Compare whole answers, not parts of the text; where a "
                    "response may list several answers, set `mentions_win = True`"
                )

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
            asyncio.run(played(environment, task, FakeModel("Let me think", stop="length")))

    @pytest.mark.parametrize("room", [1, 2])
    def test_a_full_context_ends_an_episode(self, environment: Environment, room: int) -> None:
        task = environment.tasks(self.splits[0])[0]
        with deadline(self.deadline_seconds, f"an episode whose context has room for {room} answers"):
            try:
                asyncio.run(played(environment, task, FakeModel("Let me think", room=room)))
            except ContextFull:
                assert environment.reward_weights, (
                    "the episode ends without a reward: name the rewards in `reward_weights`, then they are 0, or "
                    "catch ContextFull and grade what there is"
                )

    def test_the_samples_of_a_group_are_graded_alike_in_any_order(self, environment: Environment) -> None:
        if not isinstance(environment, GroupRewarding):
            pytest.skip("it does not compare the samples of a group")
        task = environment.tasks(self.splits[0])[0]
        texts = [self.gold(task) or "I do not know.", "I do not know.", "Let me think.", "", "I do not know."]
        episodes = [self._episode(environment, task, text, i) for i, text in enumerate(texts)]
        for some in (episodes, episodes[:1]):
            with deadline(self.deadline_seconds, f"comparing {len(some)} episodes"):
                forwards = asyncio.run(environment.group_rewards(task, some))
                backwards = asyncio.run(environment.group_rewards(task, some[::-1]))[::-1]
            assert len(forwards) == len(some), "wanted a mapping for each episode"
            for one, again, episode in zip(forwards, backwards, some, strict=True):
                assert checked_rewards(one, "it") == pytest.approx(dict(again))
                assert not set(one) & set(episode.rewards), "the episode has a reward of this name already"

    def test_a_curriculum_changes_tasks_and_not_the_split(self, environment: Environment) -> None:
        missing = [name for name in ("difficulty", "adapted", "observe") if not hasattr(environment, name)]
        assert len(missing) != 1, f"it has a curriculum without the method `{missing[0]}`, so a run would refuse it"
        if not isinstance(environment, Adaptive):
            pytest.skip("it has no curriculum")
        task = environment.tasks(self.splits[0])[0]
        before, difficulty = repr(task), environment.difficulty()
        assert isinstance(environment.adapted(task, difficulty), Task)
        assert environment.adapted(task, difficulty) == environment.adapted(task, difficulty)
        assert repr(environment.tasks(self.splits[0])[0]) == before
        check_ran(environment.observe([]), "`observe`")  # type: ignore[func-returns-value] # a wrong one returns
        assert environment.difficulty() == difficulty

    def test_a_resumed_state_goes_on_as_if_nothing_had_happened(self) -> None:
        environment = self.make()
        if not (isinstance(environment, Stateful) and isinstance(environment, Adaptive)):
            pytest.skip("it has no curriculum with a state")

        def observe(one: Any, step: int) -> float:
            task = one.tasks(self.splits[0])[step]
            answer = self.gold(task) if step % 4 else None
            level = float(one.difficulty())
            episodes = [evolve(self._episode(one, task, answer or "", i), difficulty=level) for i in range(4)]
            one.observe([Group(step, "it", step, tuple(episodes))])
            return float(one.difficulty())

        assert_resumes(self.make, observe, range(64))
        environment.close()

    def test_an_episode_does_not_block_the_others(self, environment: Environment) -> None:
        task = environment.tasks(self.splits[0])[0]
        self._play(environment, task, "I do not know.")  # what is imported or started once may take its time
        for answer in ("I do not know.", self.gold(task) or ""):
            with deadline(self.deadline_seconds, f"an episode answered with {answer!r:.60}"):
                run_unblocked(environment.run(task, FakeModel(_repeating(answer))), self.most_blocked_seconds)

    def test_concurrent_episodes_do_not_disturb_each_other(self, environment: Environment) -> None:
        tasks = _tasks(environment, self.splits[:1], 8)
        answers = [(self.gold(task) or "I do not know.") if i % 2 else "" for i, task in enumerate(tasks)]
        alone = [self._play(environment, task, answer) for task, answer in zip(tasks, answers, strict=True)]

        async def together() -> list[Mapping[str, float]]:
            models = [FakeModel(answer) for answer in answers]
            return await asyncio.gather(*[played(environment, t, m) for t, m in zip(tasks, models, strict=True)])

        with deadline(self.deadline_seconds * 2, "playing 8 episodes at a time"):
            assert [dict(rewards) for rewards in asyncio.run(together())] == alone

    def test_closing_twice_is_safe(self) -> None:
        environment: Any = self.make()
        check_ran(environment.close(), "`close`")
        environment.close()

    def test_closing_leaves_no_process_behind(self, no_orphans: None) -> None:
        environment = self.make()
        task = environment.tasks(self.splits[0])[0]
        self._play(environment, task, self.gold(task) or "I do not know.")
        environment.close()

    def drawn(self) -> Drawn:
        """Return the length and some tasks of each split of a fresh environment."""
        environment = self.make()
        try:
            return _drawn(environment, self.splits)
        finally:
            environment.close()

    def _gold_or_skip(self, task: Task) -> str | Sequence[str]:
        gold = self.gold(task)
        if gold is None:
            pytest.skip("override `gold` to prove that right answers score full reward")
        return gold

    def _answer(self, environment: Environment, task: Task) -> str:
        """Return the right answer alone: as `final_answer` states it, as in the task's data, or else all of gold."""
        gold = self._gold_or_skip(task)
        text, held = gold if isinstance(gold, str) else gold[-1], task.data.get("answer")
        stated = stated_answer(environment, (*task.prompt, Message("assistant", text)))
        return stated or (str(held) if held is not None and holds(text, str(held)) else text.strip())

    def _wrong_variants(self, environment: Environment, task: Task) -> list[list[str]]:
        """Return wrong variants of the right response to a task. In an episode of several turns, the last turn varies.

        The list is empty if the right answer is unknown, or a response may list several answers.
        """
        if self.mentions_win or self.gold(task) is None:
            return []
        first, *rest = [task, *_tasks(environment, self.splits[:1], self.gold_samples)]
        pairs = [(_turns(self._gold_or_skip(one)), self._answer(environment, one)) for one in (first, *rest)]
        (*before, last), answer = pairs[0]
        others = {other: (turns[-1], other) for turns, other in pairs[1:] if other != answer}
        return [[*before, text] for text in wrong_variants(last, answer, list(others.values()))]

    def _stated(self, environment: Environment, task: Task, answer: str) -> str | None:
        if not states_answers(environment):
            pytest.skip("it has no `final_answer`, so evaluations take no majority votes")
        with deadline(self.deadline_seconds, f"stating the answer of {answer!r:.60}"):
            return stated_answer(environment, (*task.prompt, Message("assistant", answer)))

    def _play(self, environment: Environment, task: Task, answer: Script) -> dict[str, float]:
        with deadline(self.deadline_seconds, f"an episode answered with {answer!r:.60}"):
            return asyncio.run(played(environment, task, FakeModel(answer)))

    def _episode(self, environment: Environment, task: Task, answer: str | Sequence[str], sample: int) -> Episode:
        rewards = self._play(environment, task, _repeating(answer))
        said = (*((m.role, m.text) for m in task.prompt), ("assistant", _turns(answer)[-1]))
        return Episode("it", 0, sample, (), rewards, _total(environment, rewards), 1, said)


async def played(environment: Environment, task: Task, model: FakeModel) -> dict[str, float]:
    """Return the rewards of an episode, those that it records included."""
    given = await environment.run(task, model)
    return model.rewarded(checked_rewards(given, "it"))


async def _watched(environment: Environment, task: Task, model: FakeModel) -> tuple[dict[str, float], Counter[str]]:
    """Return the rewards of an episode, and how often tasks that it leaves behind call the model."""
    others = asyncio.all_tasks()
    rewards, before = await played(environment, task, model), model.calls()
    if left := asyncio.all_tasks() - others:  # tasks of a pool may be among them, which do not end
        await asyncio.wait(left, timeout=LATE_SECONDS)
    return rewards, model.calls() - before


def _total(environment: Environment, rewards: Mapping[str, float]) -> float:
    return sum(environment.reward_weights.get(name, 1.0) * value for name, value in rewards.items())


def _turns(answer: str | Sequence[str]) -> list[str]:
    return [answer] if isinstance(answer, str) else list(answer)


def _repeating(answer: str | Sequence[str]) -> Callable[[Conversation], str]:
    """Return a script that repeats its last answer, for environments that ask again after a wrong one."""
    left = _turns(answer)
    return lambda messages: left.pop(0) if len(left) > 1 else left[0]


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


def _drawn(environment: Environment, splits: Iterable[str]) -> Drawn:
    found = {split: environment.tasks(split) for split in splits}
    return {split: (len(tasks), {i: tasks[i] for i in _sample(len(tasks), 8)}) for split, tasks in found.items()}


def _check_awaited(method: str, call: Callable[[], Any]) -> None:
    """Fail unless a method returns what can be awaited."""

    async def called() -> None:
        found = call()
        assert inspect.isawaitable(found), (
            f"`{method}` returned {found!r:.60}, and whet awaits what it returns; write `async def {method}` "
            "without `yield`"
        )
        asyncio.ensure_future(found).cancel()

    asyncio.run(called())


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return all(_is_plain(item) for item in value)
    return type(value) in BUILTINS
