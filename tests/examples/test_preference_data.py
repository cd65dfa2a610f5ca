"""What `examples/preference/prepare.py` writes: pairs of right and wrong answers, with questions held out."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from whet.data.model_info import read_model

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "preference" / "prepare.py"


def prepared(folder: Path, *arguments: object) -> dict[str, list[dict]]:
    command = [sys.executable, str(SCRIPT), str(folder), *map(str, arguments)]
    subprocess.run(command, check=True, timeout=240, capture_output=True)
    return {file.stem: [json.loads(line) for line in file.read_text().splitlines()] for file in folder.glob("*.jsonl")}


def check(files: dict[str, list[dict]]) -> None:
    asked = {name: {record["prompt"] for record in files[name]} for name in ("train", "selection", "validation")}
    assert all(asked.values())
    assert sum(map(len, asked.values())) == len(set().union(*asked.values()))
    for name in asked:
        right = {(r["prompt"], r["completion"]) for r in files[f"labelled-{name}"] if r["label"]}
        wrong = {(r["prompt"], r["completion"]) for r in files[f"labelled-{name}"] if not r["label"]}
        assert {(r["prompt"], r["chosen"]) for r in files[name]} == right
        assert {(r["prompt"], r["rejected"]) for r in files[name]} == wrong
        assert {(r["prompt"], r["completion"]) for r in files[f"demonstrations-{name}"]} == right


@pytest.mark.slow
def test_sums_are_made_up_where_there_is_no_file(tmp_path):
    files = prepared(tmp_path / "made")
    check(files)
    assert read_model(tmp_path / "made").max_positions == 1024
    for record in files["train"][:50]:
        a, b, c = map(int, record["prompt"].removeprefix("Compute ").removesuffix(".").split("+"))
        assert record["chosen"].endswith(f"={a + b + c}")
        assert not record["rejected"].endswith(f"={a + b + c}")


@pytest.mark.slow
def test_graded_solutions_become_pairs(tmp_path, shared_data):
    files = prepared(tmp_path / "graded", "--solutions", shared_data / "gsm8k_model_solutions.jsonl")
    check(files)
    assert len(files["train"]) > 4000
    assert len(files["validation"]) > 500
    assert len(files["selection"]) > 500
