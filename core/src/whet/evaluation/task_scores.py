"""The score of each task of an evaluation, and the figures over tasks that follow from it.

group of a task -> TaskScore: rewards, pass@k, maj@k of the task -> figures: mean over tasks, with its interval
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from statistics import fmean

from attrs import evolve, frozen

from whet.data.records import Episode, Task
from whet.evaluation.estimators import Estimate, estimate, majority_at, pass_at
from whet.rollout.collate import response_length, reward_names
from whet.rollout.scoring import Scoring

TOTAL, LENGTH = "reward", "response_length"
NAMED = f"{TOTAL}/{TOTAL}"
"""A reward that is called `reward`. Its metric in training ends like this, too."""
Answers = tuple[tuple[str, int, int], ...]


@frozen(eq=False)
class TaskScore:
    """The score of one task over its samples."""

    task: int
    """Position of the task in its split."""
    id: str
    asked: str
    """A digest of the opening messages. Equal digests in two evaluations mean the same task."""
    samples: int
    """Number of successful episodes."""
    dropped: int
    """Number of failed episodes. They count nowhere else."""
    passes: int
    answers: Answers
    """(answer, samples, passes), most samples first. Empty if the environment extracts no final answers."""
    values: Mapping[str, float]
    """Value of each figure for which enough episodes succeeded."""


def score(position: int, task: Task, episodes: Sequence[Episode], wanted: int, scoring: Scoring) -> TaskScore:
    """Return the score of a task of which `wanted` samples were played. pass@k and maj@k need k successful episodes."""
    passed = [scoring.passing(episode) for episode in episodes]
    answers = _answers(episodes, passed)
    values = _values(episodes, sum(passed), answers, scoring) if episodes else {}
    dropped = wanted - len(episodes)
    return TaskScore(position, task.id, _digest(task), len(episodes), dropped, sum(passed), answers, values)


def _values(episodes: Sequence[Episode], passes: int, answers: Answers, scoring: Scoring) -> dict[str, float]:
    count, votes = len(episodes), [(size, passes) for _, size, passes in answers]
    abstained = count - sum(size for size, _ in votes)
    if scoring.unanswered_vote and abstained:
        votes, abstained = [*votes, (abstained, 0)], 0
    named = {name: fmean([e.rewards[name] for e in episodes if name in e.rewards]) for name in reward_names(episodes)}
    return {
        **{NAMED if name == TOTAL else name: value for name, value in named.items()},
        TOTAL: fmean([episode.reward for episode in episodes]),
        LENGTH: fmean([response_length(episode) for episode in episodes]),
        **{f"pass@{k}": pass_at(k, count, passes) for k in scoring.pass_at if k <= count},
        **{f"maj@{k}": majority_at(k, votes, abstained) for k in scoring.majority_at if k <= count},
    }


def _digest(task: Task) -> str:
    asked = json.dumps([[message.role, message.text] for message in task.prompt])
    return hashlib.blake2b(asked.encode(), digest_size=8).hexdigest()


def _answers(episodes: Sequence[Episode], passed: Sequence[bool]) -> Answers:
    found: dict[str, tuple[int, int]] = {}
    for episode, passes in zip(episodes, passed, strict=True):
        if episode.answer is not None:
            size, before = found.get(episode.answer, (0, 0))
            found[episode.answer] = (size + 1, before + passes)
    ordered = sorted(found.items(), key=lambda item: (-item[1][0], item[0]))
    return tuple((answer, size, passes) for answer, (size, passes) in ordered)


def figures(scores: Sequence[TaskScore], episodes: Sequence[Episode]) -> dict[str, Estimate]:
    """Return each figure's mean over tasks with its interval: `reward` first, then named rewards, pass@k, maj@k."""
    names = dict.fromkeys([TOTAL, *(name for one in scores for name in one.values if name != LENGTH), LENGTH])
    made = {}
    for name in names:
        scored = [one for one in scores if name in one.values]
        together = int(name.partition("@")[2]) if name.startswith(("pass@", "maj@")) else 1
        share_of = sum(one.samples for one in scored) / together if _is_share(name, episodes) else None
        found = estimate([one.values[name] for one in scored], share_of)
        below = name == LENGTH and found.low is not None and found.low < 0
        made[name] = evolve(found, low=0.0) if below else found
    return made


def missing(scores: Sequence[TaskScore], scoring: Scoring) -> dict[str, str]:
    """Return which figures could not be computed for some tasks, and why."""
    names = dict.fromkeys([*(name for one in scores for name in one.values), TOTAL, LENGTH], 1)
    wanted = {**names, **{f"pass@{k}": k for k in scoring.pass_at}, **{f"maj@{k}": k for k in scoring.majority_at}}
    found: dict[str, str] = {}
    for name, k in wanted.items():
        left = [one for one in scores if name not in one.values]
        few = f"{'none' if k == 1 else f'fewer than {k}'} of their episodes came through"
        why = few if all(one.samples < k for one in left) else "none of their episodes has it"
        found |= {name: f"{len(left)} of {len(scores)} tasks left out: {why}"} if left else {}
    return found


def _is_share(name: str, episodes: Sequence[Episode]) -> bool:
    """Return whether a figure is a share of episodes, or a probability: between 0 and 1 for every task."""
    if name == LENGTH:
        return False
    if name == TOTAL:
        return all(episode.reward in (0.0, 1.0) for episode in episodes)
    name = TOTAL if name == NAMED else name
    named = [episode.rewards[name] for episode in episodes if name in episode.rewards]
    return all(value in (0.0, 1.0) for value in named)
