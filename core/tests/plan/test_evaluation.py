"""Whether an environment says what an answer is, as far as its class tells."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from whet.component import Component, EnvironmentFacts, Selection, import_path
from whet.config.sections import (
    Config,
    EnvironmentSection,
    EvaluationSection,
    KeepBestSection,
    ModelSection,
    RunSection,
)
from whet.interfaces.environment import SingleTurn
from whet.plan.evaluation import evaluation_notes, keep_best_notes, keep_best_problems, with_answers


class Mute:
    def __init__(self, config: object) -> None:
        self.config = config


class Stating(Mute):
    def final_answer(self, messages: object) -> str:
        return ""


class Perhaps(Mute):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.final_answer = config.answer


class PerhapsByMore(Mute):
    def __getattr__(self, name: str) -> Any:
        return getattr(self.config, name)


class Short(SingleTurn):
    pass


def build(config: object) -> Mute:
    return Mute(config)


PLACE = "evaluation.environments.0"


def evaluating(target: str) -> Config:
    environment = Selection("environments", Component("it", object, target), None)
    entry = EnvironmentSection(component=environment, samples=4)
    evaluation = EvaluationSection(environments=(entry,), majority_at=(4,))
    run, model, none = RunSection("run", steps=1), ModelSection("x"), cast(Any, None)
    return Config(run=run, model=model, algorithm=none, backend=none, evaluation=evaluation)


@pytest.mark.parametrize(
    ("built", "known"),
    [(Mute, False), (Stating, True), (Perhaps, None), (PerhapsByMore, None), (Short, None), (build, None)],
)
def test_a_class_says_whether_it_states_answers_where_it_can(built: Any, known: bool | None) -> None:
    config = evaluating(import_path(built))
    found = with_answers(config.evaluation, {PLACE: EnvironmentFacts()})
    assert found[PLACE].states_answers is known
    assert bool(list(evaluation_notes(config.evaluation, found))) == (known is None)
    for said in (True, False):
        given = {PLACE: EnvironmentFacts(states_answers=said)}
        assert with_answers(config.evaluation, given)[PLACE].states_answers is said


def test_what_has_not_been_imported_stays_so() -> None:
    config = evaluating("no_such_module:Environment")
    assert with_answers(config.evaluation, {PLACE: EnvironmentFacts()})[PLACE].states_answers is None


@pytest.mark.parametrize(
    ("save_every", "every", "metric", "words"),
    [
        (10, 20, "evaluation/test/correct", None),
        (3, 20, "validation/loss", None),
        (5, 20, "validation/loss", "both evaluated and saved every 15 steps and at the end"),
        (30, 20, "evaluation/test/correct", "both evaluated and saved every 60 steps and at the end"),
        (0, 20, "evaluation/test/correct", "both evaluated and saved only at the end"),
        (10, 0, "evaluation/test/correct", "evaluated only at the end; set evaluation.every"),
        (0, 0, "evaluation/test/correct", "both evaluated and saved only at the end"),
        (30, 20, "reward/mean", None),  # every step has it
    ],
)
def test_steps_that_are_evaluated_and_not_saved_are_noted(
    save_every: int, every: int, metric: str, words: str | None
) -> None:
    run = RunSection(folder="runs/it", steps=100, save_every=save_every, keep_best=KeepBestSection(metric))
    notes = list(keep_best_notes(run, EvaluationSection(every=every), validate_every=3))
    assert [words in note for note in notes] == [True] if words else not notes


@pytest.mark.parametrize(
    ("metric", "words"),
    [
        ("evaluation/tset/correct", "evaluation.environments has no 'tset' (did you mean 'test'?)"),
        ("evaluation/test/correct", ""),
        ("validation/loss", "data.validation lists no files"),
        ("reward/mean", ""),
    ],
)
def test_a_metric_of_no_evaluation_is_refused(metric: str, words: str) -> None:
    entry = SimpleNamespace(name="test", component=None)
    config: Any = SimpleNamespace(
        run=RunSection(folder="runs/it", steps=100, keep_best=KeepBestSection(metric)),
        evaluation=SimpleNamespace(environments=[entry]),
        data=None,
    )
    problems = [str(problem) for problem in keep_best_problems(config)]
    assert len(problems) == bool(words)
    assert words in "".join(problems)
