"""Evaluations with a real model: pass@k, votes and intervals, from the config to the files and back to another one."""

import json
import math
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import yaml

import whet
from whet.data.files import read_rows
from whet.errors import ConfigError, DataError
from whet_jobs.jobs import evaluate

HERE = Path(__file__).parent
INLINE = "cluster.workers=inline"


@pytest.fixture(scope="module")
def config(tmp_path_factory, small_run):
    section = {
        "every": 1,
        "pass_at": [1, 3],
        "majority_at": [2, 4],
        "passing": {"reward": "right"},
        "environments": [
            {"use": "first", "name": "one", "samples": 4},
            {"use": "first", "name": "two", "turns": 2, "samples": 4, "unreachable": 5, "passing": {"at_least": 1.5}},
            {
                "use": "even",
                "split": "train",
                "limit": 3,
                "majority_at": [],
                "pass_at": [1],
                "passing": {"at_least": 0.1},
            },
        ],
    }
    folder = tmp_path_factory.mktemp("evaluation")
    plugins = [str(HERE / name) for name in ("first_letters.py", "even_digits.py")]
    return small_run(folder, evaluation=section, plugins=plugins, run={"folder": str(folder / "run"), "steps": 1})


RETRIES = ["rollout.infrastructure_retries=0", "rollout.retries=0"]


@pytest.fixture(scope="module")
def written(config, tmp_path_factory):
    """An evaluation of the model as it is, in files."""
    out = tmp_path_factory.mktemp("out")
    evaluated = evaluate(config, [INLINE, *RETRIES])
    evaluated.write(out)
    return out, str(evaluated)


def in_subsets(rows, k, worth):
    """The mean over tasks of the mean over subsets of k samples: the definition, from the records of episodes."""
    tasks = {}
    for row in rows:
        tasks.setdefault(row["task"], []).append(row)
    means = [[worth(subset) for subset in combinations(samples, k)] for samples in tasks.values()]
    return math.fsum(math.fsum(one) / len(one) for one in means) / len(means)


def vote(subset, passes):
    answers = [row["answer"] for row in subset if "answer" in row]
    most = max(map(answers.count, answers), default=0)
    winners = {answer for answer in answers if answers.count(answer) == most}
    worth = [np.mean([passes(row) for row in subset if row.get("answer") == winner]) for winner in winners]
    return np.mean(worth) if winners else 0.0


@pytest.mark.parametrize("name", ["one", "two"])
def test_figures_are_what_the_records_of_single_and_multi_turn_episodes_say(written, name):
    out, _ = written
    found = json.loads((out / "evaluation.json").read_text())["environments"][name]
    rows = list(read_rows(out / f"{name}.jsonl"))
    assert {row["turns"] for row in rows} == {1 if name == "one" else 2}
    assert any("answer" in row for row in rows)

    def passes(row):
        return row["rewards"]["right"] == 1.0 if name == "one" else row["reward"] >= 1.5

    def value(figure):
        return found["figures"][figure]["value"]

    assert value("reward") == pytest.approx(in_subsets(rows, 1, lambda one: one[0]["reward"]))
    assert value("right") == pytest.approx(in_subsets(rows, 1, lambda one: one[0]["rewards"]["right"]))
    for k in (1, 3):
        assert value(f"pass@{k}") == pytest.approx(in_subsets(rows, k, lambda some: float(any(map(passes, some)))))
    for k in (2, 4):
        assert value(f"maj@{k}") == pytest.approx(in_subsets(rows, k, lambda some: vote(some, passes)))
    for figure in found["figures"].values():
        assert figure["ci_low"] <= figure["value"] <= figure["ci_high"]


def test_what_failed_is_counted_and_scored_nowhere(written):
    out, table = written
    found = json.loads((out / "evaluation.json").read_text())["environments"]["two"]
    assert (found["tasks"], found["episodes"], found["dropped"], found["dropped_by_infrastructure"]) == (8, 28, 4, 4)
    assert {figure["tasks"] for figure in found["figures"].values()} == {7}
    lost = [row for row in read_rows(out / found["task_rows"]) if not row["samples"]]
    assert [(row["task"], row["dropped"], row["values"]) for row in lost] == [(5, 4, {})]
    assert "two: 4 of 32 episodes failed, 4 of them by their infrastructure; they count in no figure" in table


def test_the_table_has_a_line_for_each_figure(written):
    _, table = written
    cells = [line.split() for line in table.splitlines()]
    assert ["environment", "figure", "mean", "95", "%", "interval", "tasks"] in cells
    ours = [line[1] for line in cells if line and line[0] == "one"]
    assert ours == ["reward", "right", "short", "pass@1", "pass@3", "maj@2", "maj@4", "response_length"]


def test_an_evaluation_differs_from_itself_by_nothing(config, written):
    out, _ = written
    evaluated = evaluate(config, [INLINE, *RETRIES], against=out)
    assert evaluated.comparison is not None
    differences = evaluated.comparison.differences
    assert {d.value for d in differences.values()} == {0.0}
    lengths = differences["two", "response_length"]
    assert (lengths.low, lengths.high) == (0.0, 0.0)
    # Seven tasks without a difference do not show that no task of the kind differs.
    same = differences["two", "maj@4"]
    assert same.high == -same.low == pytest.approx(1 - 0.025 ** (1 / 7))
    assert {figure for name, figure in differences if name == "even"} == {"reward", "even", "pass@1", "response_length"}
    assert differences["two", "maj@4"].tasks == 7


def test_another_model_is_compared_task_by_task(config, written):
    out, _ = written
    changes = ["evaluation.temperature=0.1", "evaluation.environments.0.limit=6", "evaluation.passing.at_least=0.5"]
    evaluated = evaluate(config, [INLINE, *RETRIES, *changes], against=out / "evaluation.json")
    before, after = (
        {row["task"]: row["values"] for row in rows}
        for rows in (read_rows(out / "tasks/one.jsonl"), evaluated.result.rows()["tasks/one.jsonl"])
    )
    assert evaluated.comparison is not None
    found = evaluated.comparison.differences["one", "reward"]
    each = np.array([after[task]["reward"] - before[task]["reward"] for task in range(6)])
    assert found.tasks == 6
    assert found.value == pytest.approx(each.mean())
    assert found.high == pytest.approx(each.mean() + 2.570582 * each.std(ddof=1) / math.sqrt(6))
    assert ("one", "pass@1") not in evaluated.comparison.differences
    assert any("something else passes there" in note for note in evaluated.comparison.notes)


def test_only_an_evaluation_can_be_compared_with(config, tmp_path):
    (tmp_path / "evaluation.json").write_text('{"format": 0, "environments": {}}')
    with pytest.raises(DataError, match="has the format 0, wanted 1"):
        evaluate(config, [INLINE], against=tmp_path)
    (tmp_path / "evaluation.json").write_text("[]")
    with pytest.raises(DataError, match="no summary of an evaluation"):
        evaluate(config, [INLINE], against=tmp_path)


def test_a_run_evaluates_by_the_same_code(config, written):
    with whet.open(config, INLINE, *RETRIES, "evaluation.at_start=true") as parts:
        numbers = parts.evaluate(0)
        folder = Path(parts.config.run.folder)
    out, _ = written
    alone = json.loads((out / "evaluation.json").read_text())
    within = json.loads((folder / "evaluations/step-000000.json").read_text())
    assert within["step"] == 0
    for name, environment in within["environments"].items():
        assert environment["figures"] == alone["environments"][name]["figures"]
        for figure, found in environment["figures"].items():
            metric = f"evaluation/{name}/{figure}"
            assert numbers[metric].number() == found["value"]
            assert numbers[f"{metric}/ci_low"].number() == found["ci_low"]
            assert numbers[f"{metric}/ci_high"].number() == found["ci_high"]
        rows = list(read_rows(folder / "evaluations" / environment["task_rows"]))
        assert rows == list(read_rows(out / alone["environments"][name]["task_rows"]))


def test_who_cannot_state_answers_cannot_vote(config):
    with pytest.raises(
        ConfigError, match=r"evaluation.environments.2.majority_at: the environment 'even' does not say"
    ):
        evaluate(config, [INLINE, "evaluation.environments.2.majority_at=[1]"])


def test_too_few_samples_are_refused_by_check(whet, config, tmp_path):
    changed = tmp_path / "changed.yaml"
    document = yaml.safe_load(config.read_text())
    document["evaluation"]["pass_at"] = [8]
    changed.write_text(yaml.safe_dump(document))
    assert "evaluation.environments.0.samples: is 4, too few for pass@8" in whet("check", changed).error


def test_a_config_whose_run_begins_with_an_adapter_is_not_evaluated_without_it(config, tmp_path):
    begins = f"backend={{use: fsdp2, lora: {{adapter: {tmp_path}}}}}"
    with pytest.raises(ConfigError, match=r"backend\.lora\.adapter: a run begins with it.*--model"):
        evaluate(config, [INLINE, *RETRIES, begins])
