"""The report reads what runs write: whole, torn, old, cut short, or of no run at all."""

import json

import pytest

from whet.errors import WhetError
from whet.run.run_folder import RunFolder
from whet_report.page import embedded
from whet_report.run import read_run, state


def test_the_folder_of_a_run_gives_everything_that_the_page_shows(tmp_path, run_folders):
    data = read_run(run_folders.write(tmp_path))
    assert (data["run"]["state"], data["run"]["done"], data["run"]["steps"]) == ("failed", 12, 12)
    assert data["curves"]["loss"]["x"] == list(range(1, 13))
    assert data["curves"]["evaluation/sums/reward"] == {"x": [5, 10], "y": [0.55, 0.6]}
    assert [source["step"] for source in data["training"]["sources"]] == list(range(1, 13))
    assert [(s["step"], s["name"], s["total"]) for s in data["evaluation"]["sources"]] == [
        (5, "sums", 1),
        (10, "sums", 1),
    ]
    assert [event["event"] for event in data["journal"]] == ["opened", "failed"]
    assert data["logs"][0]["text"].startswith("started")
    assert ["model", "a/model"] in data["run"]["facts"]
    assert [(one["phase"], one["measured"] / 2**20, one["predicted"], one["source"]) for one in data["memory"]] == [
        ("loading", 256, None, ""),
        ("train", pytest.approx(1024 * 1.6), 3 << 29, "trace"),
    ]
    assert json.loads(embedded(data)) == data


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(WhetError, match=r"holds no run: there is no metrics\.jsonl"):
        read_run(tmp_path)


@pytest.mark.parametrize(
    "name", ["metrics.jsonl", "spans.jsonl", "journal.jsonl", "config.yaml", "plan.json", "rollouts"]
)
def test_a_missing_file_leaves_a_gap_and_no_error(tmp_path, run_folders, name):
    run_folders.write(tmp_path)
    (tmp_path / name).rename(tmp_path / "elsewhere")
    embedded(read_run(tmp_path))


@pytest.mark.parametrize(
    "text", [b"", b"\x00\xff{", b"[" * 5000, b'{"a": [1', b"null\n", b"[1]\n", b'"x"\n', b": - ? |"]
)
def test_damaged_files_leave_gaps_and_no_error(tmp_path, run_folders, text):
    run_folders.write(tmp_path)
    for file in tmp_path.rglob("*"):
        if file.is_file():
            file.write_bytes(text)
    embedded(read_run(tmp_path))


def test_rows_of_another_form_are_shown_as_far_as_they_can_be(tmp_path):
    run = RunFolder(tmp_path)
    run.append(
        "metrics.jsonl",
        [{"step": 1, "loss": float("nan"), "x": "y"}, {"step": "2"}, {"loss": 1}, {"step": 3, "loss": 2}],
    )
    run.append("spans.jsonl", [{}, {"step": 1, "begin": "x"}, {"step": 1, "begin": 0, "seconds": 1}])
    run.append("journal.jsonl", [{"event": 5}, {"time": "x", "event": "failed", "message": ["a"]}])
    odd = [
        {},
        {"messages": "no"},
        {"messages": [3, {"role": 1, "content": ["a"]}], "rewards": []},
        {"reward": float("inf")},
    ]
    odd += [{"sequences": "x"}, {"sequences": [{}, {"tokens": [1, 2], "loss_mask": [1], "trainer_logprobs": "x"}]}]
    odd += [{"sequences": [{"tokens": [1], "loss_mask": [1], "sampler_logprobs": [-1], "trainer_logprobs": [None]}]}]
    run.append("rollouts/step-000001.jsonl", odd)
    run.append("rollouts/step-nothing.jsonl", odd)
    data = read_run(tmp_path)
    embedded(data)
    assert data["curves"]["loss"] == {"x": [3], "y": [2.0], "lost": 1}
    [source] = data["training"]["sources"]
    assert sorted(len(one["sequences"]) for one in source["episodes"]) == [0, 0, 0, 0, 0, 1, 1]
    assert data["gaps"]["worst"][0]["gap"] == 1e9  # stands for one that is not finite


def test_numbers_that_json_or_floats_lack_leave_gaps_and_no_error(tmp_path):
    huge = 10**400
    run = RunFolder(tmp_path)
    odd = [huge, -huge, float("nan"), float("inf"), "1", None, [1], {}, True, -1, 1.7e308, 5e-324]
    rows = [{"step": 1, "loss": 2.0}, {"step": 2, "loss": huge, "lr": 0.1}]
    rows += [{"step": 3, "time": value, "seconds/step": other, "x": value} for value in odd for other in odd]
    rows += [{"step": value, "time": 5.0, "loss": 1.0} for value in (huge, -1, float("nan"), "2", None)]
    run.append("metrics.jsonl", rows)
    span = {"role": huge, "phase": None}
    run.append("spans.jsonl", [{"step": 3, "begin": v, "seconds": o, **span} for v in odd for o in odd])
    run.append("spans.jsonl", [{"step": v, "begin": 1.0, "seconds": 2.0, **span} for v in odd])
    run.append("journal.jsonl", [{"time": v, "event": "opened"} for v in (float("nan"), huge, "x", 1e308, -1e308)])
    sequence = {"tokens": [1], "loss_mask": [1], "sampler_logprobs": [huge], "trainer_logprobs": [-1.0]}
    run.append("rollouts/step-000001.jsonl", [{"sequences": [sequence], "reward": huge}])
    (tmp_path / "plan.json").write_text('{"roles": [Infinity]}')
    data = json.loads(embedded(read_run(tmp_path)))
    assert data["curves"]["loss"] == {"x": [1], "y": [2.0], "lost": 1}
    assert data["curves"]["lr"] == {"x": [2], "y": [0.1]}
    assert (data["run"]["began"], data["plan"]) == (1e308, {"roles": [None]})
    assert data["training"]["sources"][0]["episodes"][0]["reward"] is None


def test_a_run_of_data_files_has_no_rollouts(tmp_path):
    RunFolder(tmp_path).append("metrics.jsonl", [{"step": n, "time": n * 1.0, "loss": 1 / n} for n in range(1, 9)])
    data = read_run(tmp_path)
    assert data["training"] == {"sources": [], "steps": 0}
    assert data["gaps"] == {"worst": [], "steps": [], "dots": []}


@pytest.mark.parametrize(
    ("events", "done", "word"),
    [
        (["opened", "closed"], 5, "finished"),
        (["opened", "closed"], 3, "stopped"),
        (["opened", "failed"], 3, "failed"),
        (["opened", "failed", "opened"], 3, "open"),
        ([], 0, "unknown"),
    ],
)
def test_the_journal_says_how_a_run_stands(events, done, word):
    assert state([{"event": event} for event in events], done, 5)["state"] == word


def test_time_between_run_attempts_is_not_work():
    events = [("opened", 0), ("step", 10), ("opened", 100), ("step", 105), ("closed", 107)]
    found = state([{"event": event, "time": time} for event, time in events], 2, 2)
    assert (found["seconds"], found["run_attempts"]) == (17.0, 2)


def test_versions_of_a_role_with_a_python_of_its_own_stand_beside_the_driver_s(tmp_path):
    (tmp_path / "journal.jsonl").write_text('{"event": "opened", "time": 1}\n')
    held = {"torch": "2.13.0", "roles": {"generator": {"interpreter": "/x/python", "torch": "2.14.1"}, "odd": 3}}
    (tmp_path / "versions.json").write_text(json.dumps(held))
    assert read_run(tmp_path)["versions"] == {
        "torch": "2.13.0", "generator: interpreter": "/x/python", "generator: torch": "2.14.1",
    }  # fmt: skip
