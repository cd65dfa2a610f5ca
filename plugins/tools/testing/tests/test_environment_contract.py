"""The contract holds for a good environment, and each rule catches an environment that breaks it."""

import asyncio
import itertools
import os
import random
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from whet.data.messages import Message
from whet.data.randomness import derive_seed
from whet.data.records import Task
from whet.errors import DataError, EpisodeError, PluginError
from whet.interfaces.environment import Model, SingleTurn
from whet_testing.another_interpreter import AnotherInterpreter
from whet_testing.contracts.environment import EnvironmentContract
from whet_testing.fakes import FakeModel

pytest_plugins = ["pytester"]

TASKS = [Task(f"What is {i}+1?", {"answer": str(i + 1)}) for i in range(20)]
HELD_OUT = [Task(f"What is {i}+1?", {"answer": str(i + 1)}) for i in range(20, 40)]


def correct(text: str, data: Mapping[str, Any]) -> float:
    return float(text == data["answer"])


def sums(tasks: Sequence[Task] = TASKS, **rewards: Any) -> SingleTurn:
    return SingleTurn({"train": tasks, "test": HELD_OUT}, rewards or {"correct": correct})


class Sums(EnvironmentContract):
    splits = ("train", "test")

    def make(self) -> Any:
        return sums()

    def gold(self, task: Task) -> str:
        return str(task.data["answer"])


class TestOfAGoodEnvironment(Sums):
    pass


class TestOfAnEnvironmentThatStatesAnswers(Sums):
    def make(self) -> Any:
        return SingleTurn({"train": TASKS, "test": HELD_OUT}, {"correct": correct}, answer=str.strip)


class TestOfAnEnvironmentOfTwoTurns(Sums):
    def make(self) -> Any:
        return TwoTurns({"train": TASKS, "test": HELD_OUT[:3]}, {"correct": correct})

    def gold(self, task: Task) -> list[str]:  # type: ignore[override]
        return ["let me see", str(task.data["answer"])]


class TwoTurns(SingleTurn):
    async def run(self, task: Task, model: Model) -> Mapping[str, float]:
        await model.reply(task.prompt)
        answer = await model.reply("And now?")
        return {"correct": correct(answer.text, task.data)}


class EndlessTasks(list[Task]):
    def __getitem__(self, index: Any) -> Any:
        return TASKS[0]


class DrawnTasks(list[Task]):
    drawn = itertools.count()

    def __getitem__(self, index: Any) -> Any:
        if index >= len(self):
            raise IndexError(index)
        return Task(f"Number {next(self.drawn)}", {"answer": "?"})


class AnySplit(SingleTurn):
    def tasks(self, split: str) -> Sequence[Task]:
        return TASKS


class SilentAboutSplits(SingleTurn):
    def tasks(self, split: str) -> Sequence[Task]:
        if split not in self._tasks:
            raise DataError("no such split")
        return super().tasks(split)


class OneAtATime(SingleTurn):
    answer = ""

    async def run(self, task: Task, model: Model) -> Mapping[str, float]:
        self.answer = (await model.reply(task.prompt)).text
        await asyncio.sleep(0)
        return {"correct": correct(self.answer, task.data)}


class WrongWeights(SingleTurn):
    @property
    def reward_weights(self) -> Mapping[str, float]:
        return {"corect": 1.0}


class HalfCurriculum(SingleTurn):
    def difficulty(self) -> float:
        return 1.0

    def adapted(self, task: Task, difficulty: float) -> Task:
        return task


class Awaitable(SingleTurn):
    async def tasks(self, split: str) -> Sequence[Task]:  # type: ignore[override]
        return super().tasks(split)


class ClosesAsync(SingleTurn):
    async def close(self) -> None:  # type: ignore[override]
        pass


class StatesAsync(SingleTurn):
    async def final_answer(self, messages: Any) -> str:  # type: ignore[override]
        return "1"


class WeighsAsync(SingleTurn):
    async def reward_weights(self) -> Mapping[str, float]:  # type: ignore[override]
        return {"correct": 1.0}


class WeighsByMethod(SingleTurn):
    def reward_weights(self) -> Mapping[str, float]:  # type: ignore[override]
        return {"correct": 1.0}


class PlaysAtOnce(SingleTurn):
    def run(self, task: Task, model: Model) -> Mapping[str, float]:  # type: ignore[override]
        return {"correct": 1.0}


class PlaysInParts(SingleTurn):
    async def run(self, task: Task, model: Model) -> Any:  # type: ignore[override]
        yield {"correct": 1.0}


class ComparesAtOnce(SingleTurn):
    def group_rewards(self, task: Task, episodes: Sequence[Any]) -> Any:
        return [{"first": 1.0} for _ in episodes]


class Curriculum(SingleTurn):
    level = 1.0

    def difficulty(self) -> Any:
        return self.level

    def adapted(self, task: Task, difficulty: float) -> Any:
        return task

    def observe(self, groups: Any) -> Any:
        pass


class AsksAsync(Curriculum):
    async def difficulty(self) -> float:
        return 1.0


class AdaptsAsync(Curriculum):
    async def adapted(self, task: Task, difficulty: float) -> Task:
        return task


class ObservesAsync(Curriculum):
    async def observe(self, groups: Any) -> None:
        self.level = 2.0


class Counting(SingleTurn):
    """Counts its episodes over a resume."""

    played = 0

    async def run(self, task: Task, model: Model) -> Mapping[str, float]:
        self.played += 1
        return await super().run(task, model)

    def state(self) -> dict[str, Any]:
        return {"played": self.played}

    def load(self, state: Mapping[str, Any]) -> None:
        self.played = state["played"]


class CountsInNumPy(Counting):
    def state(self) -> dict[str, Any]:
        return {"played": np.int64(self.played)}


class LoadsAsync(Counting):
    async def load(self, state: Mapping[str, Any]) -> None:  # type: ignore[override]
        pass


class TestOfAnEnvironmentWithAState(Sums):
    def make(self) -> Any:
        return Counting({"train": TASKS, "test": HELD_OUT}, {"correct": correct})


class PlaysByAnother(SingleTurn):
    """Plays with another environment: `run` is a plain method that returns what can be awaited."""

    def run(self, task: Task, model: Model) -> Any:
        return asyncio.ensure_future(super().run(task, model))


class GradesLate(SingleTurn):
    """Starts a grader that it does not await."""

    late: "asyncio.Task[Any]"

    async def run(self, task: Task, model: Model) -> Mapping[str, float]:
        reply = await model.reply(task.prompt)

        async def grade() -> None:
            await asyncio.sleep(0.01)
            model.reward("late", 1.0)

        self.late = asyncio.create_task(grade())
        return {"correct": correct(reply.text, task.data)}


class AsksLate(SingleTurn):
    """Asks the model a question whose answer it does not await."""

    late: "asyncio.Task[Any]"

    async def run(self, task: Task, model: Model) -> Mapping[str, float]:
        reply = await model.reply(task.prompt)
        self.late = asyncio.create_task(model.reply("And now?"))  # type: ignore[arg-type]
        return {"correct": correct(reply.text, task.data)}


class KeepsAPool(SingleTurn):
    """Has a task that outlives its episodes."""

    pool: "asyncio.Task[Any]"

    async def run(self, task: Task, model: Model) -> Mapping[str, float]:
        self.pool = asyncio.create_task(asyncio.sleep(60))
        return await super().run(task, model)


class TestOfAnEnvironmentWithAPool(Sums):
    def make(self) -> Any:
        return KeepsAPool({"train": TASKS, "test": HELD_OUT}, {"correct": correct})


class ClosedOnce(SingleTurn):
    closed = False

    def close(self) -> None:
        assert not self.closed
        self.closed = True


def two(kind: type[SingleTurn]) -> SingleTurn:
    return kind({"train": TASKS, "test": TASKS[:3]}, {"correct": correct})


def executing(text: str, data: Mapping[str, Any]) -> float:
    return float(eval(text.format(0)) == int(data["answer"])) if text else 0.0


def backtracking(text: str, data: Mapping[str, Any]) -> float:
    try:
        return float(re.search(r"(a+)+$", text + "!") is not None)
    except Exception:  # an environment that fails closed must not hide that it hung
        return 0.0


def told(text: str, data: Mapping[str, Any]) -> float:
    """Accept the answer anywhere in the text, 12 for 1 included."""
    return float(data["answer"] in text)


def listed(text: str, data: Mapping[str, Any]) -> float:
    """Accept the answer among others."""
    return float(data["answer"] in re.findall(r"[0-9]+", text[:1000]))


def boxed(text: str, data: Mapping[str, Any]) -> float:
    """Accept the last box."""
    return float(re.findall(r"\\boxed{([^{}]*)}", text[-1000:])[-1:] == [data["answer"]])


def drawing(text: str, data: Mapping[str, Any]) -> float:
    return float(next(DrawnTasks.drawn))


def sleeping(text: str, data: Mapping[str, Any]) -> float:
    time.sleep(0.3)
    return 0.0


def hiding(text: str, data: Mapping[str, Any]) -> float:
    time.sleep(0.001)
    return correct(text, data)


def computing(text: str, data: Mapping[str, Any]) -> float:
    begin = time.monotonic()
    while time.monotonic() < begin + 2:
        pass
    return correct(text, data)


SHOWN = [Task(f"The answer to {i}+1 is {i + 1}. What is {i}+1?", task.data) for i, task in enumerate(TASKS)]

MUTANTS: dict[str, tuple[Callable[[], Any], str]] = {
    "an empty split": (lambda: sums(tasks=[]), "test_tasks_of_a_split_are_a_sequence"),
    "no end": (lambda: sums(tasks=EndlessTasks(TASKS)), "test_the_index_past_the_end_raises_IndexError"),
    "items drawn anew": (lambda: sums(tasks=DrawnTasks(TASKS)), "test_an_item_is_the_same_every_time"),
    "instances that differ": (lambda: sums(tasks=DrawnTasks(TASKS)), "test_a_fresh_instance_has_the_same_items"),
    "any split": (lambda: two(AnySplit), "test_an_unknown_split_raises_DataError_naming_the_splits"),
    "a silent error": (lambda: two(SilentAboutSplits), "test_an_unknown_split_raises_DataError_naming_the_splits"),
    "an empty prompt": (lambda: sums([Task("")]), "test_prompts_are_conversations_that_the_model_can_answer"),
    "the model's own words last": (
        lambda: sums([Task([Message("user", "1+1"), Message("assistant", "2")])]),
        "test_prompts_are_conversations_that_the_model_can_answer",
    ),
    "objects in task data": (lambda: sums([Task("1+1", {"answer": object()})]), "test_task_data_is_builtins"),
    "a reward that is no number": (
        lambda: sums(correct=lambda text, data: float("nan")),
        "test_an_episode_gives_finite_named_rewards",
    ),
    "weights of other names": (lambda: two(WrongWeights), "test_reward_weights_name_rewards_that_exist"),
    "gold that scores too little": (
        lambda: sums(correct=lambda text, data: 0.9 * correct(text, data)),
        "test_gold_answers_score_full_reward",
    ),
    "rewards drawn anew": (
        lambda: sums(correct=drawing),
        "test_the_same_answer_gives_the_same_rewards",
    ),
    "gold that is no answer": (
        lambda: SingleTurn({"train": TASKS, "test": HELD_OUT}, {"correct": correct}, answer=lambda text: None),
        "test_gold_is_an_answer_that_can_be_voted_for",
    ),
    "an answer that is no text": (
        lambda: SingleTurn({"train": TASKS, "test": HELD_OUT}, {"correct": correct}, answer=int),  # type: ignore[arg-type]
        "test_gold_is_an_answer_that_can_be_voted_for",
    ),
    "one episode at a time": (lambda: two(OneAtATime), "test_concurrent_episodes_do_not_disturb_each_other"),
    "closed once": (lambda: two(ClosedOnce), "test_closing_twice_is_safe"),
}


SILENT: dict[str, tuple[Callable[[], Any], str, str]] = {
    "a prompt with the answer": (
        lambda: sums(SHOWN),
        "test_prompts_do_not_hold_the_answer",
        r"the prompt holds the right answer in 16 of 16 tasks of 'train'.*set `answer_in_prompt = True`",
    ),
    "a grader of substrings": (
        lambda: sums(correct=told),
        "test_wrong_answers_do_not_win",
        r"has the right answer '1', and the wrong response \['17'\] scores full reward.*Compare whole answers",
    ),
    "a grader of lists": (
        lambda: sums(correct=listed),
        "test_wrong_answers_do_not_win",
        r"has the right answer '1', and the wrong response \['2, 1, 4'\] scores.*set `mentions_win = True`",
    ),
    "the training tasks as test": (
        lambda: SingleTurn({"train": TASKS, "test": TASKS}, {"correct": correct}),
        "test_splits_have_tasks_of_their_own",
        r"20 of 20 tasks of a split are in both 'train' and 'test'.*raise `largest_shared`",
    ),
    "a curriculum that learns nothing": (
        lambda: two(HalfCurriculum),
        "test_a_curriculum_changes_tasks_and_not_the_split",
        r"it has a curriculum without the method `observe`, so a run would refuse it",
    ),
    "a grader that nobody awaits": (
        lambda: two(GradesLate),
        "test_an_episode_gives_finite_named_rewards",
        r"a task that it started calls model.reward, which a run refuses; await the task before `run` returns",
    ),
    "a reply that nobody awaits": (
        lambda: two(AsksLate),
        "test_an_episode_gives_finite_named_rewards",
        r"a task that it started calls model.reply, which a run refuses",
    ),
    "a hundredth of a second asleep": (
        lambda: sums(correct=hiding),
        "test_an_episode_does_not_block_the_others",
        r"it calls time.sleep in hiding at .*: time.sleep\(0.001\); await it",
    ),
    "a busy grader": (
        lambda: sums(correct=computing),
        "test_an_episode_does_not_block_the_others",
        r"the loop did not turn for 0.5 seconds in computing at .*; await it \(asyncio.sleep\), or run it in a thread",
    ),
}
"""Environments with a silent mistake, the rule that finds it, and the message."""


SYNC = "must neither be `async def` nor contain `yield`"
METHODS: dict[type[SingleTurn], tuple[str, str]] = {
    Awaitable: ("methods", f"`tasks` did nothing: `Awaitable.tasks` {SYNC}"),
    ClosesAsync: ("closing", f"`close` did nothing: `ClosesAsync.close` {SYNC}"),
    StatesAsync: ("methods", f"`final_answer` did nothing: `StatesAsync.final_answer` {SYNC}"),
    WeighsAsync: ("methods", "`reward_weights` is <bound method .*wanted an attribute or a property"),
    WeighsByMethod: ("methods", "`reward_weights` is <bound method .*wanted an attribute or a property"),
    PlaysAtOnce: ("methods", r"`run` returned {'correct': 1.0}, and whet awaits .*; write `async def run`"),
    PlaysInParts: ("methods", "`run` returned <async_generator .*; write `async def run` without `yield`"),
    ComparesAtOnce: ("methods", r"`group_rewards` returned \[{'first': 1.0}\], .*; write `async def group_rewards`"),
    AsksAsync: ("methods", f"`difficulty` did nothing: `AsksAsync.difficulty` {SYNC}"),
    AdaptsAsync: ("methods", f"`adapted` did nothing: `AdaptsAsync.adapted` {SYNC}"),
    ObservesAsync: ("methods", f"`observe` did nothing: `ObservesAsync.observe` {SYNC}"),
    LoadsAsync: ("state", f"`load` did nothing: `LoadsAsync.load` {SYNC}"),
    CountsInNumPy: ("state", "gave what JSON cannot store: Object of type int64"),
}
"""Environments with a method of the wrong sort, the rule that finds it, and the message."""


@pytest.mark.parametrize("kind", METHODS)
def test_the_contract_names_a_method_of_the_wrong_sort(kind: type[SingleTurn]) -> None:
    which, message = METHODS[kind]
    contract = EnvironmentContract()
    contract.make = lambda: two(kind)  # type: ignore[method-assign]
    rules = {
        "methods": lambda: contract.test_its_methods_are_async_only_where_they_are_awaited(contract.make()),
        "closing": contract.test_closing_twice_is_safe,
        "state": lambda: contract.test_its_state_is_stored_and_loaded(contract.make()),
    }
    with pytest.raises((AssertionError, PluginError), match=f"(?s){message}"):
        rules[which]()


def test_a_plain_run_may_return_what_can_be_awaited() -> None:
    Sums().test_its_methods_are_async_only_where_they_are_awaited(two(PlaysByAnother))


WORDS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
NOISE, STARTED = random.random(), time.time_ns()


class Numbers(EnvironmentContract):
    """An environment whose tasks are numbers."""

    def numbers(self) -> list[Any]:
        raise NotImplementedError

    def make(self) -> Any:
        return sums([Task(f"What is {number}?", {"answer": "?"}) for number in self.numbers()])


class OfHashes(Numbers):
    def numbers(self) -> list[Any]:
        return [hash(word) for word in WORDS]


class OfASet(Numbers):
    def numbers(self) -> list[Any]:
        return list(set(WORDS))


class OfAddresses(Numbers):
    def numbers(self) -> list[Any]:
        return [id(type(self))]


class OfTheProcess(Numbers):
    def numbers(self) -> list[Any]:
        return [os.getpid()]


class OfNoSeed(Numbers):
    def numbers(self) -> list[Any]:
        return [NOISE]


class OfTheTime(Numbers):
    def numbers(self) -> list[Any]:
        return [STARTED]


class AsMany(Numbers):
    def numbers(self) -> list[Any]:
        return [0] * (1 + hash("a") % 20_000)


class OfASeed(Numbers):
    def numbers(self) -> list[Any]:
        return [derive_seed(1, word) for word in WORDS]


@pytest.mark.parametrize("kind", [OfHashes, OfASet, OfAddresses, OfTheProcess, OfNoSeed, OfTheTime, AsMany])
def test_the_contract_catches_tasks_that_differ_from_process_to_process(
    kind: type[Numbers], another_interpreter: AnotherInterpreter
) -> None:
    contract = kind()
    contract.test_a_fresh_instance_has_the_same_items(contract.make())
    words = r"in another process.*derive_seed.*hash\(\), id\(\), the order of a set, the time"
    with pytest.raises(AssertionError, match=f"(?s){words}"):
        contract.test_another_process_has_the_same_items(contract.make(), another_interpreter)


class OfAFile(Numbers):
    """What fixtures leave in the object and in the class reaches the other process."""

    file = folder = ""

    def numbers(self) -> list[Any]:
        return Path(self.folder, self.file).read_text().split()


def test_tasks_of_a_seed_and_of_a_file_are_the_same_in_another_process(
    another_interpreter: AnotherInterpreter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    OfASeed().test_another_process_has_the_same_items(OfASeed().make(), another_interpreter)
    (tmp_path / "numbers").write_text("1 2 3")
    contract = OfAFile()
    contract.file = "numbers"
    monkeypatch.setattr(OfAFile, "folder", str(tmp_path))
    contract.test_another_process_has_the_same_items(contract.make(), another_interpreter)
    _, there = another_interpreter.call(contract, "drawn")["train"]
    assert [task.prompt[0].text for task in there.values()] == [f"What is {number}?" for number in "123"]


class OfAServer(Numbers):
    server: Any

    def numbers(self) -> list[Any]:
        return [self.server.number]


def test_the_rule_is_skipped_where_make_needs_what_only_this_process_has(
    another_interpreter: AnotherInterpreter,
) -> None:
    class Server:
        number = 3

    contract = OfAServer()
    contract.server = Server()
    words = "`make` needs what only the process of the test has: AttributeError: .*'server'"
    with pytest.raises(pytest.skip.Exception, match=words):
        contract.test_another_process_has_the_same_items(contract.make(), another_interpreter)


@pytest.mark.parametrize("name", [np.int64(3), 3])
def test_the_contract_catches_the_id_of_a_task_that_is_no_text(name: Any) -> None:
    with pytest.raises(AssertionError, match=r"wanted text: write str\(\.\.\.\)"):
        Sums().test_task_data_is_builtins(sums([Task("1+1", {"answer": "2"}, id=name)]))


@pytest.mark.parametrize("what", SILENT)
def test_the_contract_says_what_is_silently_wrong(what: str) -> None:
    make, name, message = SILENT[what]
    contract = Sums()
    contract.make, contract.most_blocked_seconds = make, 0.5  # type: ignore[method-assign]
    with pytest.raises((AssertionError, pytest.fail.Exception), match=f"(?s){message}"):
        getattr(contract, name)(make())


def test_an_environment_may_show_the_answer_accept_lists_and_have_few_tasks() -> None:
    contract = Sums()
    contract.answer_in_prompt, contract.mentions_win, contract.largest_shared = True, True, 1.0
    contract.test_prompts_do_not_hold_the_answer(sums(SHOWN))
    contract.test_wrong_answers_do_not_win(sums(correct=listed))
    contract.test_splits_have_tasks_of_their_own(SingleTurn({"train": TASKS, "test": TASKS}, {"correct": correct}))


def test_wrong_variants_keep_the_words_around_the_answer() -> None:
    contract = Sums()
    contract.gold = lambda task: f"So \\boxed{{{task.data['answer']}}}."  # type: ignore[method-assign]
    contract.test_wrong_answers_do_not_win(sums(correct=boxed))
    assert contract._wrong_variants(sums(), TASKS[0]) == [
        ["So \\boxed{17}."],
        ["So \\boxed{71}."],
        ["So \\boxed{2, 1, 4}."],
        ["So \\boxed{2}.\nSo \\boxed{1}.\nSo \\boxed{4}."],
    ]
    with pytest.raises(AssertionError, match=r"the wrong response .*17"):
        contract.test_wrong_answers_do_not_win(sums(correct=told))


def test_wrong_responses_of_the_author_must_not_win() -> None:
    contract = Sums()
    contract.wrong = lambda task: [f" {task.data['answer']}"]  # type: ignore[method-assign]
    contract.test_wrong_answers_do_not_win(sums())
    with pytest.raises(AssertionError, match="the wrong response ' 1' scores full reward"):
        contract.test_wrong_answers_do_not_win(sums(correct=lambda text, data: correct(text.strip(), data)))


@pytest.mark.parametrize("what", MUTANTS)
def test_the_contract_catches(what: str) -> None:
    make, name = MUTANTS[what]
    contract = Sums()
    contract.make = make  # type: ignore[method-assign]
    test = getattr(contract, name)
    arguments = () if name == "test_closing_twice_is_safe" else (make(),)
    with pytest.raises((AssertionError, pytest.fail.Exception, EpisodeError)):
        test(*arguments)


@pytest.mark.parametrize(
    ("grade", "what"),
    [(executing, "nested brackets"), (executing, "format strings"), (lambda text, data: 1.0, "empty")],
)
def test_the_contract_catches_graders_that_choke_or_reward_anything(grade: Any, what: str) -> None:
    with pytest.raises(Exception):  # noqa: B017  any failure will do: the grader raises what it likes
        Sums().test_a_hostile_answer_neither_raises_nor_hangs_nor_wins(sums(correct=grade), what)


@pytest.mark.parametrize("grade", [backtracking, sleeping])
def test_the_contract_ends_a_grader_that_hangs(grade: Any) -> None:
    contract = Sums()
    contract.deadline_seconds = 0.2
    begin = time.monotonic()
    with pytest.raises(pytest.fail.Exception, match=r"longer than 0\.2 seconds"):
        contract._play(sums(correct=grade), TASKS[0], "a" * 60)
    assert time.monotonic() - begin < 5


def test_the_contract_catches_a_process_left_behind(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("""
        import subprocess, sys
        from whet.data.records import Task
        from whet.interfaces.environment import SingleTurn
        from whet_testing.contracts.environment import EnvironmentContract

        def grade(text, data):
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
            return 0.0

        class TestIt(EnvironmentContract):
            def make(self):
                return SingleTurn({"train": [Task("1+1?")]}, {"correct": grade})
    """)
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", "-k", "no_process_behind")
    result.assert_outcomes(passed=1, errors=1)


def test_a_script_that_is_too_short_fails_with_its_length() -> None:
    environment = TwoTurns({"train": TASKS}, {"correct": correct})
    with pytest.raises(AssertionError, match="answer 2 of a script of 1"):
        asyncio.run(environment.run(TASKS[0], FakeModel(["only one"])))
