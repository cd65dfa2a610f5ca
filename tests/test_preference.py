"""Preference optimisation on the real backend: the same numbers however a batch is cut, and pairs that are learned."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from whet.component import Spec
from whet.config.build import to_spec
from whet.config.structure import structure
from whet.data.batch import Batch, concatenate
from whet.errors import ConfigError
from whet.plan.prepare import prepare
from whet.plugins.registry import load_plugins
from whet.run.compose import run
from whet.runtime.local import LocalCluster
from whet_dpo.config import DpoConfig
from whet_testing.batches import random_batch
from whet_training.layout import pack, used_lengths

SFT = {"weight": 0.3}
LOSSES = {
    "dpo": Spec("whet_dpo.losses:Dpo", "whet_dpo.loss_config:DpoLossConfig", {"sft": SFT}),
    "ipo": Spec("whet_dpo.losses:Ipo", "whet_dpo.loss_config:IpoConfig", {}),
    "orpo": Spec("whet_dpo.losses:Orpo", "whet_dpo.loss_config:OrpoConfig", {}),
    "orpo of prompts, too": Spec(
        "whet_dpo.losses:Orpo", "whet_dpo.loss_config:OrpoConfig", {"sft": {"weight": 1.0, "of": "conversation"}}
    ),
    "kto": Spec("whet_dpo.unpaired:Kto", "whet_dpo.loss_config:KtoLossConfig", {}),
    "aot-unpaired": Spec("whet_dpo.whole_losses:AotUnpaired", "whet_dpo.whole_config:AotUnpairedConfig", {}),
    "mpo": to_spec(structure({"loss": {"use": "weighted-sum"}}, DpoConfig, load_plugins()).loss),
}


def pairs(seed: int = 0) -> Batch:
    batch = random_batch(
        seed, columns=("chosen", "reference_logprobs"), sequences=12, group_size=2, unit_size=2, vocabulary=300
    )
    baseline = np.full(batch.sequences, 0.2, np.float32)
    opposite = np.random.default_rng(seed).normal(size=batch.sequences).astype(np.float32)
    return batch.with_columns(
        desirable=batch["chosen"], kl_baseline=baseline, score_shift=baseline, matched_score=opposite
    )


def with_prompts(batch: Batch) -> Batch:
    """Make every token of chosen sequences trained, except the first."""
    lengths = batch["lengths"]
    place = np.arange(batch.tokens) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    whole = np.repeat(batch["chosen"], lengths) & (place > 0)
    return batch.with_columns(response_mask=batch["loss_mask"], loss_mask=batch["loss_mask"] | whole)


def numbers(metrics: Any) -> dict[str, float]:
    return {name: m.number() for name, m in metrics.items() if not name.startswith(("seconds/", "memory/"))}


@pytest.mark.parametrize("name", LOSSES)
def test_micro_batches_layout_and_order_do_not_matter(backend, name):
    batch = with_prompts(pairs()) if "prompts" in name else pairs()
    shuffled = concatenate(batch.split(6, seed=3))
    expected = numbers(backend().train(batch, LOSSES[name]))
    assert {"rewards/accuracies", "logps/chosen", "loss", "grad_norm"} <= set(expected)
    for config, given in (
        ({"micro_batch_tokens": 24}, batch),
        ({"micro_batch_tokens": 24, "layout": "padded"}, shuffled),
        ({"layout": "packed"}, shuffled),
        ({"layout": "shared"}, shuffled),
    ):
        assert numbers(backend(**config).train(given, LOSSES[name])) == pytest.approx(expected, rel=2e-5, abs=1e-6)


def test_two_ranks_give_the_numbers_of_one(backend, tmp_path):
    batch = pairs(1)
    one = backend()
    with LocalCluster(tmp_path / "logs") as cluster:
        two = backend(cluster.worker_group("backend", 2), micro_batch_tokens=40)
        for loss in (LOSSES[name] for name in LOSSES if "prompts" not in name):
            expected, found = (numbers(which.evaluate(batch, loss)) for which in (one, two))
            assert found == pytest.approx(expected, rel=2e-5, abs=1e-6)
        expected, found = (numbers(which.train(batch, LOSSES["dpo"])) for which in (one, two))
        assert found == pytest.approx(expected, rel=2e-5, abs=1e-6)
        two.close()


def test_the_prompt_of_a_pair_is_laid_out_once():
    batch = pairs()
    prompts = batch["prompt_lengths"]
    apart, together = (len(pack(batch, layout).tokens) for layout in ("packed", "shared"))
    assert apart == used_lengths(batch).sum()
    assert together <= apart - prompts[::2].sum()


def document(folder: Path, model: Path, **changes: Any) -> Path:
    """Write a run on pairs that differ in their last word."""
    rows = []
    for n in range(64):
        good, bad = ("yes", "no") if n % 2 else ("12", "7")
        rows.append({"prompt": f"Compute {n}+8.", "chosen": f"{n} {good}", "rejected": f"{n} {bad}"})
    for name, part in (("train", rows[:48]), ("validation", rows[48:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    config = {
        "run": {"folder": str(folder / "run"), "steps": 12, "save_every": 6},
        "model": {"path": str(model)},
        "algorithm": {"use": "dpo", "batch_size": 16, "validate_every": 4},
        "backend": {"use": "fsdp2", "optimizer": {"lr": 1.0e-3}},
        "data": {part: [{"path": str(folder / f"{part}.jsonl")}] for part in ("train", "validation")},
        "cluster": {"workers": "inline", "threads": {"backend": 1}},
        "loggers": [],
        **changes,
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    return folder / "run.yaml"


def rows(folder: Path) -> list[dict[str, float]]:
    kept = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k != "time" and not k.startswith(("seconds/", "memory/"))} for row in kept]


ORPO = {
    "use": "dpo", "batch_size": 16, "validate_every": 4,
    "loss": {"use": "orpo", "beta": 1.0, "sft": {"weight": 0.1, "of": "conversation"}, "metrics": {"ties": "wrong"}},
}  # fmt: skip
KTO = {"use": "kto", "batch_size": 16, "validate_every": 4, "loss": {"use": "kto", "beta": 0.5}}


@pytest.mark.parametrize(
    ("algorithm", "backend"),
    [
        ({"use": "dpo", "batch_size": 16, "validate_every": 4}, {}),
        ({"use": "dpo", "batch_size": 16, "validate_every": 4, "loss": {"use": "ipo"}}, {}),
        (KTO, {"reference": True}),
    ],
    ids=["dpo", "ipo", "kto"],
)
def test_a_short_run_learns_which_answer_is_better(tmp_path, tiny_model_folder, algorithm, backend):
    config = document(
        tmp_path, tiny_model_folder, algorithm=algorithm,
        backend={"use": "fsdp2", "optimizer": {"lr": 1.0e-3}, **backend},
    )  # fmt: skip
    assert run(config).finished
    found = rows(tmp_path)
    assert found[0]["step"] == 0
    assert found[0]["validation/rewards/margins"] == pytest.approx(0, abs=1e-4)
    assert found[-1]["validation/rewards/accuracies"] == 1
    assert found[-1]["validation/rewards/margins"] > 0.05
    assert found[-1]["validation/loss"] < found[0]["validation/loss"]


SUM = [{"use": "dpo", "weight": 0.8}, {"use": "aot", "weight": 0.2}, {"use": "sft", "weight": 0.1}]
NEW: dict[str, dict[str, Any]] = {
    "exo-pair": {"use": "exo-pair"},
    "discopop": {"use": "discopop"},
    "nca-pair": {"use": "nca-pair"},
    "sppo-hard": {"use": "sppo-hard"},
    "cpo": {"use": "cpo"},
    "sft": {"use": "sft"},
    "bco-pair": {"use": "bco-pair"},
    "bco-pair, running": {"use": "bco-pair", "shift": "running"},
    "aot": {"use": "aot"},
    "aot-unpaired": {"use": "aot-unpaired", "average_logprobs": True},
    "ld-dpo": {"use": "dpo", "ld_alpha": 0.5},
    "forward-kl": {"use": "dpo", "divergence": "forward-kl"},
    "alpha": {"use": "ipo", "divergence": "alpha", "divergence_alpha": 0.3},
    "mpo": {"use": "weighted-sum"},
    "sum": {"use": "weighted-sum", "terms": SUM},
}


@pytest.mark.parametrize("name", NEW)
def test_every_loss_can_be_asked_for_in_yaml_and_lowers_itself(tmp_path, tiny_model_folder, name):
    algorithm = {"use": "dpo", "batch_size": 8, "loss": NEW[name]}
    assert run(document(tmp_path, tiny_model_folder, algorithm=algorithm), ["run.steps=6", "run.export=false"]).finished
    found = rows(tmp_path)
    assert all("nonfinite_steps" not in row for row in found)
    assert found[-1]["validation/loss"] < found[0]["validation/loss"]
    if name not in ("sft", "discopop"):  # at a margin of 0 the loss of discopop falls with the margin
        assert found[-1]["validation/rewards/margins"] > found[0]["validation/rewards/margins"]


@pytest.mark.parametrize("loss", [{"use": "bco"}, {"use": "bco", "shift": "none", "average": "kinds"}])
def test_bco_on_single_answers_needs_no_copy_of_the_reference(tmp_path, tiny_model_folder, loss):
    algorithm = {"use": "kto", "batch_size": 8, "loss": loss}
    assert run(document(tmp_path, tiny_model_folder, algorithm=algorithm), ["run.steps=6", "run.export=false"]).finished
    found = rows(tmp_path)
    assert found[-1]["validation/loss"] < found[0]["validation/loss"]
    assert found[-1]["validation/rewards/accuracies"] > 0.5


@pytest.mark.parametrize("name", ["mpo", "aot-unpaired"])
def test_a_resumed_run_with_numbers_of_the_whole_batch_is_the_same_bit_for_bit(tmp_path, tiny_model_folder, name):
    algorithm = {"use": "dpo", "batch_size": 8, "validate_every": 2, "loss": NEW[name]}
    found = []
    for folder, stops in ((tmp_path / "whole", []), (tmp_path / "halves", ["run.steps=4"])):
        folder.mkdir()
        config = document(folder, tiny_model_folder, algorithm=algorithm)
        if stops:
            run(config, [*stops, "run.export=false"])
        run(config, ["run.steps=6"])
        found.append((folder / "run/model/model.safetensors").read_bytes())
    assert found[0] == found[1]
    assert (tmp_path / "halves/run/score-shift.jsonl").exists() == (name == "mpo")


@pytest.mark.parametrize("loss", ["aot", "aot-unpaired", "bco-pair"])
def test_the_batch_of_a_step_counts_whatever_the_micro_batches_are(tmp_path, tiny_model_folder, loss):
    found = []
    for tokens in (4096, 48):
        folder = tmp_path / str(tokens)
        folder.mkdir()
        config = document(
            folder, tiny_model_folder, algorithm={"use": "dpo", "batch_size": 16, "loss": {"use": loss}},
            backend={"use": "fsdp2", "micro_batch_tokens": tokens, "optimizer": {"lr": 1.0e-3}},
        )  # fmt: skip
        run(config, ["run.steps=3", "run.export=false"])
        found.append([(row["loss"], row["grad_norm"]) for row in rows(folder)[1:]])
    for one, other in zip(*found, strict=True):
        assert one == pytest.approx(other, rel=1e-3)


def test_a_run_of_orpo_may_learn_prompts_as_well(tmp_path, tiny_model_folder):
    assert run(document(tmp_path, tiny_model_folder, algorithm=ORPO)).finished
    first, last = rows(tmp_path)[0], rows(tmp_path)[-1]
    for name in ("validation/nll", "validation/loss"):
        assert last[name] < first[name]
    assert last["validation/rewards/margins"] > first["validation/rewards/margins"]


def test_a_resumed_run_takes_the_same_steps_from_the_reference_that_was_kept(tmp_path, tiny_model_folder):
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    for folder in (whole, halves):
        folder.mkdir()
    run(document(whole, tiny_model_folder))
    first = document(halves, tiny_model_folder)
    run(first, ["run.steps=6"])
    files = {file: file.stat().st_mtime_ns for file in (halves / "run/reference").iterdir()}
    run(first)
    assert {file: file.stat().st_mtime_ns for file in (halves / "run/reference").iterdir()} == files
    assert len(files) == 2
    # its last validation of the shorter run came a step early
    shared = set(rows(whole)[1])
    for one, other in zip(rows(whole)[1:], rows(halves)[1:], strict=True):
        assert {name: one[name] for name in shared} == {name: other[name] for name in shared}
    model = "run/model/model.safetensors"
    assert (whole / model).read_bytes() == (halves / model).read_bytes()


def test_precomputed_and_on_the_fly_are_the_same_reference(tmp_path, tiny_model_folder):
    found = []
    for name, reference in (("auto", False), ("on-the-fly", True)):
        folder = tmp_path / name
        folder.mkdir()
        config = document(
            folder, tiny_model_folder, algorithm={"use": "dpo", "batch_size": 16, "reference": name},
            backend={"use": "fsdp2", "optimizer": {"lr": 1.0e-3}, "reference": reference},
        )  # fmt: skip
        run(config, ["run.steps=4"])
        found.append(rows(folder))
    for one, other in zip(*(part[1:] for part in found), strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-4)


@pytest.mark.parametrize(
    ("algorithm", "complaint"),
    [
        ({"use": "dpo", "reference": "on-the-fly"}, "backend.reference: dpo scores with the weights 'reference'"),
        ({"use": "kto"}, "backend.reference: kto scores with the weights 'reference'"),
        ({"use": "dpo", "reference": "none"}, "algorithm.loss: reads the column 'reference_logprobs'"),
        ({"use": "dpo", "loss": {"use": "kto"}}, "algorithm.loss: reads no 'chosen'"),
        ({"use": "kto", "baseline": "none", "loss": {"use": "ipo"}}, "algorithm.loss: reads no 'desirable'"),
        ({"use": "sft", "loss": {"use": "dpo"}}, "algorithm.loss: reads the column 'chosen'"),
        ({"use": "sft", "loss": {"use": "bco-pair"}}, "algorithm.loss: reads the column 'score_shift'"),
        ({"use": "dpo", "loss": {"use": "bco"}}, "algorithm.loss: reads no 'chosen'"),
        ({"use": "kto", "baseline": "none", "loss": {"use": "aot"}}, "algorithm.loss: reads no 'desirable'"),
        (
            {"use": "dpo", "loss": {"use": "weighted-sum", "terms": ["dpo", "nll"]}},
            "algorithm.loss.terms.1: reads no 'chosen', so it would learn all responses alike",
        ),
        ({"use": "dpo", "loss": {"use": "exo-pair", "label_smoothing": 0}}, "algorithm.loss.label_smoothing"),
        ({"use": "dpo", "loss": {"use": "sppo-hard", "divergence": "alpha"}}, "algorithm.loss.divergence: unknown key"),
        (
            {"use": "dpo", "loss": {"use": "ipo", "divergence_alpha": 0.2}},
            "algorithm.loss.divergence_alpha: has no effect",
        ),
        (
            {"use": "dpo", "loss": {"use": "nll"}},
            "algorithm.loss: reads no 'chosen', so nothing that dpo finds out would reach it",
        ),
    ],
)
def test_what_does_not_go_together_is_refused_before_anything_starts(tmp_path, tiny_model_folder, algorithm, complaint):
    with pytest.raises(ConfigError) as caught:
        prepare(document(tmp_path, tiny_model_folder, algorithm=algorithm))
    assert complaint in str(caught.value)
