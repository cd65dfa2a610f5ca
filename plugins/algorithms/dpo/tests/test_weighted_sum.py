"""Sums of losses: their terms by themselves, weighted, and what `whet check` says of terms that do not go together."""

from types import SimpleNamespace
from typing import Any

import attrs
import numpy as np
import pytest
import torch

from whet.component import LossFacts, resolve
from whet.config.build import build, to_spec
from whet.config.structure import structure
from whet.data.model_info import ModelInfo
from whet.errors import ConfigError
from whet.plan.plan import facts_of
from whet.plugins.registry import Registry, load_plugins
from whet_dpo.config import DpoConfig, KtoConfig, dpo_facts
from whet_dpo.hooks import whet_check_config
from whet_testing.batches import random_batch

MPO = [
    {"use": "dpo", "beta": 0.2, "sft": {"weight": 0.5}, "weight": 0.8},
    {"use": "bco-pair", "shift": "none", "weight": 0.2},
    {"use": "sft", "average": "sequence"},
]


@pytest.fixture(scope="module")
def registry() -> Registry:
    return load_plugins()


def section(registry: Registry, terms: list[Any], algorithm: type = DpoConfig) -> Any:
    return structure({"loss": {"use": "weighted-sum", "terms": terms}}, algorithm, registry)


def result(registry: Registry, document: Any, seed: int = 0) -> Any:
    """Return value, gradient and metrics of a loss, built as a worker builds it."""
    loss = build(to_spec(structure({"loss": document}, DpoConfig, registry).loss))
    batch = random_batch(seed, columns=("chosen", "reference_logprobs"), unit_size=2)
    torched = batch.map(torch.from_numpy)
    rng = np.random.default_rng(seed)
    logprobs = np.where(batch["loss_mask"], -rng.exponential(size=batch.tokens), 0).astype(np.float32)
    logprobs = torch.from_numpy(logprobs).requires_grad_()
    found, counts = loss({"logprobs": logprobs}, torched), loss.counts(torched)
    value = sum(loss.weights[name] * term / counts[name] for name, term in found.terms.items())
    (gradient,) = torch.autograd.grad(value, logprobs)
    return float(value.detach()), gradient.numpy(), {name: metric.number() for name, metric in found.metrics.items()}


def test_value_and_gradient_are_the_weighted_sum_of_the_terms(registry: Registry) -> None:
    value, gradient, metrics = result(registry, {"use": "weighted-sum", "terms": MPO})
    apart = [result(registry, {key: item for key, item in term.items() if key != "weight"}) for term in MPO]
    weights = [0.8, 0.2, 1.0]
    assert value == pytest.approx(sum(w * one[0] for w, one in zip(weights, apart, strict=True)), rel=1e-6)
    wanted = sum(w * one[1] for w, one in zip(weights, apart, strict=True))
    np.testing.assert_allclose(gradient, wanted, rtol=1e-5, atol=1e-8)
    for term, one in zip(MPO, apart, strict=True):
        for name, number in one[2].items():
            assert metrics[f"{term['use']}/{name}"] == number
    assert {name: metrics[name] for name in apart[0][2]} == apart[0][2], "those of the first stand by themselves, too"
    assert metrics["dpo/preference"] + 0.5 * metrics["dpo/sft"] == pytest.approx(apart[0][0], rel=1e-6)
    assert metrics["sft/sft"] == pytest.approx(apart[2][0], rel=1e-6)
    assert set(metrics) == set(apart[0][2]) | {
        f"{term['use']}/{name}" for term, one in zip(MPO, apart, strict=True) for name in one[2]
    } | {"dpo/preference", "dpo/sft", "bco-pair/preference", "sft/sft"}  # fmt: skip


def test_by_default_it_is_mpo(registry: Registry) -> None:
    loss = structure({"loss": "weighted-sum"}, DpoConfig, registry).loss
    terms = [(term.label, term.weight) for term in loss.config.terms]
    assert terms == [("dpo", 0.8), ("bco-pair", 0.2), ("sft", 1.0)]
    assert loss.config.terms[1].component.config.shift == "running"


def test_sums_may_hold_sums(registry: Registry) -> None:
    inner = {"use": "weighted-sum", "name": "inner", "weight": 0.5, "terms": MPO[1:]}
    value, gradient, metrics = result(registry, {"use": "weighted-sum", "terms": [MPO[0], inner]})
    flat = [MPO[0], {**MPO[1], "weight": 0.1}, {**MPO[2], "weight": 0.5}]
    other, slope, _ = result(registry, {"use": "weighted-sum", "terms": flat})
    assert value == pytest.approx(other, rel=1e-6)
    np.testing.assert_allclose(gradient, slope, rtol=1e-5, atol=1e-8)
    assert "inner/bco-pair/rewards/margins" in metrics


def test_a_likelihood_of_responses_learns_no_prompt_beside_one_that_does(registry: Registry) -> None:
    chosen = section(registry, [{"use": "sft", "of": "conversation", "name": "whole"}, {"use": "sft"}]).loss
    loss = resolve(chosen.component.target)(chosen.config)
    batch = random_batch(1, columns=("chosen",), unit_size=2)
    lengths = batch["lengths"]
    place = np.arange(batch.tokens) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    whole = batch["loss_mask"] | (np.repeat(batch["chosen"], lengths) & (place > 0))
    taught = batch.with_columns(response_mask=batch["loss_mask"], loss_mask=whole).map(torch.from_numpy)
    counts = {name: int(count) for name, count in loss.counts(taught).items()}
    chosen_tokens = np.repeat(batch["chosen"], lengths)
    assert counts == {
        "whole/sft": int((whole & chosen_tokens).sum()), "sft/sft": int((batch["loss_mask"] & chosen_tokens).sum()),
    }  # fmt: skip


def test_what_terms_need_the_sum_needs(registry: Registry) -> None:
    model = ModelInfo("", {})
    loss = section(registry, [{"use": "bco-pair"}, {"use": "aot"}, {"use": "sft", "of": "conversation"}]).loss
    wanted = {"chosen", "reference_logprobs", "score_shift", "margin_shift", "response_mask"}
    assert facts_of(loss, model, LossFacts).columns_read == wanted
    assert wanted <= dpo_facts(attrs.evolve(DpoConfig(), loss=loss), model).columns_written
    free = section(registry, [{"use": "simpo"}, {"use": "sft"}]).loss
    assert "reference_logprobs" not in dpo_facts(DpoConfig(loss=free), model).columns_written


@pytest.mark.parametrize(
    ("terms", "complaint"),
    [
        ([], "has no terms; list at least one"),
        ([{"use": "dpo"}, {"use": "dpo", "beta": 0.5}], "has 2 terms named 'dpo'; set `name` of all but one"),
        ([{"use": "dpo", "weight": -1}], "-1"),
        ([{"use": "dpoo"}], "dpo"),
        ([{"weight": 1.0}], "missing `use:`"),
    ],
)
def test_sums_that_say_nothing_or_the_same_are_refused(registry: Registry, terms: Any, complaint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        section(registry, terms)
    assert complaint in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "loss", "complaint"),
    [
        (
            DpoConfig,
            [{"use": "bco-pair"}, {"use": "bco-pair", "name": "again", "beta": 0.5}],
            "algorithm.loss.terms.1: reads the column 'score_shift', which holds what algorithm.loss.terms.0 compares",
        ),
        (
            DpoConfig,
            [{"use": "dpo"}, {"use": "nll"}],
            "algorithm.loss.terms.1: reads no 'chosen', so it would learn all responses alike; for the likelihood of",
        ),
        (KtoConfig, [{"use": "kto"}, {"use": "sft"}], "algorithm.loss.terms.1: reads no 'desirable'"),
        (
            DpoConfig,
            [{"use": "dpo", "sft": {"of": "conversation"}}],
            "algorithm.loss.terms.0.sft.of: has no effect without a likelihood term",
        ),
        (
            DpoConfig,
            {"use": "hinge", "divergence_alpha": 0.2},
            "algorithm.loss.divergence_alpha: has no effect on the divergence reverse-kl; set algorithm.loss",
        ),
        (
            DpoConfig,
            {"use": "bco-pair", "shift": "none", "shift_mean": "responses"},
            "algorithm.loss.shift_mean: has no effect without a shift",
        ),
        (
            DpoConfig,
            {"use": "cpo", "loss_type": "hinge", "label_smoothing": 0.1},
            "algorithm.loss.label_smoothing: has no effect on the loss_type hinge; set algorithm.loss.loss_type: sigm",
        ),
        (DpoConfig, {"use": "dpo", "divergence": "alpha", "divergence_alpha": 0.2}, ""),
        (DpoConfig, [{"use": "bco-pair", "shift": "none"}, {"use": "bco-pair", "name": "again"}], ""),
        (KtoConfig, [{"use": "kto"}, {"use": "bco"}], ""),
    ],
)
def test_keys_without_effect_and_terms_that_do_not_go_together_are_found(
    registry: Registry, kind: type, loss: Any, complaint: str
) -> None:
    document = {"loss": {"use": "weighted-sum", "terms": loss} if isinstance(loss, list) else loss}
    config: Any = SimpleNamespace(
        algorithm=SimpleNamespace(config=structure(document, kind, registry)), model=SimpleNamespace(path="")
    )
    found = [str(problem) for problem in whet_check_config(config)]
    assert len(found) == bool(complaint)
    assert all(complaint in one for one in found)
