"""Mixtures of experts: balance, z-loss, metrics and replay, against `transformers` and under every kind of split."""

import numpy as np
import pytest
import torch

from whet.errors import WhetError
from whet_testing.three_steps import LIKELIHOOD, steps_of
from whet_training.experts import ExpertsConfig
from whet_training.layout import used_lengths
from whet_training.lora_config import LoraConfig
from whet_training.packing import plan

K, LAYERS, EXPERTS = 2, 2, 8
SPLITS = {
    "data 2": (2, {}),
    "expert 2": (2, {"expert": 2}),
    "pipeline 2": (2, {"pipeline": 2}),
    "tensor 2, sequence, expert 2": (2, {"tensor": 2, "sequence": True, "expert": 2}),
    "context 2": (2, {"context": 2}),
    "pipeline 2, expert 2": (4, {"pipeline": 2, "expert": 2}),
}
NAMES = ("experts/load_max", "experts/load_min", "experts/idle", "experts/entropy", "experts/balance_loss",
         "experts/z_loss", "routing/disagreement", "routing/overruled")  # fmt: skip


def recorded(batch, seed=0, missing=0.0):
    """Return a batch with distinct experts for each token and layer, as a sampler would record them."""
    draw = np.random.default_rng(seed)
    chosen = np.argsort(draw.random((batch.tokens, LAYERS, EXPERTS)), -1)[:, :, :K]
    chosen[draw.random(batch.tokens) < missing] = -1
    return batch.with_columns(routed_experts=chosen.reshape(batch.tokens, LAYERS * K).astype(np.int16))


def trained(backend, batches):
    """Return loss and gradient norm of steps [steps, 2], and the metrics of the last one."""
    found = [backend.train(batch, LIKELIHOOD) for batch in batches]
    numbers = np.array([(one["loss"].number(), one["grad_norm"].number()) for one in found])
    return numbers, {name: found[-1][name].number() for name in NAMES if name in found[-1]}


@pytest.mark.parametrize("of", ["layer", "model"])
def test_one_step_is_that_of_transformers_with_its_balance_loss(build, folders, make_batch, of):
    from transformers import AutoModelForCausalLM

    batch, config = make_batch(0), ExpertsConfig(balance=0.5, z_loss=0.1, balance_of=of)
    net = AutoModelForCausalLM.from_pretrained(folders("qwen3_moe"), dtype=torch.float32, attn_implementation="eager")
    loss, logits = torch.zeros(()), []
    for i in range(batch.sequences):
        one = batch.take([i])
        used = int(used_lengths(one)[0])
        tokens, mask = torch.from_numpy(one["tokens"]), torch.from_numpy(one["loss_mask"])
        out = net(input_ids=tokens[None, : max(used, 1)], use_cache=False, output_router_logits=True)
        if used:
            picked = out.logits[0].log_softmax(-1).gather(1, tokens[1 : used + 1, None])[:, 0]
            loss = loss - picked[mask[1 : used + 1]].sum() / batch["loss_mask"].sum()
            logits.append(torch.stack(out.router_logits))
    logits = torch.cat(logits, 1)  # [layers, T, E]
    chances = logits.softmax(-1)
    shares = torch.nn.functional.one_hot(chances.topk(K).indices, EXPERTS).float().sum(2).mean(1)
    means = chances.mean(1)
    pooled = (shares.mean(0), means.mean(0)) if of == "model" else (shares, means)
    balance = EXPERTS * (pooled[0] * pooled[1]).sum(-1).mean()
    squares = logits.logsumexp(-1).square().mean()
    whole = loss + 0.5 * balance + 0.1 * squares
    whole.backward()
    norm = torch.stack([p.grad.norm() for p in net.parameters() if p.grad is not None]).norm()
    (found,), metrics = trained(build("qwen3_moe", experts=config, micro_batch_tokens=40), [batch])
    np.testing.assert_allclose(found, [float(whole), float(norm)], rtol=1e-5)
    assert metrics["experts/z_loss"] == pytest.approx(float(squares), rel=1e-5)
    loads = shares / shares.sum(1, keepdim=True) * EXPERTS
    assert metrics["experts/load_max"] == pytest.approx(float(loads.max(1).values.mean()), rel=1e-5)
    assert metrics["experts/load_min"] == pytest.approx(float(loads.min(1).values.mean()), abs=1e-6)
    assert metrics["experts/entropy"] == pytest.approx(float(-(chances * chances.log()).sum(-1).mean()), rel=1e-5)
    assert metrics["experts/balance_loss"] == pytest.approx(float(balance), rel=1e-5)


@pytest.fixture(scope="module")
def alone(make_batch):
    """Return batches, and loss, gradient norm and metrics of steps on one rank in one pass, with a replay or not."""
    known = {}

    def of(build, replay):
        if replay not in known:
            batches = [recorded(make_batch(seed), seed, missing=0.2) for seed in range(3)]
            config = ExpertsConfig(balance=0.5, z_loss=0.1, replay=replay)
            known[replay] = batches, trained(build("qwen3_moe", experts=config), batches)
        return known[replay]

    return of


def alike(found, expected):
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-4)
    assert found[1].keys() == expected[1].keys()
    for name, value in expected[1].items():
        assert found[1][name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


@pytest.mark.slow
@pytest.mark.parametrize("split", ["one rank", *SPLITS])
def test_no_number_depends_on_micro_batches_layout_or_ranks(build, alone, split):
    ranks, sizes = SPLITS.get(split, (1, {}))
    for replay, layout in ((False, "packed"), (True, "padded")):
        batches, expected = alone(build, replay)
        config = ExpertsConfig(balance=0.5, z_loss=0.1, replay=replay)
        backend = build("qwen3_moe", ranks, sizes, experts=config, layout=layout, micro_batch_tokens=40)
        alike(trained(backend, batches), expected)
        if replay:
            assert expected[1]["routing/disagreement"] == 0
            assert expected[1]["routing/overruled"] > 0.5
        else:
            assert expected[1]["routing/disagreement"] > 0.5
            assert "routing/overruled" not in expected[1]


@pytest.mark.slow
@pytest.mark.parametrize("split", ["one rank", "pipeline 2", "pipeline 2, virtual 2"])
@pytest.mark.parametrize("kind", [True, "selective"])
def test_recomputed_passes_count_once_and_replay_the_same_experts(build, folders, make_batch, split, kind):
    ranks, sizes = {**SPLITS, "pipeline 2, virtual 2": (2, {"pipeline": 2, "virtual": 2})}.get(split, (1, {}))
    folder = folders("qwen3_moe", layers=4)
    batches = [wide(make_batch(seed), seed) for seed in range(2)]
    config = ExpertsConfig(balance=0.5, z_loss=0.1, replay=True)
    expected = trained(build(folder, experts=config), batches)
    backend = build(folder, ranks, sizes, experts=config, gradient_checkpointing=kind, micro_batch_tokens=40)
    backend.score(batches[0], ("logprobs",))
    alike(trained(backend, batches), expected)


def wide(batch, seed):
    """Return a batch with recorded experts of four layers."""
    columns = [recorded(batch, seed + 10 * part, missing=0.2)["routed_experts"] for part in range(2)]
    return batch.with_columns(routed_experts=np.concatenate(columns, 1))


@pytest.mark.slow
@pytest.mark.parametrize("split", ["one rank", "pipeline 2", "tensor 2, sequence, expert 2", "context 2"])
def test_over_micro_batches_the_balance_loss_is_the_mean_of_theirs(build, make_batch, split):
    batch, (ranks, sizes) = make_batch(0), SPLITS.get(split, (1, {}))
    parts = [batch.take(chosen) for chosen in plan(batch, "packed", 60)]
    assert len(parts) > 2
    theirs = [trained(build("qwen3_moe"), [part])[1]["experts/balance_loss"] for part in parts]
    config = ExpertsConfig(balance=1.0, balance_over="micro-batch")
    plain, balanced = (
        trained(build("qwen3_moe", ranks, sizes, micro_batch_tokens=60, experts=one), [batch])
        for one in (ExpertsConfig(), config)
    )
    assert balanced[0][0, 0] - plain[0][0, 0] == pytest.approx(np.mean(theirs), rel=1e-5)
    assert balanced[1]["experts/balance_loss"] == pytest.approx(np.mean(theirs), rel=1e-5)


def test_a_score_replays_what_is_recorded_and_leaves_the_rest_to_the_router(build, make_batch):
    batch = make_batch(1)
    free, replaying = build("qwen3_moe"), build("qwen3_moe", experts=ExpertsConfig(replay=True))
    expected = free.score(batch, ("logprobs",))["logprobs"]
    for column in (batch, recorded(batch, missing=1.1)):
        assert np.array_equal(replaying.score(column, ("logprobs",))["logprobs"], expected)
    assert np.abs(replaying.score(recorded(batch), ("logprobs",))["logprobs"] - expected).max() > 1e-4
    with pytest.raises(WhetError, match="has no column 'routed_experts'"):
        replaying.train(batch, LIKELIHOOD)
    odd = batch.with_columns(routed_experts=np.zeros((batch.tokens, 5), np.int16))
    with pytest.raises(WhetError, match=r"wanted \[tokens, 4\]"):
        replaying.score(odd, ("logprobs",))


def test_a_mixture_without_options_trains_as_one_that_records(build, make_batch):
    batches = [recorded(make_batch(seed), seed) for seed in range(2)]
    plain, recording = build("qwen3_moe"), build("qwen3_moe", experts=ExpertsConfig(record=True))
    assert np.array_equal(steps_of(plain, batches), steps_of(recording, batches))


def test_the_reference_of_an_adapter_chooses_its_experts_itself(build, make_batch):
    batch = make_batch(0)
    backend = build("qwen3_moe", experts=ExpertsConfig(replay=True), lora=LoraConfig(rank=4))
    found, expected = (backend.score(one, ("logprobs",), "reference") for one in (recorded(batch), batch))
    np.testing.assert_array_equal(found["logprobs"], expected["logprobs"])
    replayed, free = (backend.score(one, ("logprobs",))["logprobs"] for one in (recorded(batch), batch))
    assert np.abs(replayed - free).max() > 0.01
