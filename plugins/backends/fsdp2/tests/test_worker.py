"""One rank of the backend, against the model of `transformers` in eager attention on padded rows."""

import importlib
import json
import shutil

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from whet.component import Spec
from whet.data.batch import concatenate
from whet.errors import WhetError
from whet_fsdp2.checkpointing import KEPT
from whet_fsdp2.root import Root

FAMILIES = ["llama", "qwen2", "qwen3", "qwen3 untied", "qwen3_moe", "mixtral"]
LIKELIHOOD = Spec("whet_testing.losses:Likelihood")
WEIGHTED = Spec("whet_testing.losses:Weighted")
SKIPPING = Spec("whet_testing.losses:Weighted", config={"skip_dead": True})


def eager(folder, batch, temperature=1.0):
    """Return the model, logprobs [N] and entropies [N], by log_softmax of the logits of padded rows."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    rows = np.split(batch["tokens"], np.cumsum(batch["lengths"])[:-1])
    width = max(map(len, rows))
    ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows])
    mask = torch.arange(width) < torch.tensor(batch["lengths"])[:, None]
    logits = model(input_ids=ids, attention_mask=mask.long()).logits[:, :-1] / temperature
    log_p = torch.log_softmax(logits, -1)
    zero = torch.zeros(len(rows), 1)
    logprobs = torch.cat([zero, log_p.gather(2, ids[:, 1:, None])[..., 0]], 1)[mask]
    entropies = torch.cat([zero, -(log_p.exp() * log_p).sum(-1)], 1)[mask]
    learned = torch.tensor(batch["loss_mask"])
    return model, logprobs * learned, entropies * learned


@pytest.mark.parametrize("layout", ["shared", "packed", "padded"])
@pytest.mark.parametrize("family", FAMILIES)
def test_scores_and_gradients_are_those_of_eager_attention(
    make_worker, folders, batch, gradients, family, layout
):  # fmt: skip
    worker = make_worker(family, layout=layout)
    model, logprobs, entropies = eager(folders(family), batch)
    found = worker.score(batch, ("logprobs", "entropy"))
    np.testing.assert_allclose(found["logprobs"], logprobs.detach(), atol=1e-5)
    np.testing.assert_allclose(found["entropy"], entropies.detach(), atol=1e-5)
    weight = torch.tensor(np.repeat(batch["advantages"], batch["lengths"]))
    loss = -(logprobs * weight).sum() / int(batch["loss_mask"].sum())
    loss.backward()
    ours, theirs = gradients(worker, batch), {n: p.grad for n, p in model.named_parameters()}
    assert set(ours) == set(theirs)
    for name, gradient in ours.items():
        torch.testing.assert_close(gradient, theirs[name], atol=2e-6, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")
    assert worker.evaluate(batch, WEIGHTED)["loss"].number() == pytest.approx(loss.item(), abs=1e-6)


def test_a_padding_token_within_a_sequence_has_a_gradient_like_any_other(
    make_worker, folders, batch, gradients, tmp_path
):  # fmt: skip
    padded = folders("qwen3 untied")
    config = json.loads((padded / "config.json").read_text())
    shutil.copytree(padded, tmp_path / "without")
    (tmp_path / "without" / "config.json").write_text(json.dumps({**config, "pad_token_id": None}))
    tokens = batch["tokens"].copy()
    tokens[tokens == tokens[-2]] = config["pad_token_id"]
    batch = batch.with_columns(tokens=tokens)
    model, logprobs, _ = eager(tmp_path / "without", batch)
    weight = torch.tensor(np.repeat(batch["advantages"], batch["lengths"]))
    (-(logprobs * weight).sum() / int(batch["loss_mask"].sum())).backward()
    expected = model.model.embed_tokens.weight.grad
    assert expected[config["pad_token_id"]].norm() > 1e-3
    found = gradients(make_worker(folder=padded), batch)["model.embed_tokens.weight"]
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=1e-4)


def test_phases_are_told_by_the_name_of_the_role(make_worker, batch):
    found = make_worker(role="critic").train(batch, WEIGHTED)
    assert {name for name in found if name.startswith("seconds/")} == {
        f"seconds/critic.{phase}" for phase in ("forward", "backward", "optimizer")
    }


def test_temperature_divides_the_logits_and_0_counts_as_1(make_worker, folders, batch):
    worker = make_worker()
    for temperature, meant in ((0.5, 0.5), (0.0, 1.0)):
        column = np.full(batch.sequences, temperature, np.float32)
        found = worker.score(batch.with_columns(temperature=column), ("logprobs",))["logprobs"]
        np.testing.assert_allclose(found, eager(folders(), batch, meant)[1].detach(), atol=1e-5)


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 1000), budget=st.integers(1, 120), layout=st.sampled_from(["shared", "packed", "padded"]))
def test_gradients_do_not_depend_on_micro_batches_layout_or_order(
    make_worker, make_batch, gradients, seed, budget, layout
):
    batch = make_batch(seed)
    order = np.random.default_rng(seed).permutation(batch.sequences)
    expected = gradients(make_worker(), batch)
    found = gradients(make_worker(layout=layout, micro_batch_tokens=budget), batch.take(order))
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, atol=1e-6, rtol=1e-4)


def test_answers_that_are_alike_are_computed_once_and_count_each(make_worker, batch, gradients):
    alike = concatenate([batch, batch.with_columns(unit=batch["unit"] + 100, advantages=-2 * batch["advantages"])])
    ran, worker, plain = [], make_worker(), make_worker(layout="padded")
    worker._root.model.model.register_forward_hook(lambda _, __, out: ran.append(out.last_hidden_state.shape[1]))
    found, expected = gradients(worker, alike), gradients(plain, alike)
    gradients(worker, batch)
    assert ran[0] == ran[1]
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, atol=1e-6, rtol=1e-4)


def test_the_chunk_of_logits_changes_nothing(make_worker, batch, gradients):
    expected, found = (gradients(make_worker(logprob_chunk=chunk), batch) for chunk in (0, 7))
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("kind", [True, "selective"])
def test_checkpointing_computes_layers_again_and_changes_nothing(make_worker, batch, gradients, kind):
    plain, saving = make_worker(), make_worker(gradient_checkpointing=kind)
    calls = []
    saving._root.model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    expected, found = gradients(plain, batch), gradients(saving, batch)
    assert len(calls) == 2
    assert all(torch.equal(found[name], expected[name]) for name in expected)


class Products(TorchDispatchMode):
    """Counts the matrix products that are computed."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.count += operation in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return operation(*args, **kwargs or {})


@pytest.mark.parametrize(("family", "options"), [
    ("qwen3", {}), ("qwen3", {"layout": "padded"}), ("qwen3_moe", {}), ("qwen3", {"lora": {"rank": 2}}),
    ("qwen3", {"head": "value"}),
])  # fmt: skip
def test_selective_checkpointing_changes_nothing_and_repeats_no_large_product(
    make_worker, batch, gradients, family, options
):
    loss = Spec("whet_testing.losses:Regression") if "head" in options else WEIGHTED
    found, counts = [], []
    for kind in (False, "selective", True):
        worker = make_worker(family, gradient_checkpointing=kind, micro_batch_tokens=60, **options)
        with Products() as products:
            found.append(gradients(worker, batch, loss))
        counts.append(products.count)
    assert all(torch.equal(found[1][name], found[0][name]) for name in found[0])
    assert counts[1] < counts[2]
    assert (counts[1] > counts[0]) == ("lora" in options), "the products with B of an adapter are cheap"


def test_operations_whose_results_are_kept_exist_by_their_names():
    importlib.import_module("torch.nn.attention.varlen")
    for name in KEPT:
        space, operation, overload = name.split(".")
        if space != "flash_attn":  # a package of its own
            assert str(getattr(getattr(getattr(torch.ops, space), operation), overload)) == name


def test_tokens_outside_the_mask_get_no_gradient(make_worker, batch, gradients):
    quiet = batch.with_columns(advantages=np.where(np.arange(batch.sequences) == 3, 1, 0).astype(np.float32))
    found = gradients(make_worker("llama"), quiet)["model.embed_tokens.weight"]
    tokens = np.split(batch["tokens"], np.cumsum(batch["lengths"])[:-1])[3]
    others = np.setdiff1d(np.arange(len(found)), tokens)
    assert found[others].abs().max() == 0
    assert found[tokens[:-1]].abs().sum(1).min() > 0


def test_leaving_dead_sequences_out_changes_nothing_but_what_runs(make_worker, batch, gradients):
    dead = batch.with_columns(advantages=np.where(batch["group"] == 1, 0, batch["advantages"]).astype(np.float32))
    worker, ran = make_worker(), []
    worker._root.model.model.register_forward_hook(lambda _, __, out: ran.append(out.last_hidden_state.shape[1]))
    kept, left = gradients(worker, dead, WEIGHTED), gradients(worker, dead, SKIPPING)
    assert ran[1] < ran[0]
    for name, gradient in kept.items():
        torch.testing.assert_close(left[name], gradient, atol=1e-7, rtol=1e-4)


def test_where_all_are_dead_one_unit_still_runs_and_counts_stay(make_worker, batch):
    still = batch.with_columns(advantages=np.zeros(batch.sequences, np.float32))
    found = make_worker().train(still, SKIPPING)
    assert found["learned"].number() == batch.take([0])["loss_mask"].sum()
    assert found["loss"].number() == 0
    assert found["grad_norm"].number() == 0


def test_units_stay_together_and_metrics_add_up_over_micro_batches(make_worker, batch):
    worker = make_worker(micro_batch_tokens=1)
    assert worker.train(batch, LIKELIHOOD)["learned"].number() == batch["loss_mask"].sum()


def test_a_count_of_0_takes_no_step_and_does_not_move_the_schedule(make_worker, batch):
    worker = make_worker(schedule={"kind": "linear"})
    nothing = batch.with_columns(loss_mask=np.zeros(batch.tokens, bool))
    assert worker.train(nothing, LIKELIHOOD)["skipped_steps"].number() == 1
    rates = [worker.train(batch, LIKELIHOOD)["lr"].number() for _ in range(2)]
    assert rates == pytest.approx([0.9e-2, 0.8e-2])


def test_gradients_are_clipped_to_the_norm(make_worker, batch):
    clipped, free = make_worker(max_grad_norm=0.01), make_worker(max_grad_norm=None)
    norms = [worker.train(batch, WEIGHTED)["grad_norm"].number() for worker in (clipped, free)]
    assert norms[0] == norms[1] > 0.01
    ours = clipped._stepper.state()["model.norm.weight"]["exp_avg"]
    theirs = free._stepper.state()["model.norm.weight"]["exp_avg"]
    torch.testing.assert_close(ours, theirs * (0.01 / norms[0]), atol=1e-9, rtol=1e-4)


def test_a_step_is_that_of_torch_adamw_with_decay_of_matrices_only(make_worker, batch, gradients):
    options = {"lr": 1e-2, "betas": [0.8, 0.95], "eps": 1e-6, "weight_decay": 0.1}
    worker = make_worker("qwen2", optimizer=options, max_grad_norm=0)
    before = {name: w.detach().clone() for name, w in worker._weights.masters.items()}
    found = gradients(worker, batch)
    worker.train(batch, WEIGHTED)
    for name, weight in before.items():
        expected = torch.nn.Parameter(weight)
        expected.grad = found[name]
        decay = 0.1 if weight.ndim == 2 else 0.0
        torch.optim.AdamW([expected], lr=1e-2, betas=(0.8, 0.95), eps=1e-6, weight_decay=decay).step()
        torch.testing.assert_close(worker._weights.masters[name].detach(), expected.detach(), atol=1e-7, rtol=1e-5)


def test_the_same_steps_give_the_same_weights_bitwise(make_worker, batch):
    ends = []
    for _ in range(2):
        worker = make_worker()
        for _ in range(3):
            worker.train(batch, WEIGHTED)
        ends.append({name: w.detach().clone() for name, w in worker._weights.masters.items()})
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def test_a_loss_that_is_not_finite_takes_no_step_and_the_third_in_a_row_ends_the_run(make_worker, batch):
    worker = make_worker()
    broken = batch.with_columns(advantages=np.full(batch.sequences, np.nan, np.float32))
    before = worker.score(batch, ("logprobs",))["logprobs"]
    for _ in range(2):
        assert worker.train(broken, WEIGHTED)["nonfinite_steps"].number() == 1
    assert np.array_equal(worker.score(batch, ("logprobs",))["logprobs"], before)
    worker.train(batch, WEIGHTED)
    for _ in range(2):
        worker.train(broken, WEIGHTED)
    with pytest.raises(WhetError, match="not finite for 3 calls in a row"):
        worker.train(broken, WEIGHTED)


def test_bfloat16_trains_near_float32_and_keeps_float32_masters(make_worker, batch):
    low, high = make_worker(dtype="bfloat16"), make_worker()
    for _ in range(3):
        ours, theirs = low.train(batch, LIKELIHOOD), high.train(batch, LIKELIHOOD)
    assert ours["loss"].number() == pytest.approx(theirs["loss"].number(), rel=2e-2)
    assert ours["grad_norm"].number() == pytest.approx(theirs["grad_norm"].number(), rel=5e-2)
    assert {w.dtype for w in low._weights.masters.values()} == {torch.float32}
    assert {w.dtype for _, w in low._weights.computing()} == {torch.bfloat16}
    for (_, copy), master in zip(low._weights.computing(), low._weights.masters.values(), strict=True):
        assert torch.equal(copy, master.bfloat16())


def test_small_steps_add_up_in_bfloat16(make_worker, batch):
    worker = make_worker(dtype="bfloat16", optimizer={"lr": 1e-5})
    before = worker.score(batch, ("logprobs",))["logprobs"]
    for _ in range(40):
        worker.train(batch, LIKELIHOOD)
    assert worker.score(batch, ("logprobs",))["logprobs"].sum() > before.sum()


def test_the_reference_is_refused_where_none_is_held(make_worker, batch):
    with pytest.raises(WhetError, match=r"backend\.reference"):
        make_worker().score(batch, ("logprobs",), "reference")


def test_a_loss_that_needs_other_outputs_is_refused(make_worker, batch, monkeypatch):
    from whet_testing.losses import Likelihood

    monkeypatch.setattr(Likelihood, "outputs", ("values",))
    with pytest.raises(WhetError, match="needs values"):
        make_worker().train(batch, LIKELIHOOD)


def test_a_group_that_is_repeated_counts_twice(make_worker, batch, gradients):
    again = batch.with_columns(unit=batch["unit"] + 100, group=batch["group"] + 100)
    worker = make_worker()
    once, twice = gradients(worker, batch), gradients(worker, concatenate([batch, again]))
    for name, gradient in once.items():
        torch.testing.assert_close(twice[name], gradient, atol=1e-6, rtol=1e-4)


def test_logits_of_all_tokens_never_exist(make_worker, batch):
    worker, largest = make_worker(logprob_chunk=4), []

    class Watching(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            # The head's matrix, transposed, is [hidden, vocabulary].
            if isinstance(out, torch.Tensor) and out.ndim == 2 and out.shape[1] == vocabulary and len(out) != hidden:
                largest.append(len(out))
            return out

    root: Root = worker._root
    vocabulary, hidden = root.model.config.vocab_size, root.model.config.hidden_size
    with Watching():
        worker.train(batch, LIKELIHOOD)
    assert max(largest) == 4
