"""Two ranks over gloo, in worker processes, against one rank in this process."""

import importlib.util
import shutil
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor

from whet.component import Spec, resolve
from whet.interfaces.workers import WorkerRank
from whet_fsdp2.backend import Fsdp2Backend
from whet_fsdp2.config import Fsdp2Config, OptimizerConfig
from whet_fsdp2.parallel import ParallelConfig
from whet_fsdp2.worker import Worker
from whet_testing.held import held_processes
from whet_testing.role_context import make_context
from whet_training.experts import ExpertsConfig
from whet_training.handle import ShardedBackend
from whet_training.lora_config import LoraConfig

LIKELIHOOD = Spec("whet_testing.losses:Likelihood")
IMPORTS = ("whet_fsdp2.worker", "transformers.modeling_utils")
SKIPPING = Spec("whet_testing.losses:Weighted", config={"skip_dead": True})


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with held_processes(tmp_path_factory.mktemp("logs"), {("backend",): 2}, IMPORTS) as made:
        yield made


@pytest.fixture
def backends(cluster, folders, tmp_path):
    """Return a function that builds backends on one and on two ranks."""
    built = []

    def build(dtype="float32", family="qwen3", folder=None, **config):
        config = Fsdp2Config(**{"optimizer": OptimizerConfig(lr=1e-2), **config})
        for size in (1, 2):
            place = cluster.worker_group("backend", size) if size > 1 else None
            context = make_context(
                tmp_path / f"{dtype}-{size}", "backend", folder or folders(family), place, dtype=dtype
            )
            built.append(Fsdp2Backend(config, context))
        return built[-2:]

    yield build
    for backend in built:
        backend.close()


def numbers(found):
    return {name: found[name].number() for name in ("loss", "grad_norm", "lr", "tokens")}


def test_two_ranks_give_the_numbers_of_one(backends, make_batch, tmp_path):
    one, two = backends(micro_batch_tokens=40, reference=True)
    batches = [make_batch(seed) for seed in range(4)]
    for batch in batches:
        expected, found = (numbers(backend.train(batch, LIKELIHOOD)) for backend in (one, two))
        assert found == pytest.approx(expected, rel=1e-5)

    # more ranks than units; a rank with nothing alive
    small = batches[0].take([0])
    assert numbers(two.train(small, LIKELIHOOD)) == pytest.approx(numbers(one.train(small, LIKELIHOOD)), rel=1e-4)
    half = batches[0].with_columns(
        advantages=np.where(batches[0]["group"] < 2, batches[0]["advantages"], 0).astype(np.float32)
    )
    assert numbers(two.train(half, SKIPPING)) == pytest.approx(numbers(one.train(half, SKIPPING)), rel=1e-4)

    order = np.random.default_rng(0).permutation(batches[0].sequences)
    # what is dead is known before the batch is shared out
    asked = half.take(order)
    assert two._live(asked, SKIPPING).tolist() == (asked["advantages"] != 0).tolist()
    mixed = batches[0].take(order)
    for weights in ("policy", "reference"):
        expected, found = (backend.score(mixed, ("logprobs", "entropy"), weights) for backend in (one, two))
        for name in expected:
            np.testing.assert_allclose(found[name], expected[name], atol=1e-4)
    losses = [backend.evaluate(mixed, LIKELIHOOD)["loss"].number() for backend in (one, two)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)

    # a checkpoint of one rank continues on two, and the other way round
    one.save(tmp_path / "of-one").result()
    two.load(tmp_path / "of-one")
    for batch in batches[:2]:
        expected, found = (numbers(backend.train(batch, LIKELIHOOD)) for backend in (one, two))
        assert found == pytest.approx(expected, rel=1e-5)
    pending = two.save_in_background(tmp_path / "of-two")
    pending.taken()
    pending.result()
    one.load(tmp_path / "of-two")
    for batch in batches[:2]:
        expected, found = (numbers(backend.train(batch, LIKELIHOOD)) for backend in (two, one))
        assert found == pytest.approx(expected, rel=1e-5)

    from safetensors.torch import load_file

    for backend, name in ((one, "one"), (two, "two")):
        backend.save(tmp_path / f"end-{name}").result()
        backend.export(tmp_path / f"export-{name}")
    exported = [load_file(tmp_path / f"export-{name}" / "model.safetensors") for name in ("one", "two")]
    assert set(exported[0]) == set(exported[1])
    for name in exported[0]:
        torch.testing.assert_close(exported[1][name], exported[0][name], atol=2e-3, rtol=0)


def test_two_ranks_give_the_outputs_of_one(backends, folders, make_batch):
    one, two = backends(teacher=str(folders("llama")))
    batch = make_batch()
    outputs = ("topk_ids:4", "topk_logprobs:4", "kl_forward", "kl_reverse")
    expected, found = (backend.score(batch, outputs) for backend in (one, two))
    assert np.array_equal(found["topk_ids:4"], expected["topk_ids:4"])
    for name in outputs[1:]:
        np.testing.assert_allclose(found[name], expected[name], atol=1e-5)
    at = batch.with_columns(topk_ids=expected["topk_ids:4"])
    for loss, part in (("Divergence", batch), ("AtTokens", at), ("AtTokens", at.take([0]))):
        expected, found = (numbers(backend.train(part, Spec(f"whet_testing.losses:{loss}"))) for backend in (one, two))
        assert found == pytest.approx(expected, rel=1e-4)


def test_two_ranks_give_the_numbers_and_loads_of_one_for_a_mixture_of_experts(backends, make_batch, tmp_path):
    experts = ExpertsConfig(balance=0.1, z_loss=0.01)
    one, two = backends(family="qwen3_moe", micro_batch_tokens=40, experts=experts, gradient_checkpointing=True)
    batches = [make_batch(seed) for seed in range(3)]
    half = batches[0].with_columns(advantages=np.where(batches[0]["group"] < 2, 1, 0).astype(np.float32))
    for batch, loss in [*((batch, LIKELIHOOD) for batch in batches), (half, SKIPPING), (half.take([0]), SKIPPING)]:
        expected, found = ({n: m.number() for n, m in b.train(batch, loss).items()} for b in (one, two))
        names = ["loss", "grad_norm", *(name for name in expected if name.startswith("experts/"))]
        assert len(names) == 8
        assert {n: found[n] for n in names} == pytest.approx({n: expected[n] for n in names}, rel=2e-4)
    for backend, name in ((one, "one"), (two, "two")):
        backend.export(tmp_path / name)
    from safetensors.torch import load_file

    exported = [load_file(tmp_path / name / "model.safetensors") for name in ("one", "two")]
    assert "model.layers.1.mlp.experts.7.down_proj.weight" in exported[0]
    for name in exported[0]:
        torch.testing.assert_close(exported[1][name], exported[0][name], atol=1e-3, rtol=0)
    two.save(tmp_path / "saved").result()
    one.load(tmp_path / "saved")
    found, expected = (backend.score(batches[0], ("logprobs",))["logprobs"] for backend in (one, two))
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_two_ranks_give_the_values_of_one(backends, make_batch):
    one, two = backends(head="value")
    for batch in (make_batch(), make_batch(1).take([0])):
        expected, found = (backend.score(batch, ("values",))["values"] for backend in (one, two))
        np.testing.assert_allclose(found, expected, atol=1e-4)
        expected, found = (numbers(b.train(batch, Spec("whet_testing.losses:Regression"))) for b in (one, two))
        assert found == pytest.approx(expected, rel=1e-4)


def test_two_ranks_train_the_adapter_of_one(backends, make_batch, moe, tmp_path):
    from safetensors.torch import load_file

    # AdamW divides a gradient near zero by itself: without a larger eps, rounding decides about the step of its weight.
    optimizer = OptimizerConfig(lr=1e-2, eps=1e-4)
    for folder, lora, options in (
        (None, LoraConfig(rank=4), {"gradient_checkpointing": True}),
        (moe, LoraConfig(rank=4, experts=True), {}),
    ):
        one, two = backends(folder=folder, lora=lora, optimizer=optimizer, micro_batch_tokens=40, **options)
        for weights in ("policy", "reference", "trial"):
            expected, found = (
                backend.score(make_batch(), ("logprobs",), weights)["logprobs"] for backend in (one, two)
            )
            np.testing.assert_allclose(found, expected, atol=1e-5)
        for batch in (make_batch(), make_batch(1), make_batch(2).take([0]), make_batch(3)):
            expected, found = (numbers(backend.train(batch, LIKELIHOOD)) for backend in (one, two))
            assert found == pytest.approx(expected, rel=1e-4)
        saved = []
        for backend, name in ((one, f"one-{len(options)}"), (two, f"two-{len(options)}")):
            backend.save(tmp_path / name).result()
            backend.export(tmp_path / f"export-{name}")
            saved.append([load_file(tmp_path / name / "adapter_model.safetensors"),
                          load_file(tmp_path / f"export-{name}" / "model.safetensors")])  # fmt: skip
        for first, second in zip(*saved, strict=True):
            assert set(first) == set(second)
            for name, tensor in first.items():
                torch.testing.assert_close(second[name], tensor, atol=1e-3, rtol=0)
        two.load(tmp_path / f"one-{len(options)}")
        one.load(tmp_path / f"two-{len(options)}")
        one.load(tmp_path / f"one-{len(options)}")
        expected, found = (numbers(backend.train(make_batch(4), LIKELIHOOD)) for backend in (one, two))
        assert found == pytest.approx(expected, rel=1e-4)


def test_adapters_of_a_split_model_have_the_gradients_of_the_whole_one(cluster, folders, moe):
    target = f"file:{Path(__file__).parent / 'parallel_adapters.py'}:ParallelAdapters"
    whole = resolve(target)(WorkerRank("backend", 0, 1))
    cases = (
        (folders("llama"), {"tp_size": 2}, False),
        (folders("qwen3"), {"tp_size": 2}, False),
        (moe, {"tp_size": 2}, True),
        (moe, {"tp_size": 2, "ep_size": 2}, True),
    )
    workers = cluster.worker_group("backend", 2).spawn(target, {})
    try:
        for folder, split, experts in cases:
            expected = whole.compute(str(folder), split, experts)
            for found in workers.call("compute", str(folder), split, experts):
                assert set(found) == set(expected)
                for name, array in expected.items():
                    scale = max(1.0, float(np.abs(array).max())) if name.startswith("gradient") else 1.0
                    np.testing.assert_allclose(found[name], array, atol=1e-5 * scale, err_msg=f"{split} {name}")
                assert all(np.abs(array).max() > 1e-4 for name, array in expected.items() if "gradient" in name[:8])
    finally:
        workers.close()


@pytest.mark.parametrize(
    ("split", "experts"),
    [({"tensor": 2}, False), ({"context": 2}, False), ({"tensor": 2}, True), ({"expert": 2}, True)],
)
def test_an_adapter_is_trained_as_on_one_rank_however_the_model_is_split(
    cluster, folders, moe, make_batch, tmp_path, split, experts
):
    lora = LoraConfig(rank=4, experts=experts)
    common = {"lora": lora, "optimizer": OptimizerConfig(lr=1e-2, eps=1e-4), "micro_batch_tokens": 60}
    backends = []
    for size, parallel in ((1, {}), (2, split)):
        place = cluster.worker_group("backend", size) if size > 1 else None
        context = make_context(tmp_path / f"{size}", "backend", moe if experts else folders("qwen3"), place)
        backends.append(Fsdp2Backend(Fsdp2Config(**common, parallel=ParallelConfig(**parallel)), context))
    try:
        for seed in range(3):
            expected, found = (numbers(backend.train(make_batch(seed), LIKELIHOOD)) for backend in backends)
            assert found == pytest.approx(expected, rel=1e-4)
        for weights in ("policy", "reference", "trial"):
            expected, found = (b.score(make_batch(), ("logprobs",), weights)["logprobs"] for b in backends)
            np.testing.assert_allclose(found, expected, atol=2e-4)
    finally:
        for backend in backends:
            backend.close()


def test_two_ranks_train_an_adapter_in_bfloat16_and_a_value_head(backends, make_batch):
    optimizer = OptimizerConfig(lr=1e-3, eps=1e-4)
    one, two = backends(dtype="bfloat16", head="value", lora=LoraConfig(rank=4), optimizer=optimizer)
    for seed in range(3):
        loss = Spec("whet_testing.losses:Regression")
        expected, found = (numbers(backend.train(make_batch(seed), loss)) for backend in (one, two))
        assert found == pytest.approx(expected, rel=5e-3)


@pytest.mark.parametrize(
    "options",
    [{"gradient_checkpointing": "selective", "offload_optimizer": True}, {"reshard_after_forward": False}],
    ids=str,
)
def test_two_ranks_keep_their_options(backends, make_batch, options):
    one, two = backends(family="llama", **options)
    for seed in range(2):
        expected, found = (numbers(backend.train(make_batch(seed), LIKELIHOOD)) for backend in (one, two))
        assert found == pytest.approx(expected, rel=1e-5)


def test_two_ranks_in_bfloat16_stay_near_one(backends, make_batch):
    one, two = backends(dtype="bfloat16")
    for seed in range(2):
        expected, found = (numbers(backend.train(make_batch(seed), LIKELIHOOD)) for backend in (one, two))
        assert found == pytest.approx(expected, rel=2e-2)


def test_ranks_in_bfloat16_divide_logits_by_the_temperature_itself(backends, make_batch, folders, tmp_path):
    from safetensors.torch import load_file, save_file

    folder = shutil.copytree(folders("qwen3 untied"), tmp_path / "certain")
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] *= 8
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    _, two = backends(dtype="bfloat16", folder=folder, reference=True)
    batch = make_batch()
    batch = batch.with_columns(temperature=np.full(batch.sequences, 0.6, np.float32))
    found, expected = (two.score(batch, ("logprobs",), weights)["logprobs"] for weights in ("policy", "reference"))
    np.testing.assert_allclose(found, expected, atol=1e-5)


class Watched(Worker):
    def whole(self):
        """Return the weights of the frozen model that this rank holds whole."""
        weights = self._frozen["reference"].model.named_parameters()
        return [name for name, weight in weights if not isinstance(weight, DTensor)]


def test_no_weight_of_a_frozen_model_stays_gathered_after_a_score(cluster, folders, make_batch, tmp_path):
    context = make_context(tmp_path, "backend", folders("llama"), cluster.worker_group("backend", 2))
    config = Fsdp2Config(optimizer=OptimizerConfig(lr=1e-2), reference=True)
    backend = ShardedBackend(f"file:{Path(__file__)}:Watched", config, context, "shared")
    try:
        backend.score(make_batch(), ("logprobs",), "reference")
        assert backend._workers.call("whole") == [[], []]
    finally:
        backend.close()


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
def test_moments_of_8_bits_go_on_on_another_number_of_ranks(backends, make_batch, tmp_path):
    one, two = backends(family="llama", optimizer=OptimizerConfig(lr=1e-3, kind="adamw_8bit"))
    expected, found = ([numbers(b.train(make_batch(seed), LIKELIHOOD)) for seed in range(3)] for b in (one, two))
    for mine, theirs in zip(found, expected, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-3)
    two.save(tmp_path / "saved").result()
    on_two = numbers(two.train(make_batch(3), LIKELIHOOD))
    two.load(tmp_path / "saved")
    assert numbers(two.train(make_batch(3), LIKELIHOOD)) == on_two
    one.load(tmp_path / "saved")
    assert numbers(one.train(make_batch(3), LIKELIHOOD)) == pytest.approx(on_two, rel=1e-5)
    assert numbers(one.train(make_batch(4), LIKELIHOOD)) == pytest.approx(
        numbers(two.train(make_batch(4), LIKELIHOOD)), rel=1e-3
    )


def test_two_ranks_route_in_float32_where_the_model_does(backends, ernie, make_batch):
    from transformers import AutoModelForCausalLM

    one, two = backends(dtype="bfloat16", folder=ernie, reference=True)
    batch, plain = make_batch(), AutoModelForCausalLM.from_pretrained(ernie, dtype=torch.bfloat16)
    assert plain.model.layers[0].mlp.gate.weight.dtype == torch.float32
    expected, rounded = by_sequence(plain, batch), plain
    for layer in rounded.model.layers:
        layer.mlp.gate.weight.data = layer.mlp.gate.weight.data.bfloat16().float()
    other = by_sequence(rounded, batch)
    for weights in ("policy", "reference"):
        found = two.score(batch, ("logprobs",), weights)["logprobs"][batch["loss_mask"]]
        assert np.median(np.abs(found - expected)) < 0.01 < 0.1 < np.median(np.abs(found - other))
    mine, theirs = (numbers(backend.train(batch, LIKELIHOOD)) for backend in (two, one))
    assert mine == pytest.approx(theirs, rel=2e-2)


def test_weights_that_each_rank_holds_whole_get_the_gradient_of_all_ranks(backends, ernie, make_batch):
    one, two = backends(folder=ernie, gradient_checkpointing="selective", micro_batch_tokens=40)
    for seed in range(3):
        expected, found = (numbers(backend.train(make_batch(seed), LIKELIHOOD)) for backend in (one, two))
        assert found == pytest.approx(expected, rel=1e-5)


def test_an_adapter_trains_on_a_model_that_keeps_weights_in_float32(backends, ernie, make_batch):
    optimizer = OptimizerConfig(lr=1e-3, eps=1e-4)
    one, two = backends(dtype="bfloat16", folder=ernie, lora=LoraConfig(rank=4), optimizer=optimizer)
    for seed in range(2):
        expected, found = (numbers(backend.train(make_batch(seed), LIKELIHOOD)) for backend in (one, two))
        assert found == pytest.approx(expected, rel=3e-2)


def by_sequence(model, batch):
    """Return the logprobs of the tokens in the loss mask, a sequence at a time."""
    found = []
    parts = (np.split(batch[key], np.cumsum(batch["lengths"])[:-1]) for key in ("tokens", "loss_mask"))
    for row, mask in zip(*parts, strict=True):
        with torch.no_grad():
            log_p = model(input_ids=torch.from_numpy(row)[None, :-1]).logits[0].float().log_softmax(-1)
        found.append(log_p.gather(1, torch.from_numpy(row)[1:, None])[:, 0].numpy()[mask[1:]])
    return np.concatenate(found)


def test_a_step_that_is_not_finite_is_refused_on_both_ranks(backends, make_batch):
    _, two = backends()
    batch = make_batch()
    broken = batch.with_columns(advantages=np.where(batch["group"] == 0, np.nan, 1).astype(np.float32))
    before = two.score(batch, ("logprobs",))["logprobs"]
    found = two.train(broken, Spec("whet_testing.losses:Weighted"))
    assert found["nonfinite_steps"].number() == 1
    assert np.array_equal(two.score(batch, ("logprobs",))["logprobs"], before)


@pytest.mark.parametrize("launcher", ["local", "ray"])
def test_two_and_four_ranks_give_the_numbers_of_one_wherever_they_run(launcher, folders, make_batch, tmp_path, request):
    def build(place, name):
        context = make_context(tmp_path / name, "backend", folders("qwen3"), place)
        return Fsdp2Backend(Fsdp2Config(optimizer=OptimizerConfig(lr=1e-2)), context)

    def trained(backend):
        found = [numbers(backend.train(make_batch(seed), LIKELIHOOD)) for seed in range(2)]
        backend.close()
        return found

    if launcher == "ray":
        pytest.importorskip("ray")
        request.getfixturevalue("forks_under_ray")
    module = import_module(f"whet.runtime.{launcher}")
    expected = trained(build(None, "one"))
    with getattr(module, f"{launcher.title()}Cluster")(tmp_path / "logs") as cluster:
        places = {size: cluster.worker_group(f"backend{size}", size) for size in (2, 4)}
        roles = [place.role for place in places.values()]
        cluster.warm(dict.fromkeys(roles, IMPORTS), roles)
        for size, place in places.items():
            for step, found in enumerate(trained(build(place, f"of-{size}"))):
                assert found == pytest.approx(expected[step], rel=1e-5)
