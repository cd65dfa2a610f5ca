"""What a tracker is sent of a run, and what of the run folder it is sent once more."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from whet.interfaces.logger import Event, RunInfo
from whet.run.run_folder import RunFolder
from whet_tracking.config import TrackingConfig
from whet_tracking.logger import TrackingLogger, name_of
from whet_tracking.tables import LONGEST, any_table, bins, cell, episodes, failures


class Sent(TrackingLogger):
    """A tracker that keeps what it is sent."""

    def __init__(self, folder: Path, resumed_from: int = 0, last: int = -1, **config: Any) -> None:
        super().__init__(TrackingConfig(**config), RunInfo(folder, "it", {}, 9, resumed_from))
        self.sent: list[tuple[int, dict[str, Any], bool]] = []
        self.ended: list[bool] = []
        self.catch_up(last)

    def send(self, step: int, values: Any, whole: bool) -> None:
        self.sent.append((step, dict(values), whole))

    def table(self, columns: list[str], rows: list[list[Any]]) -> Any:
        return [dict(zip(columns, row, strict=True)) for row in rows]

    def histogram(self, counts: list[int], bounds: list[float]) -> Any:
        return counts, bounds

    def finish(self, failed: bool) -> None:
        self.ended.append(failed)

    @property
    def names(self) -> list[tuple[int, str]]:
        return [(step, "metrics" if whole else next(iter(values))) for step, values, whole in self.sent]


def episode(text: str = "4", **keys: Any) -> dict[str, Any]:
    messages = [
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "hm"},
        {"role": "user", "content": "well?"},
        {"role": "assistant", "content": text},
    ]
    return {"environment": "sums", "task": 3, "sample": 0, "reward": 1.0, "messages": messages, **keys}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a run folder with four steps, as a run leaves it that is killed."""
    run = RunFolder(tmp_path)
    run.journal("opened", after_step=0)
    for step in range(5):
        run.append("metrics.jsonl", [{"step": step, "time": 1.0, "loss": 1 / (1 + step)}])
        run.append("histograms.jsonl", [{"step": step, "name": "x", "edges": [0.0, 1.0], "counts": [1, 2, 3]}])
        run.append(f"rollouts/step-{step:06d}.jsonl", [episode(str(step))] * 3)
    run.append("evaluations/step-000004-sums.jsonl", [episode()])
    run.append("tables/step-000002-worst.jsonl", [{"task": 3}])
    return tmp_path


def test_a_resumed_run_sends_what_the_tracker_lacks_up_to_the_checkpoint(folder: Path) -> None:
    sent = Sent(folder, resumed_from=3, last=1, rollouts_every=1, rollouts=2)
    assert sent.names == [
        (1, "rollouts"), (2, "x"), (2, "table/worst"), (2, "rollouts"), (2, "metrics"), (3, "x"), (3, "rollouts"),
        (3, "metrics"),
    ]  # fmt: skip
    assert sent.sent[4] == (2, {"loss": pytest.approx(1 / 3), "step": 2, "attempt": 1}, True)
    assert sent.sent[1][1] == {"x": ([1, 2, 3], [-1.0, 0.0, 1.0, 2.0])}
    assert [row["response"] for row in sent.sent[3][1]["rollouts"]] == ["hm\n(user) well?\n2"] * 2


def test_a_new_run_sends_nothing_of_a_folder(folder: Path) -> None:
    assert Sent(folder).sent == []


def test_a_tracker_that_has_all_is_sent_the_last_rollouts_alone(folder: Path) -> None:
    assert Sent(folder, resumed_from=3, last=3, rollouts_every=1).names == [(3, "rollouts")]


def test_rows_name_the_run_attempt_that_took_the_step(folder: Path) -> None:
    sent = Sent(folder, resumed_from=4, last=3)
    sent.event(Event("opened", 4))
    sent.log(5, {})
    assert [(values["step"], values["attempt"]) for _, values, whole in sent.sent if whole] == [(4, 1), (5, 2)]


@pytest.mark.parametrize(("every", "steps"), [(0, []), (1, [1, 2, 3, 4, 5, 6]), (3, [1, 3, 6])])
def test_rollouts_become_a_table_every_so_many_steps(tmp_path: Path, every: int, steps: list[int]) -> None:
    sent = Sent(tmp_path, rollouts_every=every)
    for step in range(1, 7):
        sent.event(Event("rollouts", step, rows=[episode()]))
    assert sent.names == [(step, "rollouts") for step in steps]


def test_an_evaluation_is_a_table_of_its_first_episodes(tmp_path: Path) -> None:
    sent = Sent(tmp_path, episodes=2)
    sent.event(Event("evaluation", 4, "sums", {"figures": {}}, [episode()] * 3))
    ((step, values, _),) = sent.sent
    assert (step, len(values["evaluation/sums/episodes"])) == (4, 2)
    assert values["evaluation/sums/episodes"][0]["prompt"] == "2+2?"
    Sent(tmp_path, episodes=0).event(Event("evaluation", 4, "sums", {}, [episode()]))


def test_failures_of_all_run_attempts_are_a_table_at_the_end(folder: Path) -> None:
    RunFolder(folder).journal("group dropped", group=7, cause="no connection")
    sent = Sent(folder, resumed_from=4, last=4, rollouts_every=0)
    sent.close(failed=True)
    sent.close(failed=True)
    ((_, values, _),) = sent.sent
    (row,) = values["failures"]
    assert (row["event"], row["details"]) == ("group dropped", '{"group": 7, "cause": "no connection"}')
    assert sent.ended == [True]


def test_rows_of_different_keys_are_one_table() -> None:
    columns, rows = any_table([{"a": 1, "step": 9}, {"b": [1, {"c": None}]}], 2)
    assert columns == ["step", "a", "b"]
    assert rows == [[2, 1, None], [2, None, '[1, {"c": null}]']]


def test_cells_are_short_and_can_be_encoded() -> None:
    assert cell("x" * (LONGEST + 1)).endswith(f"... ({LONGEST + 1:,} characters)")
    assert cell("a\ud800b") == "a?b"
    assert [cell(value) for value in (None, True, 1.5)] == [None, True, 1.5]


def test_tables_of_nothing_have_no_rows() -> None:
    assert episodes([], 1, 5)[1] == failures([])[1] == any_table([], 1)[1] == []
    assert episodes([{}], 1, 5)[1][0][-2:] == ["", ""]


@pytest.mark.parametrize(("edges", "bounds"), [([0.0, 1.0, 3.0], [-1.0, 0.0, 1.0, 3.0, 5.0]), ([2.0], [1.0, 2.0, 3.0])])
def test_the_outermost_bins_are_as_wide_as_their_neighbours(edges: list[float], bounds: list[float]) -> None:
    assert bins(edges, [0] * (len(edges) + 1))[1] == bounds


def test_a_run_keeps_its_name_where_its_folder_is_moved_and_a_copy_has_a_name_of_its_own(tmp_path, caplog):
    first, moved, copy = tmp_path / "first", tmp_path / "moved", tmp_path / "copy"
    first.mkdir()
    assert name_of(first, "it.json", "id", "a") == ("a", False)
    first.rename(moved)
    assert name_of(moved, "it.json", "id", "b") == ("a", True)
    first.symlink_to(moved)
    assert name_of(first, "it.json", "id", "c") == ("a", True)
    shutil.copytree(moved, copy)
    assert not caplog.text
    assert name_of(copy, "it.json", "id", "d") == ("d", False)
    assert f"{copy} is a copy of {moved}" in caplog.text
    assert name_of(copy, "it.json", "id", "e") == ("d", True)
    assert name_of(moved, "it.json", "id", "f") == ("a", True)


def test_a_run_of_an_earlier_version_keeps_its_name(tmp_path):
    RunFolder(tmp_path).write_json("it.json", {"id": "a"})
    assert name_of(tmp_path, "it.json", "id", "b") == ("a", True)
    assert RunFolder(tmp_path).read_json("it.json") == {"id": "a", "folder": str(tmp_path)}


@pytest.mark.parametrize("text", ["[1]", "3", "null"])
def test_a_file_without_names_is_written_anew(tmp_path, text):
    (tmp_path / "it.json").write_text(text)
    assert name_of(tmp_path, "it.json", "id", "a") == ("a", False)
    assert name_of(tmp_path, "it.json", "id", "b") == ("a", True)
