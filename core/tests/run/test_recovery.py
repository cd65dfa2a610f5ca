"""Restarts are counted against progress, noted in the journal and told."""

import json

import pytest

from whet.config.sections import RecoverySection
from whet.errors import WorkerLost
from whet.interfaces.weights import TransferSpec
from whet.run.recovery import Budget, Recovery
from whet.run.run_folder import RunFolder

LOST = WorkerLost("generator", 1, "generate", "its process was killed by SIGKILL")


def test_a_budget_is_spent_and_only_new_steps_give_it_back():
    budget = Budget(2, refill=10)
    assert [budget.spend(3), budget.spend(3), budget.spend(3)] == [1, 0, None]
    assert budget.spend(12) is None
    assert [budget.spend(13), budget.spend(13), budget.spend(13)] == [1, 0, None]


def test_a_budget_without_refill_is_for_the_whole_run():
    budget = Budget(1, refill=0)
    assert [budget.spend(0), budget.spend(10**9)] == [0, None]


def test_steps_that_are_taken_again_are_no_progress(tmp_path):
    recovery = Recovery(RecoverySection(restarts=1, refill=2), RunFolder(tmp_path))
    recovery.finished(4)
    assert recovery.grant_run(LOST, 2)
    for step in (3, 4, 5):
        recovery.finished(step)
    assert not recovery.grant_run(LOST, 4)
    recovery.finished(6)
    assert recovery.grant_run(LOST, 4)


def test_a_restart_is_noted_and_told(tmp_path, capsys):
    recovery = Recovery(RecoverySection(), RunFolder(tmp_path))
    assert recovery.grant(LOST)
    assert recovery.grant_run(LOST, 20)
    replica, run = (json.loads(line) for line in (tmp_path / "journal.jsonl").read_text().splitlines())
    assert (replica["event"], replica["role"], replica["rank"], replica["left"]) == (
        "replica restarted", "generator", 1, 7,
    )  # fmt: skip
    assert (run["event"], run["cause"], run["left"]) == ("run restarted", LOST.cause, 2)
    told = capsys.readouterr().err.splitlines()
    assert told[0].startswith(
        "generator rank 1 was lost in generate: its process was killed by SIGKILL; it is restarted"
    )
    assert told[1].endswith("the run goes on after step 20 (2 more allowed)")


def test_switched_off_nothing_is_granted(tmp_path):
    recovery = Recovery(RecoverySection(enabled=False), RunFolder(tmp_path))
    assert not recovery.grant(LOST)
    assert not recovery.grant_run(LOST, 0)
    assert not (tmp_path / "journal.jsonl").exists()


def test_before_the_first_weight_sync_a_replica_has_its_weights_already(tmp_path):
    given: list[TransferSpec | None] = []
    Recovery(RecoverySection(), RunFolder(tmp_path)).replacing().sync(given.append)
    assert given == [None]


@pytest.mark.parametrize("key", ["replicas", "restarts", "refill"])
def test_budgets_are_not_negative(key):
    with pytest.raises(ValueError, match=key):
        RecoverySection(**{key: -1})
