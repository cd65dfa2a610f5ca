"""The result of an evaluation: as metrics, as a summary, and as rows of tasks and of episodes."""

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from attrs import asdict, frozen

from whet.data.metrics import Metric, mean, total
from whet.data.records import Episode, Group, Sampling
from whet.evaluation.estimators import Estimate
from whet.evaluation.task_scores import TaskScore, figures, missing, score
from whet.rollout.collate import completed, record
from whet.rollout.episode import EpisodeFailed
from whet.rollout.routing import Route
from whet.rollout.scoring import Passing

FORMAT = 1
"""Format of the summary. It changes when a reader of the old format would be misled."""
LOW, HIGH = "ci_low", "ci_high"


@frozen(eq=False)
class EnvironmentResult:
    """What the model achieved in one environment."""

    name: str
    split: str
    samples: int
    """Number of episodes wanted for each task."""
    passing: Passing
    figures: Mapping[str, Estimate]
    """`reward` (the weighted sum), each named reward, `pass@K`, `maj@K`, `response_length` in tokens of the model."""
    missing: Mapping[str, str]
    """Figures that leave tasks out, or could not be computed at all, and why."""
    tasks: tuple[TaskScore, ...]
    episodes: int
    dropped: int
    """Episodes that failed on every attempt. They count nowhere else."""
    infrastructure: int
    """Dropped episodes whose infrastructure failed: a grader, a sandbox, a connection."""
    failure: str
    """Why one of the dropped episodes failed. Empty: none was dropped."""
    undecided: int
    """Responses that graders could not decide. They count as wrong."""
    records: tuple[dict[str, Any], ...]
    """A row for each episode, for the run folder."""

    @property
    def reward(self) -> float:
        """Return the mean over tasks of the mean over the task's samples."""
        return self.figures["reward"].value

    def summary(self) -> dict[str, Any]:
        """Return everything except the rows."""
        return {
            "split": self.split, "samples": self.samples, "passing": asdict(self.passing), "tasks": len(self.tasks),
            "episodes": self.episodes, "dropped": self.dropped, "dropped_by_infrastructure": self.infrastructure,
            "dropped_because": self.failure, "undecided": self.undecided,
            "figures": {name: _figure(found) for name, found in self.figures.items()}, "missing": dict(self.missing),
        }  # fmt: skip


def _figure(found: Estimate) -> dict[str, Any]:
    return {
        "value": found.value, LOW: found.low, HIGH: found.high, "standard_error": found.standard_error,
        "tasks": found.tasks,
    }  # fmt: skip


def judge(route: Route, played: Sequence[Sequence[Episode]], failures: Sequence[EpisodeFailed]) -> EnvironmentResult:
    """Score the played episodes of an environment: for each of the first tasks, its successful episodes."""
    tasks = route.tasks()
    episodes = completed([episode for found in played for episode in found])
    rest = iter(episodes)
    groups = [Group(i, route.name, i, tuple(islice(rest, len(found)))) for i, found in enumerate(played)]
    scores = tuple(score(g.index, tasks[g.index], g.episodes, route.samples, route.scoring) for g in groups)
    return EnvironmentResult(
        name=route.name, split=route.split, samples=route.samples, passing=route.scoring.passing,
        figures=figures(scores, episodes), missing=missing(scores, route.scoring), tasks=scores,
        episodes=len(episodes), dropped=len(failures), failure=min(map(str, failures), default=""),
        infrastructure=sum(failure.infrastructure for failure in failures),
        undecided=sum(bool(episode.undecided) for episode in episodes),
        records=tuple(row for group in groups for row in record(group)),
    )  # fmt: skip


@frozen(eq=False)
class EvaluationResult:
    """What the model achieved in all environments."""

    environments: tuple[EnvironmentResult, ...]
    sampling: Sampling
    seed: int

    def rows(self, label: str = "") -> dict[str, tuple[dict[str, Any], ...]]:
        """Return files of rows: for each environment a file of episodes, and under `tasks/` a file of tasks."""
        files = {}
        for result in self.environments:
            files[f"{label}{result.name}.jsonl"] = result.records
            files[f"tasks/{label}{result.name}.jsonl"] = tuple(asdict(task) for task in result.tasks)
        return files

    @property
    def metrics(self) -> dict[str, Metric]:
        """Return `evaluation/ENVIRONMENT/FIGURE`, and its interval as `.../ci_low` and `.../ci_high`."""
        metrics: dict[str, Metric] = {}
        for result in self.environments:
            for name, found in result.figures.items():
                numbers = {"": found.value, f"/{LOW}": found.low, f"/{HIGH}": found.high}
                metrics |= {
                    f"evaluation/{result.name}/{name}{end}": mean(value)
                    for end, value in numbers.items()
                    if value is not None
                }
            metrics[f"evaluation/{result.name}/dropped"] = total(result.dropped)
            metrics[f"evaluation/{result.name}/undecided"] = total(result.undecided)
        return metrics

    def summary(self, label: str = "", **about: Any) -> dict[str, Any]:
        """Return everything that is not a row: sampling, every figure with its interval, what was left out and why.

        `label` is the argument of `rows`, whose files the summary names.
        """
        sampling = {name: getattr(self.sampling, name) for name in ("max_tokens", "temperature", "top_p", "top_k")}
        return {
            "format": FORMAT,
            **about,
            "seed": self.seed,
            "sampling": sampling,
            "environments": {
                result.name: {
                    **result.summary(),
                    "task_rows": f"tasks/{label}{result.name}.jsonl",
                    "episode_rows": f"{label}{result.name}.jsonl",
                }
                for result in self.environments
            },
        }
