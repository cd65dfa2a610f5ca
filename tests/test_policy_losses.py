"""On a real model, each loss of a policy has one value, one gradient and one set of metrics, however it is computed."""

from typing import Any

import numpy as np
import pytest
from attrs import evolve

from whet.component import Selection
from whet.config.build import to_spec
from whet.config.structure import structure
from whet.data.batch import Batch, concatenate
from whet.plugins.registry import load_plugins
from whet.runtime.local import LocalCluster
from whet_fsdp2.backend import Fsdp2Backend
from whet_fsdp2.config import Fsdp2Config, OptimizerConfig
from whet_fsdp2.parallel import ParallelConfig
from whet_ops.algorithms.config import CorrectionSection, CovarianceSection, TopEntropySection
from whet_ops.algorithms.policy_steps import correct_gap, keep_uncertain, scored, treat_covariance, with_correction
from whet_testing.batches import random_batch
from whet_testing.role_context import make_context

PENALTY = {"weight": 0.1, "importance": "ratio"}
LOSSES: list[dict[str, Any]] = [
    {"use": "clipped-pg", "clip_dual": 3.0},
    {"use": "clipped-pg", "aggregation": "sequence", "kl": PENALTY, "entropy_weight": 0.1, "entropy_mean": "token"},
    {"use": "gspo", "clip_low": 0.2, "clip_high": 0.2},
    {"use": "gspo", "level": "token", "clip_low": 0.2, "clip_high": 0.2, "aggregation": "constant", "max_length": 9},
    {"use": "cispo", "kl": {"weight": 0.1, "straight_through": True}},
    {"use": "reinforce", "aggregation": "constant", "max_length": 9, "count_empty": True},
    {"use": "gmpo", "kl": {"weight": 0.1, "importance": "sampler"}},
    {"use": "sapo", "off_policy": {"threshold": 0.02}, "likelihood": {"weight": 0.2, "at_least": 0.0}},
    {"use": "clipped-pg", "aggregation": "sequence", "count_empty": True, "count_masked": False},
    {"use": "vespo", "decay_positive": 1.0, "kl": PENALTY},
    {"use": "dppo", "bound_low": 0.05, "bound_high": 0.05, "aggregation": "sequence"},
    {"use": "dppo", "divergence": "kl", "bound_low": 0.01, "bound_high": 0.01, "max_weight": 1.1},
    {"use": "ppo-clip", "kl": PENALTY, "likelihood": {"weight": 0.2, "at_least": 0.0}},
]
COLUMNS = ("advantages", "old_logprobs", "sampler_logprobs", "reference_logprobs")


def spec(document: dict[str, Any]) -> Any:
    registry = load_plugins()
    offer = registry.find("losses", document["use"])
    keys = {key: value for key, value in document.items() if key != "use"}
    config: Any = structure(keys, offer.component.config, registry)
    return to_spec(Selection("losses", offer.component, config, offer.distribution))


def batch_for(number: int, backend: Fsdp2Backend) -> Batch:
    """Return a batch near the policy, one sequence of it all masked; every other one with advantages of tokens."""
    batch = random_batch(number, columns=(*COLUMNS, "reward", "version"), vocabulary=200)
    scores = backend.score(batch, ("logprobs",))["logprobs"]
    draw = np.random.default_rng(number)
    for name in COLUMNS[1:]:
        noise = np.where(batch["loss_mask"], 0.3 * draw.normal(size=batch.tokens), 0)
        batch = batch.with_columns(**{name: (scores + noise).astype(np.float32)})
    hidden = np.repeat(np.arange(batch.sequences) == 5, batch["lengths"])
    batch = batch.with_columns(loss_mask=batch["loss_mask"] & ~hidden)
    token_wise = CorrectionSection(weights="token", max_token_gap=1.0)
    return correct_gap(batch, token_wise)[0] if number % 2 else batch


def numbers(found: Any) -> dict[str, float]:
    left_out = ("seconds/", "memory/", "tokens")
    return {name: metric.number() for name, metric in found.items() if not name.startswith(left_out)}


@pytest.fixture
def build(tmp_path: Any, tiny_model_folder: Any) -> Any:
    """Return a function that builds a backend on ranks of its own, or on one in this process."""
    built: list[Any] = []
    with LocalCluster(tmp_path / "logs") as cluster:

        def make(ranks: int = 1, parallel: dict[str, int] | None = None, **config: Any) -> Fsdp2Backend:
            config["parallel"] = ParallelConfig(**parallel or {})
            place = cluster.worker_group("backend", ranks) if ranks > 1 else None
            context = make_context(tmp_path / str(len(built)), "backend", tiny_model_folder, place)
            built.append(Fsdp2Backend(Fsdp2Config(optimizer=OptimizerConfig(lr=1e-3), **config), context))
            return built[-1]

        yield make
        for backend in built:
            backend.close()


@pytest.mark.parametrize(
    "other",
    [
        {"layout": "packed", "micro_batch_tokens": 30},
        {"layout": "padded", "micro_batch_tokens": 25},
        pytest.param({"ranks": 2, "micro_batch_tokens": 40}, marks=pytest.mark.slow),
        pytest.param({"ranks": 2, "parallel": {"tensor": 2}, "micro_batch_tokens": 40}, marks=pytest.mark.slow),
        pytest.param({"ranks": 4, "parallel": {"context": 2}, "micro_batch_tokens": 40}, marks=pytest.mark.slow),
    ],
    ids=["packed", "padded", "two-ranks", "tensor-parallel", "context-parallel"],
)
def test_value_gradient_and_metrics_do_not_depend_on_layout_order_and_ranks(build: Any, other: dict[str, Any]) -> None:
    whole, cut = build(layout="shared"), build(**other)
    for number, document in enumerate(LOSSES):
        of_sequences = document["use"] in ("gmpo", "vespo") or (document["use"] == "gspo" and "level" not in document)
        batch, loss = batch_for(2 if of_sequences else number, whole), spec(document)
        expected = numbers(whole.train(batch, loss))
        shuffled = concatenate(batch.split(len(batch.units()), seed=number))
        found = numbers(cut.train(shuffled, loss))
        assert found == pytest.approx(expected, rel=2e-4, abs=2e-5), document
        assert expected["grad_norm"] > 1e-3
    batch = batch_for(0, whole)
    alone = np.where(np.arange(batch.sequences) == 0, batch["advantages"], 0).astype(np.float32)
    batch, loss = batch.with_columns(advantages=alone), spec(LOSSES[0])
    expected, found = (numbers(backend.train(batch, loss)) for backend in (whole, cut))
    assert found == pytest.approx(expected, rel=2e-4, abs=2e-5), "one sequence alone has a gradient"


CORRECTIONS = [
    CorrectionSection(weights="token", cap=1.1),
    CorrectionSection(weights="token", mask="sequence", low=0.9, high=1.05),
    CorrectionSection(mask="token", low=0.8, high=1.2),
    CorrectionSection(mask="worst", measure="k3", high=0.02),
]


@pytest.mark.parametrize("section", CORRECTIONS)
def test_a_correction_within_the_training_pass_gives_what_one_before_it_gives(
    build: Any, section: CorrectionSection
) -> None:
    one, other = build(layout="shared"), build(layout="packed", micro_batch_tokens=40)
    loss = spec({"use": "clipped-pg", "aggregation": "sequence"})
    batch = batch_for(0, one)
    batch = evolve(batch, per_token={n: column for n, column in batch.per_token.items() if n != "old_logprobs"})
    scored = batch.with_columns(old_logprobs=one.score(batch, ("logprobs",))["logprobs"])
    corrected, before = correct_gap(scored, section)
    expected, found = numbers(one.train(corrected, loss)), numbers(other.train(batch, with_correction(loss, section)))
    for name in ("loss", "grad_norm"):
        assert found[name] == pytest.approx(expected[name], rel=2e-4)
    assert expected["grad_norm"] != pytest.approx(numbers(build().train(batch, loss))["grad_norm"], rel=1e-2)
    assert before.keys() <= found.keys()


@pytest.mark.parametrize(
    "other",
    [
        {"layout": "packed", "micro_batch_tokens": 30},
        pytest.param({"ranks": 2, "micro_batch_tokens": 40}, marks=pytest.mark.slow),
    ],
    ids=["packed", "two-ranks"],
)
def test_the_tokens_of_high_entropy_do_not_depend_on_layout_order_and_ranks(build: Any, other: dict[str, Any]) -> None:
    whole, cut = build(layout="shared"), build(**other)
    batch, loss = batch_for(2, whole), spec({"use": "clipped-pg"})
    batch = batch.with_columns(position=np.arange(batch.sequences))
    shuffled = concatenate(batch.split(len(batch.units()), seed=3))
    section = TopEntropySection(share=0.3)
    expected, about = keep_uncertain(batch, whole, section)
    found, others = keep_uncertain(shuffled, cut, section)
    order = np.argsort(found["position"])
    np.testing.assert_array_equal(found.take(order)["advantages"], expected["advantages"])
    assert numbers(others) == pytest.approx(numbers(about), rel=1e-4)
    kept = (expected["advantages"] != 0).sum()
    assert 0 < kept <= np.ceil(0.3 * batch["loss_mask"].sum())
    trained = numbers(whole.train(expected, loss)), numbers(cut.train(found, loss))
    assert trained[0] == pytest.approx(trained[1], rel=2e-4, abs=2e-5)


@pytest.mark.parametrize(
    "section",
    [
        CovarianceSection(method="clip-cov", share=0.2, low=0.01, high=9.0),
        CovarianceSection(method="kl-cov", share=0.2, weight=0.5),
    ],
    ids=["clip-cov", "kl-cov"],
)
@pytest.mark.parametrize(
    "other",
    [
        {"layout": "packed", "micro_batch_tokens": 30},
        pytest.param({"ranks": 2, "micro_batch_tokens": 40}, marks=pytest.mark.slow),
    ],
    ids=["packed", "two-ranks"],
)
def test_the_tokens_of_large_covariance_do_not_depend_on_layout_order_and_ranks(
    build: Any, other: dict[str, Any], section: CovarianceSection
) -> None:
    whole, cut = build(layout="shared"), build(**other)
    loss = spec({"use": "clipped-pg", "aggregation": "sequence"})
    batch = batch_for(2, whole).with_columns(position=np.arange(12))
    shuffled = concatenate(batch.split(len(batch.units()), seed=3))
    first, again = (
        treat_covariance(scored(given, backend, "score", False), section, 5)
        for given, backend in ((batch, whole), (shuffled, cut))
    )
    order, column = np.argsort(again[0]["position"]), "advantages" if section.method == "clip-cov" else "old_kl_weight"
    np.testing.assert_array_equal(again[0].take(order)[column], first[0][column])
    assert numbers(again[1]) == pytest.approx(numbers(first[1]), rel=1e-4)
    assert 0 < first[1]["covariance/share"].number() <= 0.2
    for _ in range(2):  # at the second step the policy has left the old one
        expected, found = (
            numbers(backend.train(given, loss)) for backend, given in ((whole, first[0]), (cut, again[0]))
        )
        assert found == pytest.approx(expected, rel=5e-4, abs=5e-5)
    plain = batch.with_columns(old_logprobs=first[0]["old_logprobs"])
    treated, untreated = (numbers(whole.evaluate(given, loss))["loss"] for given in (first[0], plain))
    assert treated != pytest.approx(untreated)
