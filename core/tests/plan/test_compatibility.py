"""What does not go together is refused with its reason, from facts alone."""

from typing import Any

import pytest

from whet.component import AdvantagesFacts, AlgorithmFacts, BackendFacts, Facts, FilterFacts, LossFacts
from whet.plan.compatibility import incompatibilities
from whet.plan.roles import Roles


def found(algorithm: AlgorithmFacts | None = None, **others: Facts) -> list[str]:
    facts: dict[str, Facts] = {"algorithm": algorithm or AlgorithmFacts(group_size=4), "backend": BackendFacts()}
    paths = {"loss": "algorithm.loss", "advantages": "algorithm.advantages", "filter": "algorithm.filters.0"}
    facts |= {paths.get(name, name): fact for name, fact in others.items()}
    return [str(problem) for problem in incompatibilities("bandit", Roles(facts, {}, {}, (), ()))]


def test_what_fits_is_let_through() -> None:
    assert found(loss=LossFacts(), advantages=AdvantagesFacts(least_group_size=4)) == []
    assert found(AlgorithmFacts(), loss=LossFacts(), filter=FilterFacts(least_group_size=9)) == []


def test_a_loss_that_ignores_what_the_algorithm_makes_is_refused() -> None:
    algorithm = AlgorithmFacts(columns_essential=frozenset({"advantages"}))
    assert found(algorithm, loss=LossFacts(columns_read=frozenset({"advantages", "version"}))) == []
    (problem,) = found(algorithm, loss=LossFacts(columns_read=frozenset({"version"})))
    assert problem == "algorithm.loss: reads no 'advantages', so nothing that bandit finds out would reach it"


@pytest.mark.parametrize(("giver", "kind"), [("algorithm", AlgorithmFacts), ("advantages", AdvantagesFacts)])
def test_advantages_of_tokens_want_a_loss_that_takes_them(giver: str, kind: Any) -> None:
    giving = {giver: kind(token_advantages=True)}
    assert found(**giving, loss=LossFacts(token_advantages=True)) == []
    (problem,) = found(**giving, loss=LossFacts())
    assert problem.startswith("algorithm.loss: wants one advantage for each sequence; as configured, algorithm")


@pytest.mark.parametrize(("who", "kind"), [("advantages", AdvantagesFacts), ("filter", FilterFacts)])
def test_a_comparison_wants_samples_to_compare(who: str, kind: Any) -> None:
    (problem,) = found(AlgorithmFacts(group_size=1), **{who: kind(least_group_size=2)})
    assert "compares at least 2 samples of one task, and algorithm.group_size is 1" in problem
