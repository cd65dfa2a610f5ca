"""Mistakes in a config are all reported at once, a line each: file and line, key, what is wrong, the nearest word."""

import json
import os
import re
from pathlib import Path

import pytest

from whet.plan.prepare import OWN

MISTAKES = """
run: {folder: run, stepz: 40, seed: one, resume: sometimes}
model: {path: MODEL, dtype: float16}
algorithm: {use: grpoo, prompts_per_step: 4}
backend: {use: fsdp2, optimizer: {lr: fast, beta: [0.9]}}
generator: {use: hf, max_batch: 0}
rollout: {max_token: 12, stop: x}
environments: [{use: arithmetik}, {terms: 5}]
clustr: {}
loggers: [consle]
"""


def problems_of(error: str) -> list[str]:
    first, *lines = error.splitlines()
    assert first == f"{len(lines)} problems in the config"
    return [line.strip() for line in lines]


@pytest.mark.parametrize("command", ["check", "run"])
def test_every_mistake_is_a_line_with_its_path_and_the_nearest_word(tmp_path, tiny_model_folder, whet, command):
    (tmp_path / "it.yaml").write_text(MISTAKES.replace("MODEL", str(tiny_model_folder)))
    found = problems_of(whet(command, "it.yaml", folder=tmp_path).error)
    wanted = [
        "it.yaml:9: clustr: unknown key (did you mean 'cluster'?)",
        "it.yaml:2: run.stepz: unknown key (did you mean 'steps'?)",
        "it.yaml:2: run.seed: wanted an integer, found the text 'one'",
        "it.yaml:2: run.resume: wanted one of 'auto', 'never', 'must', found the text 'sometimes'",
        "it.yaml:3: model.dtype: wanted one of 'float32', 'bfloat16', found the text 'float16' (did you mean",
        "it.yaml:4: algorithm.use: there is no algorithm 'grpoo' (did you mean 'grpo'?)",
        "it.yaml:5: backend.optimizer.beta: unknown key (did you mean 'betas'?)",
        "it.yaml:5: backend.optimizer.lr: wanted a number, found the text 'fast'",
        "it.yaml:6: generator.max_batch: must be >= 1: 0",
        "it.yaml:7: rollout.max_token: unknown key (did you mean 'max_tokens'?)",
        "it.yaml:7: rollout.stop: wanted a list of text, found the text 'x'",
        "it.yaml:8: environments.0.use: there is no environment 'arithmetik' (did you mean 'arithmetic'?)",
        "it.yaml:8: environments.1: missing `use:`, the name of the environment; known: ",
        "it.yaml:10: loggers.0.use: there is no logger 'consle' (did you mean 'console'?)",
    ]
    assert len(found) == len(wanted)
    assert all(line.startswith(begin) for line, begin in zip(found, wanted, strict=True)), found
    assert [file.name for file in tmp_path.iterdir()] == ["it.yaml"]


OLD = """
run: {folder: run, steps: 1}
model: {path: MODEL}
algorithm: {use: grpo, advantages: {use: gdpo, alone: reward, deviation_of: others}}
backend: {use: fsdp2}
generator: {use: hf}
rollout: {order: completion, running: keep}
refit: {probe: {every: 1}}
environments: [arithmetic]
cluster: {share: [[backend, generator]], sleep: always, deadlines: {refit: 60}}
"""
NEW = {
    "it.yaml:4: algorithm.advantages.alone": "was renamed; write singleton: reward",
    "it.yaml:4: algorithm.advantages.deviation_of": "was renamed; write std_over: others",
    "it.yaml:10: cluster.deadlines.refit": "was renamed; write weight_sync: 60",
    "it.yaml:10: cluster.share": "was renamed; write colocate: [[backend, generator]]",
    "it.yaml:10: cluster.sleep": "was renamed; write offload: always",
    "it.yaml:8: refit": "was renamed; write weight_sync",
    "it.yaml:7: rollout.order": "the value completion was renamed; write as_completed",
    "it.yaml:7: rollout.running": "was renamed; write on_weight_update: continue",
}


def test_whoever_writes_an_old_key_or_value_is_told_the_new_one(tmp_path, tiny_model_folder, whet):
    (tmp_path / "it.yaml").write_text(OLD.replace("MODEL", str(tiny_model_folder)))
    found = problems_of(whet("check", "it.yaml", folder=tmp_path).error)
    assert sorted(found) == sorted(f"{path}: {words}" for path, words in NEW.items())


def test_whoever_writes_an_old_key_on_the_command_line_is_told_the_new_one(tmp_path, tiny_model_folder, whet):
    old, new = "rollout: {order: completion, running: keep}", "rollout: {order: as_completed}"
    text = OLD.replace("MODEL", str(tiny_model_folder)).replace(old, new).replace("refit", "weight_sync")
    text = text.replace("alone: reward, deviation_of", "singleton: reward, std_over").replace("share", "colocate")
    (tmp_path / "it.yaml").write_text(text.replace("sleep", "offload"))
    overrides = ["refit.probe.every=2", "rollout.running=abort", "rollout.order=admission", "cluster.share=[]"]
    found = problems_of(whet("check", "it.yaml", *overrides, folder=tmp_path).error)
    assert sorted(found) == [
        "command line: cluster.share: was renamed; write colocate: []",
        "command line: refit: was renamed; write weight_sync",
        "command line: rollout.order: the value admission was renamed; write fifo",
        "command line: rollout.running: was renamed; write on_weight_update: abort",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("run: {folder: run\nmodel: x\n", "it.yaml:2:6: expected ',' or '}', but got ':'"),
        ("run: {steps: 1}\nrun: {steps: 2}\n", "it.yaml:2: the key 'run' is given twice, first in line 1"),
        ("- a\n- b\n", "it.yaml: wanted a mapping of sections such as `run:`, found a list"),
        ("run: !!python/object/apply:os.system [echo]", "python/object/apply:os.system' is not allowed"),
        ("a: &a [*a]\n", "it.yaml:1:4: "),
        (b"\xff\xfe\x00", "it.yaml:1: the file is not UTF-8 text"),
        ("", "4 problems in the config\n  it.yaml: run: missing; wanted a mapping"),
        ("extends: it.yaml\n", "extends: the files extend each other in a circle: it.yaml -> it.yaml"),
        ("extends: that.yaml\n", "it.yaml:1: extends: there is no file 'that.yaml'"),
        (None, "there is no file 'it.yaml'"),
    ],
    ids=["unclosed", "twice", "list", "code", "endless", "bytes", "empty", "circle", "extends nothing", "no file"],
)
def test_a_file_that_is_no_config_is_explained(tmp_path, whet, text, message):
    if text is not None:
        (tmp_path / "it.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    assert message in whet("check", "it.yaml", folder=tmp_path).error


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory, tiny_model_folder: Path) -> Path:
    """A config that is right."""
    folder = tmp_path_factory.mktemp("good")
    document = {
        "run": {"folder": str(folder / "run"), "steps": 1},
        "model": {"path": str(tiny_model_folder)},
        "algorithm": {"use": "grpo"},
        "backend": "fsdp2",
        "generator": "hf",
        "rollout": {"max_tokens": 8},
        "environments": ["arithmetic"],
    }
    (folder / "it.json.yaml").write_text(json.dumps(document))  # JSON is YAML
    return folder / "it.json.yaml"


SFT = ["algorithm={use: sft}", "environments=[]", "generator=null"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["run.steps"], "the override 'run.steps' is not of the form key.path=value"),
        (["run.steps=[1"], "the override 'run.steps=[1':1:3: expected ',' or ']'"),
        (["run.steps="], "run: states neither `steps` nor `epochs`: how long to train"),
        (["run.steps.more=3"], "run.steps: wanted an integer|run.steps is the number 1 and has no keys"),
        (["environments.7.terms=3"], "environments is a list; wanted an index from 0 to 0 (0: arithmetic), found '7'"),
        (["environments.0.term=3"], "environments.0.term: unknown key (did you mean 'terms'?)"),
        (["algorithm.use=sft"], "data: sft trains on data files and there are none; list them under data.train"),
        (["environments=[]"], "environments: grpo is fed by rollouts and there is no environment"),
        (["generator=null"], "generator: grpo is fed by rollouts and there is no generator"),
        (
            ["environments=[arithmetic, arithmetic]"],
            "environments.1.name: there are two environments named",
        ),
        (["rollout.max_context=9999"], "rollout.max_context: is 9999, but the model's positions end at 256"),
        (["rollout.max_tokens=256"], "rollout.max_tokens: is 256, which leaves no room for a prompt in 256 tokens"),
        (["cluster.threads.backnd=1"], "cluster.threads.backnd: there is no such role; there are backend, generator"),
        (["model.path=nowhere"], "model.path: there is no folder 'nowhere'; give a model folder or a hub name"),
        (["plugins=[nothing.py]"], "nothing.py'"),
        ([*SFT, "data.train=[{path: nowhere.jsonl}]"], "nowhere.jsonl"),
        (
            [*SFT, "data.train=[{path: nowhere.jsonl}]", "data.max_length=9999"],
            "data.max_length: is 9999, but the model's positions end at 256",
        ),
        (
            [*SFT, "data.train=[{path: ./words.doc}]"],
            "'./words.doc' is no data file: wanted a file that",
        ),
    ],
    ids=lambda value: " ".join(value[-1:]) if isinstance(value, list) else "",
)
def test_a_single_mistake_is_explained(good, whet, overrides, message):
    error = whet("check", good, *overrides).error
    assert any(part in error for part in message.split("|")), error
    assert not (good.parent / "run").exists()


def test_what_a_component_cannot_do_is_found_before_anything_starts(good, whet):
    error = whet("run", good, "algorithm.group_size=0", "backend.layout=3", "rollout.temperature=0").error
    assert problems_of(error) == [
        "command line: algorithm.group_size: must be >= 1: 0",
        "command line: backend.layout: wanted one of 'auto', 'shared', 'packed', 'padded', found the number 3",
        "command line: rollout.temperature: must be > 0: 0.0",
    ]
    assert not (good.parent / "run").exists()


def test_a_folder_that_cannot_be_written_is_named(good, tiny_model_folder, whet):
    file = tiny_model_folder / "config.json"
    inside = f"run.folder: is {file / 'run'}, and {file} is a file; choose another folder"
    for command in ("run", "check"):
        assert whet(command, good, f"run.folder={file / 'run'}").error.endswith(inside)
    link = good.parent / "link"
    link.symlink_to("nothing")
    inside = f"run.folder: is {link / 'run'}, and {link} is a link to nothing; choose another folder"
    assert whet("check", good, f"run.folder={link / 'run'}").error.endswith(inside)
    nowhere = "/proc/run"  # where even root makes no folder
    assert whet("run", good, f"run.folder={nowhere}").error.startswith(f"cannot write {nowhere}: ")


def test_a_logger_that_writes_outside_the_run_folder_is_told_in_the_plan(good, whet, tmp_path):
    outside = ["loggers=[{use: jsonl, path: ../of-all.jsonl}, {use: tensorboard, folder: TMP}, {use: jsonl}]"]
    told = whet("check", good, outside[0].replace("TMP", str(tmp_path))).output
    run = good.parent / "run"
    assert f"loggers.0.path: jsonl writes to {good.parent / 'of-all.jsonl'}, outside the run folder {run}" in told
    assert f"loggers.1.folder: tensorboard writes to {tmp_path}, outside the run folder {run}" in told
    assert "loggers.2" not in told


@pytest.mark.parametrize(
    ("loggers", "told"),
    [
        ("[{use: jsonl, path: config.yaml}]", "loggers.0.path: 'config.yaml' is written by the run itself"),
        ("[{use: jsonl, path: sub/../metrics.jsonl}]", "loggers.0.path: 'metrics.jsonl' is written by the run itself"),
        ("[{use: tensorboard, folder: checkpoints}]", "loggers.0.folder: 'checkpoints' is written by the run itself"),
        (
            "[{use: plot}, {use: plot, file: ./plot.png}]",
            "loggers.1.file: 'plot.png' is already written by loggers.0.f",
        ),
        ("[{use: jsonl, path: a}, {use: tensorboard, folder: a}]", "loggers.1.folder: 'a' is already written by logge"),
        ("[{use: plot, file: ~/a.png}, {use: plot, file: $HOME/a.png}]", "a.png' is already written by loggers.0.file"),
        ("[{use: plot, file: plot}]", "loggers.0.file"),
    ],
)
def test_a_logger_that_writes_what_another_part_of_the_run_writes_is_refused(good, whet, loggers, told):
    assert told in whet("check", good, "loggers=" + loggers.replace("$HOME", os.path.expanduser("~"))).error


def test_loggers_may_write_side_by_side(good, whet):
    twice, apart = "{use: jsonl, path: '-'}", "{use: jsonl, path: a.jsonl}, {use: tensorboard, folder: logs/t}"
    loggers = f"[{twice}, {twice}, {apart}, {{use: plot}}]"
    assert whet("check", good, f"loggers={loggers}").code == 0


def test_what_the_documentation_lists_in_a_run_folder_is_the_runs_own():
    page = Path(__file__).parents[1] / "docs" / "reference" / "run-folder.md"
    table = page.read_text().partition("\n## Episodes")[0]
    names = {name.split("/")[0] for name in re.findall(r"^\| `([^`]+)`", table, re.MULTILINE)}
    assert len(names) > 10
    assert names - {"report.html"} <= set(OWN)
