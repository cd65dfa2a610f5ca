"""Each key of the section changes what it says: numbers against AdamW by hand, and what runs when."""

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from whet_megatron import model as models
from whet_megatron import passes
from whet_megatron.config import MegatronConfig, OptimizerConfig
from whet_megatron.optimizer import Stepper
from whet_testing.three_steps import LIKELIHOOD, steps_by_hand, steps_of
from whet_training.schedule import ScheduleConfig
from whet_training.weight_groups import WeightGroup


def worker(backend):
    """Return the worker of a backend in this process."""
    (one,) = backend._workers._workers
    return one


def weights(backend):
    """Return copies of the weights by their first stored names."""
    found = worker(backend)._model.weights.ruled.values()
    return {one.stored[0]: one.parameter.detach().clone() for one in found}


def moved(backend, batches):
    """Return what steps add to each weight."""
    before = weights(backend)
    for batch in batches:
        backend.train(batch, LIKELIHOOD)
    return {name: after - before[name] for name, after in weights(backend).items()}


def test_betas_epsilon_and_decay_are_those_of_adamw(build, folders, make_batch):
    of = OptimizerConfig(lr=1e-2, weight_decay=0.3, betas=(0.5, 0.7), eps=1e-3)
    batches = [make_batch(seed) for seed in range(3)]
    by_hand = steps_by_hand(folders("llama"), batches, of.lr, of.weight_decay, of.betas, of.eps)
    np.testing.assert_allclose(steps_of(build("llama", optimizer=of), batches), by_hand, rtol=1e-4)
    assert not np.allclose(steps_of(build("llama", optimizer=OptimizerConfig(lr=1e-2)), batches), by_hand, rtol=1e-4)


def test_the_learning_rate_follows_the_schedule(build, make_batch):
    batch, optimizer = make_batch(0), OptimizerConfig(lr=1e-3)
    whole = moved(build("llama", optimizer=optimizer), [batch])
    slow = build("llama", optimizer=optimizer, schedule=ScheduleConfig(warmup_steps=4))
    for name, step in moved(slow, [batch]).items():  # AdamW's first step has the size of the learning rate
        torch.testing.assert_close(step * 4, whole[name], atol=1e-6, rtol=1e-2)
    rates = [slow.train(batch, LIKELIHOOD)["lr"].number() for _ in range(4)]
    assert rates == pytest.approx([5e-4, 7.5e-4, 1e-3, 1e-3])


def test_steps_after_those_of_the_run_are_warned_of_once(build, make_batch, caplog, tmp_path):
    linear = build("llama", schedule=ScheduleConfig("linear"))  # of a run of four steps
    for _ in range(4):
        linear.train(make_batch(0), LIKELIHOOD)
    linear.save(tmp_path / "saved").result()
    assert "comes after" not in caplog.text
    for _ in range(2):
        linear.train(make_batch(0), LIKELIHOOD)
    assert caplog.text.count("optimizer step 5 comes after the 4 that the algorithm states") == 1
    resumed = build("llama", schedule=ScheduleConfig("linear"))
    resumed.load(tmp_path / "saved")
    resumed.train(make_batch(0), LIKELIHOOD)
    assert caplog.text.count("optimizer step 5 comes after the 4 that the algorithm states") == 2


def test_groups_of_weights_have_rates_and_decays_of_their_own(build, make_batch):
    batch, lr, decay = make_batch(0), 1e-3, 0.5
    groups = (WeightGroup("embed_tokens", lr_factor=0.25), WeightGroup("o_proj", weight_decay=0.0))
    plain, own = (
        build("llama", optimizer=OptimizerConfig(lr=lr, weight_decay=decay, groups=one)) for one in ((), groups)
    )
    before = weights(plain)
    expected, found = moved(plain, [batch]), moved(own, [batch])
    for name, step in expected.items():
        if "embed_tokens" in name:
            step = step / 4
        elif "o_proj" in name:
            step = step + lr * decay * before[name]
        torch.testing.assert_close(found[name], step, atol=1e-7, rtol=1e-3)


def test_gradients_are_clipped_to_the_norm_or_not_at_all(build, make_batch):
    """With a large epsilon e, the first step is lr g / (|g| + e)."""
    batch, of = make_batch(0), OptimizerConfig(lr=0.1, eps=0.5)
    free = build("llama", optimizer=of, max_grad_norm=None)
    gradients = {name: -of.eps * step / (of.lr - step.abs()) for name, step in moved(free, [batch]).items()}
    norm = float(torch.stack([one.double().norm() for one in gradients.values()]).norm())
    assert build("llama").train(batch, LIKELIHOOD)["grad_norm"].number() == pytest.approx(norm, rel=1e-3)
    clipped = moved(build("llama", optimizer=of, max_grad_norm=norm / 8), [batch])
    for name, gradient in gradients.items():
        wanted = -of.lr * (gradient / 8) / ((gradient / 8).abs() + of.eps)
        torch.testing.assert_close(clipped[name], wanted, atol=2e-6, rtol=1e-2)


@pytest.mark.parametrize("distributed", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_with_the_rate_0_have_no_part_in_the_norm(build, make_batch, dtype, distributed):
    groups, batch = (WeightGroup("embed_tokens|o_proj", lr_factor=0.0),), make_batch(0)
    of = OptimizerConfig(lr=0.1, groups=groups, distributed=distributed)
    backend = build("llama", dtype=dtype, optimizer=of)
    before, seen = weights(backend), []
    model, optimizer = worker(backend)._model, worker(backend)._stepper.optimizer

    def prepare():
        for name, parameter in model.trained():
            if "embed_tokens" in name or "o_proj" in name:
                parameter.main_grad.fill_(torch.nan)
            else:
                seen.append(parameter.main_grad.double().norm())
        return type(optimizer).prepare_grads(optimizer)

    optimizer.prepare_grads = prepare
    norm = backend.train(batch, LIKELIHOOD)["grad_norm"].number()
    assert norm == pytest.approx(float(torch.stack(seen).norm()), rel=1e-3)
    after = weights(backend)
    still = {name for name in before if torch.equal(before[name], after[name])}
    assert still == {name for name in before if "embed_tokens" in name or "o_proj" in name}


@pytest.mark.parametrize("overlap", [False, True])
def test_with_overlap_gradients_are_added_up_before_the_backward_pass_ends(build, make_batch, monkeypatch, overlap):
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup as Group

    seen, whole, end = [], Group.start_grad_sync, models._add_gradients_up

    def begin(self, *args, **kwargs):
        seen.append("sum")
        return whole(self, *args, **kwargs)

    def finish(*args, **kwargs):
        seen.append("end")
        return end(*args, **kwargs)

    monkeypatch.setattr(Group, "start_grad_sync", begin)
    monkeypatch.setattr(models, "_add_gradients_up", finish)
    backend = build("llama", micro_batch_tokens=40, optimizer=OptimizerConfig(overlap=overlap))
    backend.train(make_batch(0), LIKELIHOOD)  # in which Megatron finds out how often each weight is used
    seen.clear()
    backend.train(make_batch(1), LIKELIHOOD)
    groups = len(worker(backend)._model.chunks[0].bucket_groups)
    assert Counter(seen) == {"sum": groups, "end": 1}  # once, not with every micro-batch
    assert (seen[0] == "sum") == overlap


@pytest.mark.parametrize(("kind", "attention", "rest"), [(False, 1, 1), (True, 2, 2), ("selective", 2, 1)])
def test_what_is_recomputed_runs_twice(build, make_batch, monkeypatch, kind, attention, rest):
    from whet_megatron import plain_layers

    ran = Counter()

    def counted(module):
        whole = module.forward

        def forward(self, *args, **kwargs):
            ran[module.__name__] += 1
            return whole(self, *args, **kwargs)

        monkeypatch.setattr(module, "forward", forward)

    counted(plain_layers.PlainAttention)
    counted(plain_layers.PlainNormLinear)
    build("llama", gradient_checkpointing=kind).train(make_batch(0), LIKELIHOOD)
    layers = 2
    assert ran == {"PlainAttention": attention * layers, "PlainNormLinear": rest * 2 * layers}


def test_logits_are_computed_in_chunks_of_the_wanted_size(build, make_batch, monkeypatch):
    seen, whole = [], passes.head_outputs

    def head_outputs(names, hidden, weight, targets, ids, terms):
        seen.append(terms["chunk"])
        return whole(names, hidden, weight, targets, ids, terms)

    monkeypatch.setattr(passes, "head_outputs", head_outputs)
    for chunk in (0, 7):
        build("llama", logprob_chunk=chunk).score(make_batch(0), ("logprobs",))
    assert set(seen) == {0, 7}


def test_the_optimizer_is_distributed_or_whole(build):
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    for distributed in (True, False):
        backend = build("llama", optimizer=OptimizerConfig(distributed=distributed))
        (one,) = worker(backend)._steps().optimizer.chained_optimizers
        assert isinstance(one, DistributedOptimizer) == distributed


def test_stacks_of_vectors_are_not_decayed():
    decays = {
        "model.layers.0.mlp.experts.down_proj_bias": 0.0,
        "model.layers.0.self_attn.q_norm.weight": 0.0,
        "model.layers.0.mlp.gate.weight": 0.1,
        "model.layers.0.self_attn.o_proj.weight": 0.1,
    }
    trained = {name: torch.nn.Parameter(torch.ones(4, 6)) for name in decays}
    stepper = Stepper.__new__(Stepper)
    stepper._config = MegatronConfig(optimizer=OptimizerConfig(lr=1e-3, weight_decay=0.1))
    stepper._model = SimpleNamespace(trained_names=frozenset(trained), trained=lambda: iter(trained.items()))
    overrides = stepper._overrides()
    found = {
        name: 0.1 * values["wd_mult"] for name, parameter in trained.items()
        for key, values in overrides.items() if key.predicate.fn(parameter)
    }  # fmt: skip
    assert found == pytest.approx(decays)
