"""A LoRA adapter on its way from the trainer to the generator: alone or merged, and what a probe makes of mistakes."""

import re
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from whet.component import AdapterInfo, resolve
from whet.errors import WeightSyncError
from whet_hf.adapter import Base
from whet_hf.config import HfConfig
from whet_hf.generator import HfGenerator


@pytest.fixture(scope="module")
def ends(tmp_path_factory, tiny_models):
    ends = resolve(f"file:{Path(__file__).parent / 'adapter_ends.py'}:Ends")
    made = ends(tmp_path_factory.mktemp("ends"), tiny_models("qwen3"), partial(HfGenerator, HfConfig()))
    yield made
    made.close()


def test_alone_and_merged_it_gives_the_engine_the_same_logprobs(ends):
    for _ in range(2):
        ends.train()
    found = {}
    for content in ("merged", "adapter"):
        sync, probe = ends.sync(content)
        sync(version=1)
        assert probe.metrics()["probe/logprob_gap"].number() < 1e-5
        found[content] = ends.sampled(content)
    for (tokens, logprobs), (others, other_logprobs) in zip(*found.values(), strict=True):
        assert np.array_equal(tokens, others)
        np.testing.assert_allclose(logprobs, other_logprobs, atol=1e-4)


def test_many_adapters_leave_no_trace_in_the_base(ends):
    sync, _ = ends.sync()
    sync(version=1)
    before = ends.sampled()
    for version in range(2, 8):
        again, _ = ends.sync()
        again(version=version)  # each brings a trial adapter, and then the trained one
    for (tokens, logprobs), (others, other_logprobs) in zip(before, ends.sampled(), strict=True):
        assert np.array_equal(tokens, others)
        assert np.array_equal(logprobs, other_logprobs)


# Mistakes that engines and their glue make, as functions of what is applied: (name, A, B, scaling) -> the same, or none

RANK, ALPHA = 4, 8.0
"""Of the adapter of `adapter_ends.py`."""


def swapped(*names):
    pairs = {**dict(zip(names[::2], names[1::2], strict=True)), **dict(zip(names[1::2], names[::2], strict=True))}
    pattern = re.compile("|".join(map(re.escape, pairs)))
    return lambda n, a, b, s: (pattern.sub(lambda m: pairs[m[0]], n), a, b, s)


def missing(pattern):
    return lambda n, a, b, s: None if re.search(pattern, n) else (n, a, b, s)


MISTAKES = {
    "not applied": missing(""),
    "to half of the layers": missing(r"layers\.1\."),
    "to all but one projection": missing(r"layers\.1\.self_attn\.v_proj"),
    "to the attention alone": missing("mlp"),
    "to the feed-forward networks alone": missing("self_attn"),
    "to all but the fused queries": missing("q_proj"),
    "scaled twice": lambda n, a, b, s: (n, a, b, s * s),
    "not scaled": lambda n, a, b, s: (n, a, b, 1.0),
    "scaled by alpha": lambda n, a, b, s: (n, a, b, ALPHA),
    "scaled as rslora": lambda n, a, b, s: (n, a, b, ALPHA / RANK**0.5),
    "scaled by a tenth more": lambda n, a, b, s: (n, a, b, 1.1 * s),
    "subtracted": lambda n, a, b, s: (n, a, b, -s),
    "A transposed": lambda n, a, b, s: (n, a.T.reshape(a.shape), b, s),
    "B transposed": lambda n, a, b, s: (n, a, b.T.reshape(b.shape), s),
    "ranks in another order": lambda n, a, b, s: (n, a.flip(0), b, s),
    "heads in another order": lambda n, a, b, s: (n, a, b.roll(16, 0) if "q_proj" in n else b, s),
    "A of the last version": lambda n, a, b, s: (n, torch.zeros_like(a), b, s),
    "B of the last version": lambda n, a, b, s: (n, a, torch.zeros_like(b), s),
    "a rank left out": lambda n, a, b, s: (n, a[1:], b[:, 1:], s),
    "layers in another order": swapped("layers.0.", "layers.1."),
    "keys and values swapped": swapped("k_proj", "v_proj"),
    "gate and up swapped": swapped("gate_proj", "up_proj"),
}


@contextmanager
def applying(change, monkeypatch):
    """Make the generator apply adapters that are changed on the way."""
    original = Base.apply

    def apply(self, tensors, info):
        pairs = {}
        for name, tensor in tensors:
            module, _, end = name.rpartition(".lora_")
            pairs.setdefault(module, {})[end[0]] = tensor
        for module, both in pairs.items():
            found = change(module, both["A"], both["B"], info.scaling)
            if found is not None:
                name, a, b, scaling = found
                full = AdapterInfo(len(a), len(a) * scaling)
                yield_ = [(f"{name}.lora_A.weight", a), (f"{name}.lora_B.weight", b)]
                changed.setdefault((full.rank, full.alpha), []).extend(yield_)
        for (rank, alpha), sent in changed.items():
            original(self, sent, AdapterInfo(rank, alpha))
        changed.clear()

    changed = {}
    with monkeypatch.context() as patched:
        patched.setattr(Base, "apply", apply)
        yield


@pytest.mark.parametrize("mistake", MISTAKES)
def test_an_engine_that_applies_it_wrongly_is_refused_before_the_first_step(ends, monkeypatch, mistake):
    sync, probe = ends.sync()
    with (
        applying(MISTAKES[mistake], monkeypatch),
        pytest.raises(WeightSyncError, match="replica 0 of the generator does"),
    ):
        sync(version=0)
    assert probe.trial, "it has to pass a trial yet"
    sync(version=0)  # without the mistake
    assert not probe.trial


def added(calls, old, new):
    return {n: torch.cat([old[n], t], int("lora_B" in n)) for n, t in new.items()} if calls else new


LATER = {
    "the trial adapter stays": lambda calls, old, new: old if calls else new,
    "adapters add up": added,
    "only A is new": lambda calls, old, new: {n: old[n] if calls and "lora_B" in n else t for n, t in new.items()},
    "one layer stays": lambda calls, old, new: {n: old[n] if calls and "layers.1" in n else t for n, t in new.items()},
}


@pytest.mark.parametrize("mistake", LATER)
def test_an_engine_that_takes_the_trial_and_not_what_follows_is_refused(ends, monkeypatch, mistake):
    original, calls, taken = Base.apply, [], {}

    def apply(self, tensors, info):
        sent = {name: tensor.clone() for name, tensor in tensors}
        found = LATER[mistake](len(calls), dict(taken), sent)
        calls.append(1)
        taken.update(sent)
        rank = len(next(iter(found.values())))
        original(self, found.items(), AdapterInfo(rank, rank * info.scaling))

    sync, probe = ends.sync()
    with monkeypatch.context() as patched:
        patched.setattr(Base, "apply", apply)
        with pytest.raises(WeightSyncError, match="replica 0 of the generator does not compute"):
            sync(version=0)
    assert len(calls) == 2
    assert not probe.trial
    sync(version=0)


@pytest.mark.parametrize("name", ["q_proj", "layers.1.", "down_proj"])
def test_an_engine_that_keeps_merged_weights_is_refused_before_the_first_step(ends, monkeypatch, name):
    from whet_hf import own

    def take(model, weights, stored):
        kept = {n: p.clone() for n, p in model.named_parameters() if name in n}
        take_weights(model, ((n, kept.get(n, tensor)) for n, tensor in weights), stored)

    take_weights = own.take_weights
    sync, _ = ends.sync("merged")
    with monkeypatch.context() as patched:
        patched.setattr(own, "take_weights", take)
        with pytest.raises(WeightSyncError, match="replica 0 of the generator does"):
            sync(version=0)
    sync(version=0)


def test_an_adapter_alone_is_refused_by_a_generator_that_got_all_weights(ends):
    ends.sync("merged")[0](version=0)
    ends.generators["both"] = ends.generators["merged"]
    way, _ = ends.sync()
    way._generator = ends.generators["both"]
    with pytest.raises(Exception, match="its base is not known any more"):
        way(version=0)
    ends.sync("merged")[0](version=0)
