"""A student comes near its teacher, on its own answers and on a data set's, whichever way it is told."""

import json
from pathlib import Path

import pytest
import yaml

import whet
from whet.data.files import read_rows
from whet.data.model_info import read_model
from whet.errors import ConfigError
from whet.plan.prepare import prepare
from whet_memory.roles import case_of
from whet_start.small_models import make_model


@pytest.fixture(scope="module")
def teacher(tmp_path_factory, tiny_tokenizer):
    """A model of another family that has learned to say one thing."""
    folder = tmp_path_factory.mktemp("teacher")
    rows = [{"prompt": f"Say {n}", "completion": "2468 and 0"} for n in range(50)]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    document = {
        "run": {"folder": str(folder / "run"), "steps": 25},
        "model": {"path": str(make_model(folder / "start", tiny_tokenizer, family="llama", seed=7))},
        "algorithm": {"use": "sft", "batch_size": 16},
        "backend": {"use": "fsdp2", "optimizer": {"lr": 5.0e-3}},
        "data": {"train": [{"path": str(folder / "data.jsonl")}]},
        "cluster": {"workers": "inline"},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(document))
    with whet.open(folder / "run.yaml") as parts:
        parts.algorithm.run(parts)
        parts.backend.export(folder / "model")
    return folder / "model"


@pytest.fixture
def config(tmp_path, tiny_model_folder, teacher):
    document = {
        "run": {"folder": str(tmp_path / "run"), "steps": 16},
        "model": {"path": str(tiny_model_folder)},
        "algorithm": {"use": "distill", "prompts_per_step": 16, "topk": 300},
        "backend": {"use": "fsdp2", "optimizer": {"lr": 3.0e-3}},
        "roles": {"teacher": {"use": "fsdp2", "model": {"path": str(teacher)}}},
        "generator": {"use": "hf"},
        "rollout": {"max_tokens": 8},
        "environments": [{"use": "even"}],
        "plugins": [str(Path(__file__).parent / "even_digits.py")],
        "cluster": {"workers": "inline", "threads": {"backend": 1}},
        "loggers": [],
    }
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


def divergences(config, tmp_path, *overrides, name="kl/reverse"):
    with whet.open(config, *overrides) as parts:
        parts.algorithm.run(parts)
    return [row[name] for row in read_rows(tmp_path / "run" / "metrics.jsonl") if name in row]


@pytest.mark.parametrize(
    "overrides",
    [
        ["algorithm.loss.forward=0.5"],
        ["algorithm.topk=200", "algorithm.topk_of=student", "algorithm.loss={use: topk-kl, forward: 0, outside: rest}"],
        ["algorithm.loss=teacher-pg", "algorithm.prompts_per_step=64", "algorithm.minibatches=2"],
        [
            "algorithm.loss=teacher-pg",
            "algorithm.prompts_per_step=64",
            "algorithm.minibatches=2",
            "algorithm.old_logprobs=trainer",
        ],
    ],
    ids=["mixed", "reverse on the student's tokens", "advantages", "advantages against the trainer"],
)
def test_a_student_comes_near_its_teacher_on_its_own_answers(config, tmp_path, overrides):
    found = divergences(config, tmp_path, *overrides)
    assert sum(found[-3:]) < 0.8 * sum(found[:3])


def test_over_the_whole_vocabulary_the_students_workers_hold_the_teacher(config, tmp_path, teacher):
    chosen = ["algorithm.loss=full-kl", "roles={}", f"backend.teacher={teacher}"]
    full = divergences(config, tmp_path, *chosen)
    assert full[-1] < 0.5 * full[0]
    every = read_model(teacher).vocab_size
    chosen = [f"run.folder={tmp_path / 'other' / 'run'}", f"algorithm.topk={every}", "run.steps=1"]
    (found,) = divergences(config, tmp_path / "other", *chosen)
    assert found == pytest.approx(full[0], rel=1e-3)


def test_the_memory_of_a_teacher_is_that_of_the_likeliest_tokens(config):
    prepared = prepare(config)
    teacher = prepared.roles["teacher"].facts.forecast
    case = case_of(prepared.config, prepared.roles, prepared.plan, prepared.plan.role("teacher"), teacher)
    assert (case.outputs, case.topk) == (("topk_ids:64", "topk_logprobs:64"), 64)


def test_a_teacher_that_no_worker_holds_is_refused_with_what_to_change(config):
    with pytest.raises(ConfigError, match="needs the model output 'kl_forward', which the backend does not give"):
        prepare(config, ["algorithm.loss=full-kl", "roles={}"])
    with pytest.raises(ConfigError, match=r"roles\.teacher: is missing: distill or an environment asks for it"):
        prepare(config, ["roles={}"])
    with pytest.raises(
        ConfigError, match=r"algorithm\.old_logprobs: has no effect on the loss topk-kl, which reads no"
    ):
        prepare(config, ["algorithm.old_logprobs=trainer"])
    with pytest.raises(ConfigError, match=r"needs the model output 'jensen_shannon', which the backend does not give"):
        prepare(config, ["algorithm.loss={use: full-kl, divergence: jensen-shannon}", "roles={}"])
    for loss in ("gspo", "gmpo"):
        with pytest.raises(ConfigError, match=r"algorithm\.loss: wants one advantage for each sequence; as configured"):
            prepare(config, [f"algorithm.loss={loss}"])
    prepare(config, ["algorithm.loss={use: gspo, level: token}"])
    prepare(config, ["algorithm={use: grpo, advantages: reinforce-plus-plus, loss: teacher-pg}", "roles={}"])
    for algorithm in ("distill", "distill-data"):
        words = rf"algorithm\.loss: reads no .*teacher_topk_logprobs', so nothing that {algorithm} finds out"
        with pytest.raises(ConfigError, match=words):
            prepare(config, [f"algorithm={{use: {algorithm}, loss: nll}}"])
    with pytest.raises(ConfigError, match=r"algorithm\.teachers\.odd: there is no such environment; there are even"):
        prepare(config, ["algorithm.teachers={odd: teacher}"])


def test_the_jensen_shannon_divergence_over_all_tokens_is_that_over_the_likeliest_when_they_are_all(
    config, tmp_path, teacher
):
    chosen = ["roles={}", f"backend.teacher={teacher}", "run.steps=2"]
    loss = "algorithm.loss={use: full-kl, divergence: jensen-shannon, beta: 0.3}"
    full = divergences(config, tmp_path, *chosen, loss, name="kl/jensen_shannon")
    every = [f"run.folder={tmp_path / 'other' / 'run'}", f"algorithm.topk={read_model(teacher).vocab_size}"]
    loss = "algorithm.loss={use: topk-kl, divergence: jensen-shannon, beta: 0.3}"
    found = divergences(config, tmp_path / "other", *every, loss, "run.steps=2", name="kl/jensen_shannon")
    assert found == pytest.approx(full, rel=1e-3)
    assert found[0] > 0


def test_a_data_set_is_as_good_a_place_to_learn(config, tmp_path, tiny_model_folder):
    rows = [{"prompt": f"Say {n}.", "completion": f"{n} and {n + 1}"} for n in range(40)]
    for name, part in (("train", rows[:30]), ("validation", rows[30:])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    document = yaml.safe_load(config.read_text())
    document["algorithm"] = {"use": "distill-data", "batch_size": 8, "topk": 300, "validate_every": 8}
    document["data"] = {name: [{"path": str(tmp_path / f"{name}.jsonl")}] for name in ("train", "validation")}
    del document["environments"]
    config.write_text(yaml.safe_dump(document))
    found = divergences(config, tmp_path, name="kl/forward")
    assert found[-1] < 0.5 * found[0]
    held_out = [row["validation/kl/forward"] for row in read_rows(tmp_path / "run" / "metrics.jsonl")
                if "validation/kl/forward" in row]  # fmt: skip
    assert len(held_out) == 3, "before the first step, on the 8th and after the last"
    assert held_out[2] < held_out[1] < held_out[0]
