"""`whet demo` as people type it."""

import re
import subprocess
import sys

import pytest

from whet.plugins.registry import load_plugins

pytest.importorskip("whet_demo", reason="whet-demo is not installed")
from whet_demo.demos import demos


def test_the_help_names_the_demos_that_there_are(whet):
    words = " ".join(whet("demo", "--help").output.split())
    assert words.endswith(f"Demos: {', '.join(demos(load_plugins()))}.")


def test_without_torch_the_demo_says_what_to_install(tmp_path):
    code = "import sys; sys.modules['torch'] = None\nfrom whet.cli import main\nmain()"
    done = subprocess.run(
        [sys.executable, "-c", code, "demo"], capture_output=True, text=True, cwd=tmp_path, timeout=60, check=False
    )
    assert done.returncode == 1
    assert "making the model needs torch, which this Python lacks: pip install torch" in done.stderr


FEW = "prompts_per_step: 2, group_size: 2"


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(demos(load_plugins())))
def test_a_demo_trains_from_nothing_and_goes_on_where_it_was(whet, tmp_path, monkeypatch, name):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    made = whet("demo", name, "--folder", "it", "--steps", 0, folder=tmp_path, seconds=200)
    assert made.code == 0, made.errors
    assert "made; to run it:\n  whet run it/" in made.output
    assert {path.name for path in (tmp_path / "it" / "start").iterdir()} >= {"model.safetensors", "train.jsonl"}
    for part, made_of, kept in (("train", 40_000, 400), ("validation", 256, 32)):
        data = tmp_path / "it" / "start" / f"{part}.jsonl"
        lines = data.read_text().splitlines(keepends=True)
        assert len(lines) == made_of
        data.write_text("".join(lines[:kept]))
    for recipe in (tmp_path / "it").glob("*.yaml"):
        few = re.sub(r"limit: (128|256|512)\b", "limit: 8", recipe.read_text())
        few = re.sub(r"(evaluation: .*)\{use: tiny-functions\}", r"\1{use: tiny-functions, limit: 8}", few)
        recipe.write_text(re.sub(r"prompts_per_step: \d+, group_size: \d+", FEW, few))
    done = whet("demo", name, "--folder", "it", "--steps", 1, folder=tmp_path, seconds=280)
    assert done.code == 0, done.errors
    rows = [line.split()[:3] for line in done.output.splitlines()]
    warm_up = {
        "arithmetic": 600 // 100,
        "calculator": 200 // 20,
        "sliding-puzzle": 150 // 36,
        "tiny-functions": 160 // 12,
    }
    assert ["sft", str(warm_up[name]), "validation/loss"] in rows
    assert ["grpo", "1", f"evaluation/{name}/reward"] in rows
    assert "it/grpo/plot.png" in done.output
    assert "what to do next:\n  whet report it/grpo\n" in done.output
    for file in ("sft/model/model.safetensors", "grpo/model/model.safetensors", "grpo/plot.png"):
        assert (tmp_path / "it" / file).is_file()
    longer = whet("demo", name, "--folder", "it", "--steps", 2, folder=tmp_path, seconds=200)
    assert "which this demo would prolong to" in longer.error
    again = whet("demo", name, "--folder", "it", "--steps", 1, folder=tmp_path, seconds=200)
    assert again.code == 0, again.errors
    assert again.errors.count("finished before") == 2
