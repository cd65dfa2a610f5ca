"""What does not go together is refused with its reason, from facts alone."""

from types import SimpleNamespace
from typing import Any

import pytest

from whet.component import Facts
from whet.plan.compatibility import incompatibilities

CONFIG: Any = SimpleNamespace(algorithm=SimpleNamespace(name="bandit"))


def found(algorithm: Facts | None = None, **others: Facts) -> list[str]:
    facts = {"algorithm": algorithm or Facts(group_size=4), "backend": Facts()}
    paths = {"loss": "algorithm.loss", "advantages": "algorithm.advantages", "filter": "algorithm.filters.0"}
    facts |= {paths.get(name, name): fact for name, fact in others.items()}
    return [str(problem) for problem in incompatibilities(CONFIG, facts)]


def test_what_fits_is_let_through() -> None:
    assert found(loss=Facts(), advantages=Facts(least_group_size=4)) == []
    assert found(Facts(), loss=Facts(), filter=Facts(least_group_size=9)) == []


def test_a_loss_that_ignores_what_the_algorithm_makes_is_refused() -> None:
    algorithm = Facts(columns_essential=frozenset({"advantages"}))
    assert found(algorithm, loss=Facts(columns_read=frozenset({"advantages", "version"}))) == []
    (problem,) = found(algorithm, loss=Facts(columns_read=frozenset({"version"})))
    assert problem == "algorithm.loss: reads no 'advantages', so nothing that bandit finds out would reach it"


@pytest.mark.parametrize("giver", ["algorithm", "advantages"])
def test_advantages_of_tokens_want_a_loss_that_takes_them(giver: str) -> None:
    giving = {giver: Facts(token_advantages=True)}
    assert found(**giving, loss=Facts(token_advantages=True)) == []
    (problem,) = found(**giving, loss=Facts())
    assert problem.startswith("algorithm.loss: wants one advantage for each sequence; as configured, algorithm")


@pytest.mark.parametrize("who", ["advantages", "filter"])
def test_a_comparison_wants_samples_to_compare(who: str) -> None:
    (problem,) = found(Facts(group_size=1), **{who: Facts(least_group_size=2)})
    assert "compares at least 2 samples of one task, and algorithm.group_size is 1" in problem
