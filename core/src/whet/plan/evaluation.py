"""Planning of evaluations: an environment's own key comes before the key of the section `evaluation`."""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from math import lcm
from typing import TYPE_CHECKING, Any

from attrs import evolve

from whet.component import EnvironmentFacts, Facts, Problem, loaded
from whet.config.messages import choice_words
from whet.errors import ConfigError

if TYPE_CHECKING:
    from whet.config.sections import Config, EnvironmentSection, EvaluationSection, RunSection
    from whet.interfaces.environment import Environment
    from whet.rollout.scoring import Scoring

OWN = ("pass_at", "majority_at", "passing")
"""Keys of `evaluation` that an environment of it may have for itself."""
TAKEN = ("evaluation", "validation", "seconds", "reward", "response_length", "groups", "episodes", "grader")
"""First parts of metrics of a run, which its environments cannot have for theirs."""
MOST_SUBSET_SAMPLES = 256
"""Votes of fewer than all samples are the exact mean over subsets, which takes seconds a task from here on."""


def chosen(entry: "EnvironmentSection", section: "EvaluationSection", key: str) -> Any:
    """Return the value of one of `OWN` that an environment is evaluated with."""
    own = getattr(entry, key)
    return getattr(section, key) if own is None else own


def with_answers(section: "EvaluationSection", facts: Mapping[str, Facts]) -> dict[str, Facts]:
    """Fill in whether environments of an evaluation state answers, where their class says so and their facts do not."""
    found = dict(facts)
    for i, entry in enumerate(section.environments):
        path = f"evaluation.environments.{i}"
        own = found.get(path)
        if entry.component and isinstance(own, EnvironmentFacts) and own.states_answers is None:
            found[path] = evolve(own, states_answers=_shown(loaded(entry.component.component.target)))
    return found


def _shown(target: object) -> bool | None:
    """Return whether a class has a `final_answer`; None where only the built object tells."""
    if not isinstance(target, type):
        return None
    if (found := getattr(target, "final_answer", None)) is not None:
        return True if callable(found) else None
    members = [member for base in target.__mro__[:-1] for member in vars(base).items()]
    named = {name for name, _ in members}
    named |= {name for _, one in members if inspect.isfunction(one) for name in one.__code__.co_names}
    return None if named & {"final_answer", "__getattr__", "setattr"} else False


def evaluation_notes(section: "EvaluationSection", facts: Mapping[str, EnvironmentFacts]) -> Iterator[str]:
    """Return which environments will show only when they are built whether there can be votes."""
    for i, entry in enumerate(section.environments):
        path = f"evaluation.environments.{i}"
        if chosen(entry, section, "majority_at") and facts.get(path, EnvironmentFacts()).states_answers is None:
            yield f"{path}: whether its answers can be voted on shows when it is built; its facts do not say"


def keep_best_notes(run: "RunSection", evaluation: "EvaluationSection", validate_every: int) -> Iterator[str]:
    """Return a note where steps are evaluated and not saved, so that the best of them cannot be kept."""
    if run.keep_best is None or (kind := run.keep_best.metric.partition("/")[0]) not in ("evaluation", "validation"):
        return
    every, key, save_every = evaluation.every, "evaluation.every", run.save_every
    if kind == "validation":
        every, key = validate_every, "algorithm.validate_every"
    if not save_every or every % save_every:
        evaluated = f"every {every} steps" if every else "only after the last step"
        both = f"every {lcm(every, save_every)} steps and at the end" if every and save_every else "only at the end"
        words = f"steps are evaluated {evaluated}, and both evaluated and saved {both}; the best is one of those"
        yield f"run.keep_best: {words}. To consider every evaluated step, let run.save_every divide {key}"
    elif not every:
        yield f"run.keep_best: steps are evaluated only at the end; set {key}"


def keep_best_problems(config: "Config") -> Iterator[Problem]:
    """Find a metric that no evaluation of the run has."""
    if config.run.keep_best is None:
        return
    metric, where = config.run.keep_best.metric, "run.keep_best.metric"
    family, _, rest = metric.partition("/")
    name, names = rest.partition("/")[0], {one.name or one.component.name for one in config.evaluation.environments}
    if family == "validation" and not (config.data and config.data.validation):
        yield Problem(where, f"is {metric}, and data.validation lists no files")
    if family == "evaluation" and name not in names:
        found = f"is {metric}, but evaluation.environments has no {name!r}"
        yield Problem(where, found + choice_words(name, names))


def evaluation_problems(
    section: "EvaluationSection", training: "Sequence[EnvironmentSection]", facts: Mapping[str, EnvironmentFacts]
) -> Iterator[Problem]:
    """Find environments that lack the samples or the answers that their figures need."""
    votes = [chosen(entry, section, "majority_at") for entry in section.environments]
    if section.unanswered == "vote" and not any(votes):
        yield Problem("evaluation.unanswered", "has no effect without a majority vote; set evaluation.majority_at")
    for i, entry in enumerate(section.environments):
        known = facts.get(f"evaluation.environments.{i}", EnvironmentFacts()).states_answers
        if known is False and votes[i]:
            yield _no_votes(i, entry)
        for key, figure in (("pass_at", "pass"), ("majority_at", "maj")):
            most = max(chosen(entry, section, key), default=0)
            where = f"evaluation.environments.{i}.{key}" if getattr(entry, key) is not None else f"evaluation.{key}"
            if most > entry.samples:
                yield Problem(
                    f"evaluation.environments.{i}.samples",
                    f"is {entry.samples}, too few for {figure}@{most} of {where}; raise it, or give this environment "
                    f"its own {key}",
                )
        if entry.samples > MOST_SUBSET_SAMPLES and any(k < entry.samples for k in votes[i]):
            yield Problem(
                f"evaluation.environments.{i}.majority_at",
                f"asks for votes of fewer than all {entry.samples} samples, which are worked out over all subsets: "
                f"that takes too long from {MOST_SUBSET_SAMPLES + 1} samples on",
            )
    for i, entry in enumerate(training):
        for key in OWN:
            if getattr(entry, key) is not None:
                yield Problem(f"environments.{i}.{key}", "is of evaluation; move it to evaluation.environments")
        name = entry.name or entry.component.name
        if len(training) > 1 and name in TAKEN:
            yield Problem(
                f"environments.{i}.name",
                f"is {name}, with which other metrics begin, and those of an environment are NAME/reward/mean and so "
                "on; give it another name",
            )


def _no_votes(i: int, entry: "EnvironmentSection") -> Problem:
    return Problem(
        f"evaluation.environments.{i}.majority_at",
        f"the environment {entry.name or entry.component.name!r} does not say what an answer is, so nobody can vote; "
        "give it a `final_answer`, or this entry `majority_at: []`",
    )


def scoring(section: "EvaluationSection", i: int, environment: "Environment") -> "Scoring":
    """Return the figures to compute for the environment at a position of `evaluation.environments`.

    Raises `ConfigError` where votes are wanted of an environment that does not say what an answer is.
    """
    from whet.interfaces.environment import states_answers
    from whet.rollout.scoring import Passing, Scoring

    entry = section.environments[i]
    pass_at, majority_at, passing = (chosen(entry, section, key) for key in OWN)
    if majority_at and not states_answers(environment):
        raise ConfigError(str(_no_votes(i, entry)))
    passes = Passing(passing.reward, passing.at_least)
    vote = section.unanswered == "vote"
    return Scoring(tuple(sorted(set(pass_at))), tuple(sorted(set(majority_at))), passes, vote)
