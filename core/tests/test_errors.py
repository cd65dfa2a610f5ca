import inspect

import pytest

from whet import errors
from whet.errors import ConfigError, WhetError, WorkerError


def test_everything_that_whet_raises_on_purpose_can_be_caught_at_once() -> None:
    kinds = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if kind.__module__ == errors.__name__]
    assert len(kinds) >= 7
    assert all(issubclass(kind, WhetError) for kind in kinds)


def test_a_config_error_has_a_line_for_each_problem() -> None:
    error = ConfigError(["run.steps: missing", "model.path: missing"])
    assert str(error) == "run.steps: missing\nmodel.path: missing"
    assert error.problems == ["run.steps: missing", "model.path: missing"]
    assert ConfigError("one").problems == ["one"]


@pytest.mark.parametrize(("rank", "who"), [(3, "backend rank 3"), (None, "backend")])
def test_a_worker_error_names_role_rank_phase_and_cause(rank: int | None, who: str) -> None:
    error = WorkerError("backend", rank, "train", "it died", "out of memory")
    assert str(error).startswith(f"{who} failed in train: it died")
    assert "out of memory" in str(error)
    assert (error.role, error.rank, error.phase, error.cause) == ("backend", rank, "train", "it died")
