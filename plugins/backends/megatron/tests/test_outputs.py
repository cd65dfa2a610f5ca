"""Scores, values, further losses and options under parallelism, against one rank."""

import numpy as np
import pytest

from whet.component import Spec
from whet.errors import WhetError
from whet_megatron.config import OptimizerConfig
from whet_testing.three_steps import LIKELIHOOD, steps_of

SPLITS = [
    (2, {"tensor": 2, "sequence": True}),
    (2, {"pipeline": 2}),
    (2, {"context": 2}),
]


@pytest.mark.slow
@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_outputs_are_those_of_one_rank(build, folders, make_batch, split):
    batch = make_batch(5)
    mixed = batch.take(np.random.default_rng(0).permutation(batch.sequences))
    temperature = np.where(np.arange(batch.sequences) % 2, 0.5, 1.5).astype(np.float32)
    mixed = mixed.with_columns(temperature=temperature)
    options = {"reference": True, "teacher": str(folders("llama"))}
    one, several = build("qwen3", **options), build("qwen3", *split, micro_batch_tokens=40, **options)
    outputs = ("logprobs", "entropy", "topk_ids:4", "topk_logprobs:4", "kl_forward", "kl_reverse", "jensen_shannon:0.3")
    for weights in ("policy", "reference"):
        expected, found = (backend.score(mixed, outputs, weights) for backend in (one, several))
        assert np.array_equal(found["topk_ids:4"], expected["topk_ids:4"])
        for name in expected:
            np.testing.assert_allclose(found[name], expected[name], atol=1e-5, err_msg=name)
    at = mixed.with_columns(topk_ids=expected["topk_ids:4"])
    for loss in ("AtTokens", "Divergence"):
        spec = Spec(f"whet_testing.losses:{loss}")
        np.testing.assert_allclose(steps_of(several, [at], spec), steps_of(one, [at], spec), rtol=1e-5)
    losses = [backend.evaluate(mixed, LIKELIHOOD)["loss"].number() for backend in (one, several)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    # a sequence alone, one from which nothing is learned, and sequences of which the loss wants few
    small = mixed.take([0])
    np.testing.assert_allclose(steps_of(several, [small]), steps_of(one, [small]), rtol=1e-4)
    few = mixed.with_columns(advantages=np.where(mixed["group"] < 2, mixed["advantages"], 0).astype(np.float32))
    skipping = Spec("whet_testing.losses:Weighted", config={"skip_dead": True})
    np.testing.assert_allclose(steps_of(several, [few], skipping), steps_of(one, [few], skipping), rtol=1e-4)


@pytest.mark.slow
def test_a_rank_without_a_sequence_that_can_learn_takes_the_step_of_one_rank(build, make_batch):
    batch = make_batch(5)
    lone = batch.with_columns(advantages=(np.arange(batch.sequences) == 0).astype(np.float32))
    spec = Spec("whet_testing.losses:Weighted", config={"skip_dead": True})
    one, two = build("qwen3"), build("qwen3", 2, {}, micro_batch_tokens=40)
    np.testing.assert_allclose(steps_of(two, [lone, batch], spec), steps_of(one, [lone, batch], spec), rtol=1e-4)


def test_logits_in_float32_are_those_of_bfloat16_without_its_rounding(build, make_batch):
    """The differences of logits that bfloat16 has rounded are multiples of a power of two."""
    batch = make_batch(5)
    rounded, kept = (
        build("qwen3", dtype="bfloat16", head_dtype=dtype).score(batch, ("topk_logprobs:8",))["topk_logprobs:8"]
        for dtype in (None, "float32")
    )
    np.testing.assert_allclose(kept, rounded, atol=0.1)
    steps = [abs(np.diff(found, axis=1) * 2**10) for found in (rounded, kept)]
    assert abs(steps[0] - np.round(steps[0])).max() < 0.01
    assert abs(steps[1] - np.round(steps[1])).max() > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_values_are_those_of_one_rank_and_of_the_exported_classifier(build, folders, make_batch, tmp_path, split):
    import torch
    from transformers import AutoModelForSequenceClassification

    one, several = build("qwen3", head="value"), build("qwen3", *split, head="value")
    spec, batches = Spec("whet_testing.losses:Regression"), [make_batch(0), make_batch(1).take([0])]
    np.testing.assert_allclose(steps_of(several, batches, spec), steps_of(one, batches, spec), rtol=1e-4)
    several.export(tmp_path / "out")
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out", dtype=torch.float32)
    alone = make_batch(0).take([0])
    with torch.no_grad():
        states = model.base_model(torch.from_numpy(alone["tokens"])[None]).last_hidden_state
        expected = model.score(states)[0, :, 0].numpy()
    found = several.score(alone, ("values",))["values"]
    where = np.flatnonzero(alone["loss_mask"])
    np.testing.assert_allclose(found[where], expected[where - 1], atol=1e-5)
    build(tmp_path / "out", head="value")  # it goes on from its own export


@pytest.mark.slow
@pytest.mark.parametrize("split", [(1, {}), *SPLITS], ids=str)
@pytest.mark.parametrize("kind", [True, "selective"])
def test_recomputed_activations_give_the_same_numbers(build, make_batch, split, kind):
    batches = [make_batch(0), make_batch(1)]
    plain, saving = (build("qwen3", *split, gradient_checkpointing=how) for how in (False, kind))
    np.testing.assert_allclose(steps_of(saving, batches), steps_of(plain, batches), rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"distributed": False}, {"overlap": True}], ids=str)
def test_gradients_are_added_up_over_data_parallel_ranks_however(build, make_batch, options):
    batches = [make_batch(seed) for seed in range(3)]
    one = build("llama", micro_batch_tokens=40)
    two = build("llama", 2, micro_batch_tokens=40, optimizer=OptimizerConfig(lr=1e-3, weight_decay=0.1, **options))
    np.testing.assert_allclose(steps_of(two, batches), steps_of(one, batches), rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("split", [(2, {}), *SPLITS], ids=str)
def test_three_steps_in_bfloat16_stay_near_float32(build, make_batch, split):
    batches = [make_batch(seed) for seed in range(3)]
    low = build("llama", *split, dtype="bfloat16", micro_batch_tokens=40)
    np.testing.assert_allclose(steps_of(low, batches), steps_of(build("llama"), batches), rtol=3e-2)


def test_outputs_that_it_does_not_give_are_refused_by_name(build, make_batch):
    with pytest.raises(WhetError, match="kl_reverse, which this model does not give: it gives entropy, logprobs"):
        build("qwen3").train(make_batch(0), Spec("whet_testing.losses:Divergence"))


def test_a_step_that_is_not_finite_is_refused(build, make_batch):
    backend, batch = build("qwen3"), make_batch(0)
    broken = batch.with_columns(advantages=np.where(batch["group"] == 0, np.nan, 1).astype(np.float32))
    before = backend.score(batch, ("logprobs",))["logprobs"]
    found = backend.train(broken, Spec("whet_testing.losses:Weighted"))
    assert found["nonfinite_steps"].number() == 1
    assert np.array_equal(backend.score(batch, ("logprobs",))["logprobs"], before)
