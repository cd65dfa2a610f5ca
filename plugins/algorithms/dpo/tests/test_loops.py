"""What the loops ask of the backend, when, and what they keep."""

import itertools
import json
from types import SimpleNamespace

import numpy as np
import pytest
from attrs import evolve

from whet.component import Selection, Spec
from whet.config.sections import DataFile, DataSection
from whet.data.metrics import mean, plain
from whet.data.model_info import ModelInfo, read_model
from whet.errors import CheckpointError, WhetError
from whet_chat.tokenizer import ChatTokenizer
from whet_data.offline import OfflineData
from whet_dpo.config import DpoConfig, KtoConfig, dpo_facts, kto_facts
from whet_dpo.dpo import Dpo
from whet_dpo.hooks import whet_losses
from whet_dpo.kto import Kto, of_kinds, with_margins
from whet_dpo.loss_config import KtoLossConfig
from whet_dpo.records import labelled_encoder, pair_encoder
from whet_testing.fakes import FakeBackend
from whet_testing.steps import Watch, WatchedSteps

MODEL = ModelInfo("model", {})


def loss(name: str) -> Selection:
    component = next(component for component in whet_losses() if component.name == name)
    return Selection("losses", component, component.config())


class Backend(FakeBackend):
    """Scores by a count of what it was asked, and holds a reference or not."""

    def __init__(self, reference: bool = True) -> None:
        super().__init__()
        self.reference, self.asked, self.evaluated = reference, [], []

    def score(self, batch, outputs, weights="policy"):
        if weights == "reference" and not self.reference:
            raise WhetError("no reference weights are held; set backend.reference to true")
        self.asked.append((weights, batch.sequences))
        return {"logprobs": np.where(batch["loss_mask"], batch["tokens"] / -100, 0).astype(np.float32)}

    def evaluate(self, batch, loss):
        self.evaluated.append(batch)
        return super().evaluate(batch, loss)


@pytest.fixture
def run(tmp_path, tiny_model_folder):
    def run(algorithm, done=0, steps=2, backend=None, reference=True, validation=3):
        for name, size in (("train", 10), ("validation", validation)):
            pairs = ({"prompt": f"{n}?", "chosen": f"{n}", "rejected": f"{n} {n}"} for n in itertools.count())
            rows = size if isinstance(size, list) else itertools.islice(pairs, size)
            (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        files = [[DataFile(str(tmp_path / f"{name}.jsonl"))] for name in ("train", "validation")]
        backend, watch = backend or Backend(reference), Watch()
        model = read_model(tiny_model_folder)
        encode = (pair_encoder if isinstance(algorithm, Dpo) else labelled_encoder)(algorithm.config, model)
        parts = SimpleNamespace(
            backend=backend,
            chat=ChatTokenizer(tiny_model_folder),
            data=OfflineData(DataSection(*files), ChatTokenizer(tiny_model_folder), 0, 0, encode=encode),
            steps=WatchedSteps(watch, steps, done),
            loss=Spec("x:Y"),
            config=SimpleNamespace(
                run=SimpleNamespace(folder=str(tmp_path / "run")),
                model=SimpleNamespace(dtype="float32"),
                evaluation=SimpleNamespace(every=0),
            ),
            sync_weights=lambda version: None,
        )
        algorithm.run(parts)
        return SimpleNamespace(
            backend=backend,
            metrics=[plain(step) for step in parts.steps.metrics],
            start=[list(event.value) for event in watch.named("start")],
        )

    return run


def reference_of(batch):
    return np.where(batch["loss_mask"], batch["tokens"] / -100, 0).astype(np.float32)


def test_the_reference_is_scored_once_by_the_policy_before_the_first_step(run, tmp_path):
    found = run(Dpo(DpoConfig(batch_size=4, loss=loss("dpo"))))
    assert found.backend.asked == [("policy", 8), ("policy", 8), ("policy", 4), ("policy", 6)]
    for batch in [*found.backend.trained, *found.backend.evaluated]:
        assert np.array_equal(batch["reference_logprobs"], reference_of(batch))
    assert sorted(file.name.split("-")[0] for file in (tmp_path / "run/reference").iterdir()) == ["train", "validation"]


def test_a_resume_takes_what_was_scored(run):
    first = run(Dpo(DpoConfig(batch_size=4, loss=loss("dpo"))), steps=2)
    again = run(Dpo(DpoConfig(batch_size=4, loss=loss("dpo"))), steps=4, done=2, reference=False)
    assert again.backend.asked == []
    assert [batch.sequences for batch in again.backend.trained] == [8, 8]
    assert np.array_equal(again.backend.trained[0]["reference_logprobs"], reference_of(again.backend.trained[0]))
    assert len(first.backend.trained) == 2


def test_a_damaged_file_is_made_again_from_a_reference_that_is_held(run, tmp_path):
    run(Dpo(DpoConfig(batch_size=4, loss=loss("dpo"))))
    for file in (tmp_path / "run/reference").iterdir():
        file.write_bytes(file.read_bytes()[:-3])
    again = run(Dpo(DpoConfig(batch_size=4, loss=loss("dpo"))), steps=3, done=2)
    assert {weights for weights, _ in again.backend.asked} == {"reference"}


def test_a_file_that_is_gone_is_not_replaced_by_scores_of_a_later_policy(run):
    with pytest.raises(CheckpointError, match=r"is gone, and after step 2 .*backend.reference.*run.allow_changed"):
        run(Dpo(DpoConfig(batch_size=4, loss=loss("dpo"))), steps=4, done=2, reference=False)


def test_other_data_are_scored_anew(run, tmp_path):
    run(Dpo(DpoConfig(batch_size=4, loss=loss("dpo"))))
    other = run(Dpo(DpoConfig(batch_size=4, loss=loss("dpo"))), validation=2)
    assert other.backend.asked == [("policy", 4)]


def test_on_the_fly_each_batch_is_scored_by_the_reference(run):
    found = run(Dpo(DpoConfig(batch_size=4, reference="on-the-fly", loss=loss("dpo"))))
    assert found.backend.asked == [("reference", 6), ("reference", 8), ("reference", 8), ("reference", 6)]
    assert np.array_equal(found.backend.trained[1]["reference_logprobs"], reference_of(found.backend.trained[1]))


@pytest.mark.parametrize("name", ["simpo", "orpo"])
def test_losses_without_reference_have_nothing_scored(run, name):
    found = run(Dpo(DpoConfig(batch_size=4, loss=loss(name))))
    assert found.backend.asked == []
    assert "reference_logprobs" not in found.backend.trained[0]


def test_kto_estimates_its_baseline_over_each_whole_batch(run):
    found = run(Kto(KtoConfig(batch_size=4, loss=loss("kto"))), steps=1)
    # the data, then policy and reference on borrowed responses: of the validation data, of the batch, and once more
    assert found.backend.asked[:4] == [("policy", 8), ("policy", 8), ("policy", 4), ("policy", 6)]
    borrowed = [(weights, size) for size in (6, 8, 6) for weights in ("policy", "reference")]
    assert found.backend.asked[4:] == borrowed
    (batch,) = found.backend.trained
    assert batch["kl_baseline"].tolist() == [0] * 8
    assert batch["desirable"].tolist() == [True, False] * 4


def test_kto_without_baseline_scores_nothing_more(run):
    found = run(Kto(KtoConfig(batch_size=4, baseline="none", reference="on-the-fly", loss=loss("kto"))), steps=1)
    assert found.backend.asked == [("reference", 6), ("reference", 8), ("reference", 6)]


def test_validation_comes_before_the_first_step_when_due_and_after_the_last(run):
    found = run(Dpo(DpoConfig(batch_size=4, validate_every=2, loss=loss("simpo"))), steps=5)
    assert ["validation/loss" in metrics for metrics in found.start] == [True]
    assert run(Dpo(DpoConfig(batch_size=4, loss=loss("simpo"))), steps=5, done=2).start == []
    assert ["validation/loss" in metrics for metrics in found.metrics] == [False, True, False, True, True]


def test_margins_of_single_responses_are_the_difference_of_means():
    metrics = {"rewards/chosen": mean(6.0, 3), "rewards/rejected": mean(-2.0, 4)}
    assert with_margins(metrics)["rewards/margins"].number() == pytest.approx(2.5)
    assert "rewards/margins" not in with_margins({**metrics, "rewards/rejected": mean(0.0, 0)})


def test_the_loss_of_kinds_is_validated_over_all_batches_whatever_kinds_each_has(run):
    class Kinds(Backend):
        def evaluate(self, batch, loss):
            # two batches, of four and of two responses, each of one kind, whose mean loss is 3 or 5
            of = [(batch["desirable"] if kind else ~batch["desirable"]).sum() for kind in (True, False)]
            metrics = {"loss/desirable": mean(3.0 * of[0], of[0]), "loss/undesirable": mean(5.0 * of[1], of[1])}
            return {"loss": mean(sum(metric.number() for metric in metrics.values()) / 2), **metrics}

    rows = [{"prompt": f"{n}?", "completion": f"{n}", "label": n < 4} for n in range(6)]
    kinds = evolve(loss("kto"), config=KtoLossConfig(average="kinds"))
    settings = {"batch_size": 4, "baseline": "none", "reference": "on-the-fly"}
    for chosen, wanted in ((kinds, 4.0), (loss("kto"), (4 * 1.5 + 2 * 2.5) / 6)):
        found = run(Kto(KtoConfig(loss=chosen, **settings)), steps=1, backend=Kinds(), validation=rows)
        assert found.metrics[-1]["validation/loss"] == pytest.approx(wanted)
    assert of_kinds({"loss": mean(2.0)})["loss"].number() == 2.0, "a loss of a plugin may have such a setting, too"


@pytest.mark.parametrize(
    ("config", "written", "needed"),
    [
        (DpoConfig(loss=loss("dpo")), {"chosen", "reference_logprobs"}, set()),
        (DpoConfig(loss=loss("simpo")), {"chosen"}, set()),
        (DpoConfig(loss=loss("dpo"), reference="none"), {"chosen"}, set()),
        (DpoConfig(loss=loss("dpo"), reference="on-the-fly"), {"chosen", "reference_logprobs"}, {"reference"}),
        (DpoConfig(loss=loss("orpo"), reference="precomputed"), {"chosen", "reference_logprobs"}, set()),
    ],
)
def test_facts_of_dpo_say_what_it_writes_and_needs(config, written, needed):
    facts = dpo_facts(config, MODEL)
    assert (facts.columns_written, facts.weights_needed) == (written, needed)


@pytest.mark.parametrize(("baseline", "needed"), [("batch", {"reference"}), ("none", set())])
def test_facts_of_kto_say_that_its_baseline_needs_the_reference(baseline, needed):
    facts = kto_facts(KtoConfig(baseline=baseline, loss=loss("kto")), MODEL)
    assert facts.weights_needed == needed
    assert facts.columns_written == {"desirable", "kl_baseline", "reference_logprobs"}
