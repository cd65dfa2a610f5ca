"""Whether an environment says what an answer is, as far as its class tells."""

from typing import Any, cast

import pytest

from whet.component import Component, EnvironmentFacts, Selection, import_path
from whet.config.sections import Config, EnvironmentSection, EvaluationSection, ModelSection, RunSection
from whet.interfaces.environment import SingleTurn
from whet.plan.evaluation import evaluation_notes, with_answers


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
