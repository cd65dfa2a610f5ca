"""Training on one's own data: tables, records of other frameworks, epochs, weights."""

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import yaml

from whet.data.files import read_rows
from whet_testing.runs import numbers

ROWS = [(f"{n}+{n}?", str(2 * n)) for n in range(10)]


TELLING = """
from whet_data.offline import OfflineData
read = OfflineData._read
def telling(self, name, *rest):
    print("tokenises", name)
    return read(self, name, *rest)
OfflineData._read = telling
from whet.cli import main
main()
"""
"""The command line that tells what data it tokenises."""


@pytest.fixture
def config(tmp_path, tiny_model_folder):
    """Write a config; sections are merged into it, and None takes a key away."""

    def config(**sections) -> Path:
        (tmp_path / "train.csv").write_text("question,answer\n" + "".join(f"{q},{a}\n" for q, a in ROWS))
        (tmp_path / "validation.tsv").write_text("prompt\tcompletion\n1+1?\t2\n")
        files = {
            "train": [{"path": "train.csv", "fields": {"prompt": "question", "completion": "answer"}}],
            "validation": [{"path": "validation.tsv"}],
        }
        document = {
            "run": {"folder": "run", "epochs": 2, "save_every": 1},
            "model": {"path": str(tiny_model_folder)},
            "algorithm": {"use": "sft", "batch_size": 4},
            "backend": {"use": "fsdp2", "optimizer": {"lr": 1e-3}, "schedule": {"kind": "linear", "warmup_ratio": 0.4}},
            "data": files,
            "cluster": {"workers": "inline"},
        }
        for name, section in sections.items():
            merged = {**document.get(name, {}), **section}
            document[name] = {key: value for key, value in merged.items() if value is not None}
        path = tmp_path / "it.yaml"
        path.write_text(yaml.safe_dump(document))
        return path

    return config


@pytest.fixture
def command(tmp_path, programs):
    """Run `whet`, and return its exit code, output and errors."""

    def command(*arguments, code="from whet.cli import main; main()"):
        environment = {**os.environ, "NO_COLOR": "1"}
        return programs.run(code, list(map(str, arguments)), folder=tmp_path, variables=environment, seconds=180)

    return command


def done(ended) -> str:
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_check_prints_what_it_recognised(command, config, tmp_path):
    turns = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]
    (tmp_path / "share.json").write_text(json.dumps([{"conversations": turns}]))
    (tmp_path / "alpaca.jsonl").write_text(json.dumps({"instruction": "a", "output": "b"}))
    files = [{"path": name} for name in ("share.json", "alpaca.jsonl", "validation.tsv")]
    plan = done(command("check", config(data={"train": files})))
    for line in (
        "data.train.0: share.json: JSON; columns conversations; ShareGPT: `messages`",
        "data.train.1: alpaca.jsonl: JSON lines; columns instruction, output; Alpaca: `prompt` and `completion`",
        "data.train.2: validation.tsv: TSV; columns prompt, completion",
    ):
        assert line in plan


def test_data_is_tokenised_while_models_start(command, config, tmp_path):
    done(command("run", config(run={"epochs": None, "steps": 1})))
    spans = {(row["role"], row["phase"]): row for row in read_rows(tmp_path / "run/spans.jsonl")}
    started, tokenised = spans["backend", "start"], spans["data", "tokenise"]
    assert tokenised["begin"] < started["begin"] + started["seconds"]


FIELDS = {"prompt": "question", "completion": "answer"}


@pytest.mark.parametrize(
    ("sections", "problem"),
    [
        (
            {"data": {"train": [{"path": "train.csv"}]}},
            (
                "data.train.0.path: none of the first 10 records can be used; train.csv:2: it has the columns "
                "'question', 'answer'; wanted `messages`, or `prompt` and `completion`, or `text`; `fields` says what "
            ),
        ),
        (
            {"data": {"train": [{"path": "train.csv", "fields": {"prompt": "questoin"}}]}},
            "data.train.0.path: `fields` names the column 'questoin'; the file has question, answer",
        ),
        (
            {"data": {"train": [{"path": "train.csv", "fields": {"promt": "question"}}]}},
            "data.train.0.fields: names promt, wanted messages, prompt, completion",
        ),
        ({"run": {"steps": 3}}, "run.epochs: is 2, and run.steps is 3; state one of the two"),
        ({"run": {"epochs": None}}, "run: states neither `steps` nor `epochs`"),
        ({"run": {"epochs": 0}}, "run.epochs: must be > 0"),
        (
            {"data": {"train": [{"path": "train.csv", "fields": FIELDS, "weight": 1}, {"path": "validation.tsv"}]}},
            "data.train.1.weight: missing: other files of data.train have a weight, so all need one",
        ),
        (
            {"data": {"validation": [{"path": "validation.tsv", "weight": 1}]}},
            "data.validation.0.weight: validation reads every record once; remove the weight",
        ),
        (
            {"algorithm": {"use": "grpo", "batch_size": None}},
            "run.epochs: grpo is fed by rollouts, which have no epochs",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused_with_file_and_column(command, config, sections, problem):
    ended = command("check", config(**sections))
    assert ended.returncode == 1
    assert problem in ended.stderr


def test_epochs_show_every_record_as_often_as_stated_and_the_schedule_ends_with_them(command, config, tmp_path):
    path = config()
    assert "finished 5 steps" in command("run", path).stderr
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [row["epoch"] for row in rows if row["step"]] == pytest.approx([0.4, 0.8, 1.2, 1.6, 2.0])
    assert [row["lr"] for row in rows if row["step"]] == pytest.approx([5e-4, 1e-3, 2e-3 / 3, 1e-3 / 3, 0])
    again = command("run", path)
    assert "this run is finished, all 5 steps of it" in again.stderr
    assert "run.epochs=4" in again.stderr
    assert "finished 8 steps" in command("run", path, "run.epochs=3").stderr
    saved = done(command("check", tmp_path / "run/config.yaml"))
    assert "feeds on data" in saved


def test_a_run_that_gets_more_epochs_trains_on_every_record_as_often(command, config, tmp_path):
    path = config(run={"epochs": 1})
    assert "finished 3 steps" in command("run", path).stderr
    again = command("run", path, code=TELLING)
    assert "this run is finished, all 3 steps of it" in again.stderr
    assert "tokenises" not in again.stdout
    assert "run.epochs=2" in again.stderr
    more = command("run", path, "run.epochs=2", code=TELLING)
    assert "finished 6 steps" in more.stderr
    assert more.stdout.count("tokenises train") == 1
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [row["epoch"] for row in rows if row["step"]] == pytest.approx([0.4, 0.8, 1, 1.4, 1.8, 2])
    assert "this run is finished, all 6 steps of it" in command("run", path, "run.epochs=2").stderr


def test_another_run_is_refused_before_its_data_is_tokenised(command, config, tmp_path):
    assert "finished 3 steps" in command("run", config(run={"epochs": 1})).stderr
    shutil.rmtree(tmp_path / "run/checkpoints")  # or nothing would be left to do
    path = config(run={"epochs": 2, "seed": 1})
    refused = command("run", path, code=TELLING)
    assert refused.returncode == 1
    assert "holds another run" in refused.stderr
    assert "tokenises" not in refused.stdout


@pytest.mark.slow
def test_a_run_by_epochs_that_is_ended_goes_on_to_the_same_bits(command, config, tmp_path):
    weighted = [
        {"path": "train.csv", "fields": FIELDS, "weight": 1},
        {"path": "validation.tsv", "weight": 3},
    ]
    path = config(data={"train": weighted}, run={"epochs": 3})
    assert "finished 9 steps" in command("run", path, "run.folder=whole").stderr
    code = """
import os, signal, sys
import whet.run.compose as compose
from whet.run.steps import Steps
finish, ends = Steps.finish, int(sys.argv.pop(1))
def ended(self, step, metrics, batch):
    finish(self, step, metrics, batch)
    if step.number == ends:
        os.kill(os.getpid(), signal.SIGKILL)
Steps.finish = ended
from whet.cli import main
main()
"""
    for step in (2, 5):
        assert command(step, "run", path, "run.folder=part", code=code).returncode == -signal.SIGKILL
    assert "finished 9 steps" in command("run", path, "run.folder=part").stderr
    whole, part = tmp_path / "whole", tmp_path / "part"
    assert numbers(part) == numbers(whole)
    assert (part / "model/model.safetensors").read_bytes() == (whole / "model/model.safetensors").read_bytes()
