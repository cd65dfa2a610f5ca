"""`whet data look` as people type it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROWS = [(f"{n}+{n}?", str(2 * n)) for n in range(10)]
HEAVY = ("torch", "ray", "transformers", "datasets", "pyarrow")


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
def command(tmp_path):
    """Run `whet`, and return its exit code, output and errors."""

    def command(*arguments, code=None):
        python = [sys.executable, *(["-c", code] if code else ["-m", "whet"])]
        environment = {**os.environ, "NO_COLOR": "1"}
        return subprocess.run(
            [*python, *map(str, arguments)],
            cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=180, check=False,
        )  # fmt: skip

    return command


def done(ended) -> str:
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_it_shows_which_tokens_are_trained_on(command, config):
    found = done(command("data", "look", config(), "--rows", "1"))
    assert found.splitlines() == [
        "data.train of sft",
        "  data.train.0: train.csv: CSV; columns question, answer",
        "",
        "train.csv:2  16 tokens, 2 trained",
        r"  - <|im_start|>user\n0+0?<|im_end|>\n<|im_start|>assistant\n",
        "  + 0<|im_end|>",
        r"  - \n",
        "",
        "10 records: 10 kept, 0 too long, 0 malformed",
        "tokens: 160, 20 of them trained (12.5%)",
        "tokens of a sequence: mean 16, shortest 16, median 16, 95 % 16, longest 16",
        "2 epochs are 5 steps of 4 records",
        "marks: + trained, - not trained",
    ]


def test_it_counts_what_is_left_out_and_why(command, config, tmp_path):
    path = config(data={"max_length": 16}, run={"epochs": None, "steps": 4})
    with (tmp_path / "train.csv").open("a") as file:
        file.write("only one cell\n\x1b[31mred,\n1+1?,a b c d e f g h i\n")
    found = done(command("data", "look", path, "--rows", "0"))
    assert (
        "13 records: 10 kept, 1 too long, 2 malformed\n  too long: over 16 tokens (data.max_length); left out" in found
    )
    assert "a run refuses this data: 15.4% of the records are malformed, and data.max_bad_records allows 1.0%" in found
    assert "  malformed: train.csv:12: the row has 1 cells, wanted 2: 'question, answer'" in found
    assert "malformed: train.csv:13: a record has the columns 'question', 'answer' (empty)" in found
    assert "4 steps of 4 records are 1.60 epochs" in found
    rounded = done(command("data", "look", config(run={"epochs": 1.1}, algorithm={"batch_size": 1})))
    assert "1.1 epochs are 11 steps of 1 records" in rounded, "as many as a run takes"
    found = done(command("data", "look", path, "--records", "4"))
    assert "4 records (the first; --records 0 reads all)" in found


@pytest.mark.parametrize(
    ("data", "answers", "reason"),
    [
        ({}, "x" * 60, "66.7% of the records are too long, and data.max_too_long allows 50%"),
        ({"max_too_long": 1, "max_bad_records": 1}, "", None),
        ({"max_too_long": 1, "max_length": 2}, "x", "no record is left"),
    ],
)
def test_it_says_where_a_run_refuses_what_is_left(command, config, tmp_path, data, answers, reason):
    path = config(data={"max_length": 30, **data})
    (tmp_path / "train.csv").write_text("question,answer\n1+1?,2\n" + f"1+1?,{answers}\n" * 2)
    found = done(command("data", "look", path, "--rows", "0"))
    refused = [line for line in found.splitlines() if "a run refuses" in line]
    assert refused == ([f"  a run refuses this data: {reason}"] if reason else [])


def test_it_escapes_what_could_steer_a_terminal(command, config, tmp_path):
    path = config()
    (tmp_path / "train.csv").write_text("question,answer\n\x1b]0;owned\x07\u202ehi,\x1b[2J\n")
    for style in ([], ["--tokens"]):
        found = done(command("data", "look", path, *style))
        assert not [letter for letter in found if not letter.isprintable() and letter != "\n"]
        assert "\\x1b" in found


def test_it_shows_characters_of_several_tokens_as_they_are(command, config, tmp_path):
    path = config()
    (tmp_path / "train.csv").write_text("question,answer\nZoë – 大?,für dich\n", encoding="utf-8")
    found = done(command("data", "look", path))
    assert "Zoë – 大?" in found
    assert "+ für dich" in found
    assert "\\xc3" in done(command("data", "look", path, "--tokens"))


def test_it_prints_single_tokens_and_json(command, config, tmp_path):
    path = config()
    lines = done(command("data", "look", path, "--rows", "1", "--tokens", "--split", "validation")).splitlines()
    assert "data.validation of sft" in lines[0]
    assert any(line.endswith("+* <|im_end|>") for line in lines)
    found = json.loads(done(command("data", "look", path, "--rows", "2", "--json")))
    assert [row["where"] for row in found["rows"]] == ["train.csv:2", "train.csv:3"]
    (sequence,) = found["rows"][0]["sequences"]
    assert "".join(piece["text"] for piece in sequence["tokens"] if piece["trained"]) == "0<|im_end|>"
    assert (found["counts"]["kept"], found["counts"]["tokens"], found["counts"]["trained"]) == (10, 160, 20)


@pytest.mark.parametrize("use", ["dpo", "rm", "kto"])
def test_it_shows_pairs(command, config, tmp_path, use):
    (tmp_path / "pairs.csv").write_text("prompt,chosen,rejected\n1+1?,2,three\n")
    path = config(algorithm={"use": use}, data={"train": [{"path": "pairs.csv"}], "validation": []})
    found = done(command("data", "look", path))
    names = ("desirable", "undesirable") if use == "kto" else ("chosen", "rejected")
    assert all(f"pairs.csv:2 {name}  " in found for name in names)
    assert f"\n  + {'2' if use != 'rm' else ''}" in found


def test_it_shows_the_prompts_of_environments(command, config):
    path = config(
        run={"epochs": None, "steps": 1}, algorithm={"use": "grpo", "batch_size": None}, generator={"use": "hf"},
        data={"train": None, "validation": None},
    )  # fmt: skip
    document = yaml.safe_load(path.read_text())
    del document["data"]
    path.write_text(
        yaml.safe_dump({**document, "environments": [{"use": "arithmetic"}], "rollout": {"max_tokens": 16}})
    )
    found = done(command("data", "look", path, "--records", "50", "--rows", "1"))
    assert found.startswith("environments of grpo\n  environments.0: arithmetic, split 'train', ")
    assert "arithmetic[0]  " in found
    assert "50 prompts (the first; --records 0 reads all): " in found
    ended = command("data", "look", path, "--split", "validation")
    assert "evaluation.environments: there is none to look at" in ended.stderr


def test_it_needs_neither_weights_nor_torch(command, config, tmp_path, tiny_model_folder):
    bare = tmp_path / "bare"
    bare.mkdir()
    for file in tiny_model_folder.iterdir():
        if file.suffix in (".json", ".jinja"):
            (bare / file.name).write_bytes(file.read_bytes())
    code = (
        "import sys\nfrom whet.cli import main\ntry:\n    main()\nexcept SystemExit as end:\n    assert not end.code\n"
        f"print('loaded:', sorted(set({HEAVY!r}) & set(sys.modules)))"
    )
    for use in ("sft", "distill-data"):
        path = config(
            model={"path": str(bare)},
            algorithm={"use": use},
            roles={"teacher": {"use": "fsdp2"}} if use != "sft" else {},
        )
        found = done(command("data", "look", path, code=code))
        assert "10 records: 10 kept" in found
        assert found.splitlines()[-1] == "loaded: []"
