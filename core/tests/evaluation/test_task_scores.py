"""What the samples of a task are worth, and the figures over tasks."""

import itertools
import random
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from attrs import evolve

from whet.data.records import Episode, Task, Trajectory
from whet.errors import ConfigError
from whet.evaluation.estimators import majority_at, pass_at
from whet.evaluation.result import judge
from whet.evaluation.task_scores import TaskScore, figures, missing, score
from whet.interfaces.environment import SingleTurn
from whet.rollout.routing import Route
from whet.rollout.scoring import Passing, Scoring

TASK = Task("What is 6*7?", {"answer": "42"}, id="six")


def episode(reward: float, /, answer: str | None = None, length: int = 3, **rewards: float) -> Episode:
    mask, zeros = np.ones(length, np.bool_), np.zeros(length, np.float32)
    one = Trajectory(np.arange(length), mask, zeros, zeros.astype(np.int32), 0, "stop")
    return Episode("sums", 0, 0, (one,), rewards or {"correct": reward}, reward, 1, answer=answer)


def scored(episodes: Sequence[Episode], scoring: Scoring | None = None, wanted: int = 0) -> TaskScore:
    return score(0, TASK, episodes, wanted or len(episodes), scoring or Scoring((1, 2), (2, 3)))


def test_a_task_has_its_mean_rewards_its_passes_and_its_votes() -> None:
    given = [episode(1.0, "42"), episode(1.0, "42", 5), episode(0.0, "41"), episode(0.0, None, 7)]
    found = scored(given)
    assert found.answers == (("42", 2, 2), ("41", 1, 0))
    assert (found.id, found.samples, found.passes, found.dropped) == ("six", 4, 2, 0)
    assert found.values == {
        "correct": 0.5,
        "reward": 0.5,
        "response_length": 4.5,
        "pass@1": 0.5,
        "pass@2": pass_at(2, 4, 2),
        "maj@2": majority_at(2, [(2, 2), (1, 0)], 1),
        "maj@3": majority_at(3, [(2, 2), (1, 0)], 1),
    }


def cons_at(k: int, votes: Sequence[tuple[str | None, bool]]) -> float:
    """NeMo RL's cons@k over all subsets, where None is an answer like others, and a tie is a fair draw."""
    worth = []
    for subset in itertools.combinations(votes, k):
        most = Counter(answer for answer, _ in subset).most_common()
        winners = [answer for answer, count in most if count == most[0][1]]
        right = dict(subset)
        worth.append(sum(right[one] for one in winners) / len(winners))
    return float(np.mean(worth))


@pytest.mark.parametrize("k", [1, 2, 3, 5, 6])
def test_samples_without_an_answer_may_vote(k: int) -> None:
    votes = [("42", True), (None, False), ("41", False), (None, False), ("42", True), ("40", False)]
    given = [episode(float(passes), answer) for answer, passes in votes]
    found = scored(given, Scoring(majority_at=(k,), unanswered_vote=True)).values[f"maj@{k}"]
    assert found == pytest.approx(cons_at(k, votes))
    assert found <= scored(given, Scoring(majority_at=(k,))).values[f"maj@{k}"] + 1e-12


def test_the_order_of_samples_and_of_tasks_does_not_matter() -> None:
    draw = random.Random(0)
    given = [episode(float(draw.random() < 0.5), draw.choice(["1", "2", "3", None])) for _ in range(8)]
    scoring = Scoring((1, 4), (3, 8))
    tasks = [scored(given[i:] + given[:i][::-1], scoring) for i in range(4)]
    assert all(task.answers == tasks[0].answers for task in tasks)
    assert all(task.values == tasks[0].values for task in tasks)
    others = [*tasks, scored([episode(1.0, "2")] * 8, scoring)]
    assert figures(others, given)["maj@3"] == figures(others[::-1], given)["maj@3"]


@pytest.mark.parametrize(
    ("passing", "passes"),
    [(Passing(), True), (Passing("correct"), True), (Passing("format"), False), (Passing("format", 0.5), True),
     (Passing(at_least=1.05), True), (Passing(at_least=1.0500001), False), (Passing("format", -1.0), True)],
)  # fmt: skip
def test_what_passes_is_a_reward_of_at_least_so_much(passing: Passing, passes: bool) -> None:
    assert passing(episode(1.05, correct=1.0, format=0.5)) is passes


def test_a_weighted_sum_that_rounds_below_the_threshold_passes() -> None:
    total = 0.7 + 0.2 + 0.1
    assert total < 1.0
    assert Passing()(episode(total, a=1.0))


def test_a_reward_that_there_is_not_is_an_error_that_names_those_that_are() -> None:
    with pytest.raises(
        ConfigError, match=r"evaluation\.passing.reward is 'corect', .*'sums' does not give; .* correct"
    ):
        scored([episode(1.0)], Scoring(passing=Passing("corect")))


def test_an_answer_that_nobody_can_decide_about_does_not_pass_whatever_its_rewards() -> None:
    undecided = evolve(episode(0.0), rewards={}, undecided=("it needs too much",))
    assert Passing("correct")(undecided) is Passing("corect")(undecided) is False
    route = Route("sums", SingleTurn({"train": [TASK, TASK]}, {}), "train", scoring=Scoring(passing=Passing("correct")))
    result = judge(route, [[undecided], [episode(1.0)]], [])
    assert [task.passes for task in result.tasks] == [0, 1]
    assert [(result.figures[name].value, result.figures[name].tasks) for name in ("reward", "correct")] == [
        (0.5, 2)
    ] * 2


def test_a_task_with_too_few_samples_is_left_out_of_the_figure_and_named() -> None:
    scoring = Scoring((1, 2))
    tasks = [scored([episode(1.0)] * 2, scoring), scored([episode(0.0)], scoring, wanted=2), scored([], scoring, 2)]
    assert [(task.samples, task.dropped) for task in tasks] == [(2, 0), (1, 1), (0, 2)]
    found = figures(tasks, [episode(1.0), episode(0.0)])
    assert (found["pass@1"].value, found["pass@1"].tasks) == (0.5, 2)
    assert (found["pass@2"].value, found["pass@2"].tasks) == (1.0, 1)
    assert missing(tasks, scoring) == {
        "pass@2": "2 of 3 tasks left out: fewer than 2 of their episodes came through",
        **dict.fromkeys(
            ("correct", "reward", "response_length", "pass@1"),
            "1 of 3 tasks left out: none of their episodes came through",
        ),
    }


def test_a_reward_of_some_tasks_alone_is_named() -> None:
    tasks = [scored([episode(1.0)]), scored([episode(0.0, odd=1.0, correct=0.0)])]
    assert missing(tasks, Scoring()) == {"odd": "1 of 2 tasks left out: none of their episodes has it"}


def test_a_reward_called_reward_has_a_figure_beside_the_weighted_sum() -> None:
    episodes = [episode(1.5, reward=1.0, bonus=1.0), episode(0.5, reward=0.0, bonus=1.0)]
    found = figures([scored(episodes, Scoring())], episodes)
    assert {name: one.value for name, one in found.items() if name != "response_length"} == {
        "reward": 1.0, "bonus": 1.0, "reward/reward": 0.5,
    }  # fmt: skip
    assert missing([scored(episodes[:1], Scoring()), scored([episode(1.0, reward=1.0)], Scoring())], Scoring()) == {
        "bonus": "1 of 2 tasks left out: none of their episodes has it"
    }


def test_figures_that_are_shares_stay_between_0_and_1_and_others_need_not() -> None:
    tasks = [scored([episode(2.0 * (i > 0), correct=float(i > 0))]) for i in range(4)]
    found = figures(tasks, [episode(2.0, correct=1.0), episode(0.0, correct=0.0)])
    assert (found["correct"].high or 2.0) < 1.0
    assert (found["reward"].high or 0.0) > 2.0
    assert list(found) == ["reward", "correct", "pass@1", "response_length"]


def test_the_digest_tells_tasks_apart_by_what_they_ask() -> None:
    one, same, other = (score(0, evolve(TASK, prompt=p), [], 1, Scoring()).asked for p in ("a", "a", "b"))
    assert one == same != other


def test_rewards_of_only_some_episodes_are_a_mean_of_those() -> None:
    found = scored([episode(1.0, a=1.0), episode(0.0, b=3.0), episode(0.0, b=5.0)])
    assert (found.values["a"], found.values["b"]) == (1.0, 4.0)


def test_the_interval_of_a_length_does_not_reach_below_0() -> None:
    lengths = [scored([episode(1.0, length=length)]) for length in (1, 1, 40)]
    found = figures(lengths, [episode(1.0)])["response_length"]
    assert (found.value, found.low) == (14.0, 0.0)
    assert found.high == pytest.approx(14 + 4.302653 * np.std([1, 1, 40], ddof=1) / np.sqrt(3))
