"""What losses know of the whole batch: against sorts and means over all of it, written out in float64."""

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from whet.component import Selection, resolve
from whet.data.batch import Batch, concatenate, from_sequences
from whet.errors import CheckpointError
from whet_dpo.hooks import whet_losses
from whet_dpo.running import RunningTally, Tally
from whet_dpo.whole import WholeBatch
from whet_dpo.whole_config import MARGIN_SHIFT, MATCHED, SHIFT, SumTerm, WeightedSumConfig

LENGTHS = ((3, 5), (1, 2), (6, 6), (4, 0), (2, 3), (0, 0), (5, 1))
"""Tokens to learn of each pair's responses: one response has none, and one pair."""
BETA = 0.4


def chosen_loss(use: str, **keys: Any) -> Selection:
    component = next(component for component in whet_losses() if component.name == use)
    return Selection("losses", component, component.config(**keys))


def pairs(**columns: Any) -> tuple[Batch, Any]:
    """Make pairs with a reference, and logprobs of the policy [N]."""
    rng, rows = np.random.default_rng(3), []
    for pair in LENGTHS:
        for length in pair:
            mask = np.array([False, *[True] * length, False])
            logprobs = np.where(mask, -rng.exponential(2.0, len(mask)), 0).astype(np.float32)
            policy = np.where(mask, -rng.exponential(2.0, len(mask)), 0).astype(np.float32)
            rows.append(
                {"tokens": np.arange(len(mask)), "loss_mask": mask, "reference_logprobs": logprobs, "now": policy}
            )
    units = [unit for unit in range(len(LENGTHS)) for _ in range(2)]
    batch = from_sequences(rows, prompt_lengths=[1] * len(rows), unit=units)
    return batch.with_columns(chosen=np.array([True, False] * len(LENGTHS)), **columns), batch["now"]


def whole(loss: Selection, policy: Any, folder: Any = "nowhere", done: int = 0) -> WholeBatch:
    """Make what adds the columns, with a backend that gives these logprobs, or those in the column `now`."""
    backend = SimpleNamespace(score=lambda batch, outputs: {"logprobs": batch["now"] if policy is None else policy})
    parts: Any = SimpleNamespace(
        backend=backend,
        steps=SimpleNamespace(done=done),
        config=SimpleNamespace(run=SimpleNamespace(folder=str(folder))),
    )
    return WholeBatch(parts, loss)


def objective(loss: Selection, batch: Batch, policy: Any, counts: Any = None) -> tuple[float, Any, dict[str, float]]:
    made = resolve(loss.component.target)(loss.config)
    torched = batch.map(torch.from_numpy)
    logprobs = torch.from_numpy(np.asarray(policy, np.float32)).requires_grad_()
    result = made({"logprobs": logprobs}, torched)
    counts = counts or made.counts(torched)
    value = sum(made.weights[name] * term / counts[name] for name, term in result.terms.items())
    (gradient,) = torch.autograd.grad(value, logprobs)
    metrics = {name: metric.number() for name, metric in result.metrics.items()}
    return float(value.detach()), gradient.numpy(), metrics


def sums(batch: Batch, logprobs: Any) -> Any:
    """Sum the trained logprobs of each sequence: [B] float64."""
    ends = np.cumsum(batch["lengths"])
    masked = np.where(batch["loss_mask"], np.asarray(logprobs, np.float64), 0)
    return np.array([masked[end - length : end].sum() for end, length in zip(ends, batch["lengths"], strict=True)])


def log_loss(apart: Any, smoothing: float = 0.0) -> Any:
    return (1 - smoothing) * np.logaddexp(0, -BETA * apart) + smoothing * np.logaddexp(0, BETA * apart)


def kept() -> tuple[Any, Any]:
    """Return the sequences of pairs with a token to learn, chosen and rejected."""
    alive = [2 * unit for unit, pair in enumerate(LENGTHS) if sum(pair)]
    return np.array(alive), np.array(alive) + 1


def sorted_pairs(batch: Batch, policy: Any) -> float:
    """AOT on pairs, as the paper has it: both lists of log-ratios sorted, compared rank by rank."""
    chosen, rejected = kept()
    lists = [
        np.sort(of[chosen] - of[rejected]) for of in (sums(batch, policy), sums(batch, batch["reference_logprobs"]))
    ]
    return float(log_loss(lists[0] - lists[1], 0.1).mean())


def sorted_apart(batch: Batch, policy: Any) -> float:
    """AOT of two sets: chosen and rejected scores sorted, compared rank by rank."""
    scores = sums(batch, policy) - sums(batch, batch["reference_logprobs"])
    chosen, rejected = (np.sort(scores[of]) for of in kept())
    return float(log_loss(chosen - rejected, 0.1).mean())


SORTS = {"aot": sorted_pairs, "aot-unpaired": sorted_apart}


@pytest.mark.parametrize("use", SORTS)
def test_value_and_gradient_are_those_of_the_sorted_sum(use: str) -> None:
    batch, policy = pairs()
    loss = chosen_loss(use, beta=BETA, label_smoothing=0.1)
    value, gradient, _ = objective(loss, whole(loss, policy)(batch), policy)
    assert value == pytest.approx(SORTS[use](batch, policy), rel=1e-5)
    for at in np.flatnonzero(batch["loss_mask"]):
        up, down = np.asarray(policy, np.float64).copy(), np.asarray(policy, np.float64).copy()
        up[at] += 1e-5
        down[at] -= 1e-5
        slope = (SORTS[use](batch, up) - SORTS[use](batch, down)) / 2e-5
        assert gradient[at] == pytest.approx(slope, rel=1e-4, abs=1e-7)
    assert not gradient[~batch["loss_mask"]].any()


@pytest.mark.parametrize("use", [*SORTS, "bco-pair"])
@pytest.mark.parametrize("parts", [2, 7])
def test_it_is_the_batch_of_the_step_that_counts_however_it_is_cut(use: str, parts: int) -> None:
    batch, policy = pairs()
    loss = chosen_loss(use)
    prepared = whole(loss, policy)(batch).with_columns(place=np.arange(batch.tokens))
    value, gradient, _ = objective(loss, prepared, policy)
    counts = resolve(loss.component.target)(loss.config).counts(prepared.map(torch.from_numpy))
    total, found = 0.0, np.zeros_like(gradient)
    for part in prepared.split(parts, seed=5):
        one, slope, _ = objective(loss, part, part["now"], counts)
        total += one
        found[part["place"]] = slope
    assert total == pytest.approx(value, rel=1e-5)
    np.testing.assert_allclose(found, gradient, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("use", [*SORTS, "bco-pair"])
def test_the_order_of_the_batch_does_not_matter(use: str) -> None:
    batch, policy = pairs()
    loss = chosen_loss(use)
    shuffled = concatenate(batch.split(len(LENGTHS), seed=2))
    one = objective(loss, whole(loss, None)(batch), policy)[0]
    other = objective(loss, whole(loss, None)(shuffled), shuffled["now"])[0]
    assert other == pytest.approx(one, rel=1e-6)


def hand_worked() -> Batch:
    """Two pairs of one token each: of policy and reference 3 and 1, 0 and 2; 1 and 0, 0 and 0."""
    policy, reference = [3.0, 0.0, 1.0, 0.0], [1.0, 2.0, 0.0, 0.0]
    rows = [
        {
            "tokens": np.arange(2), "loss_mask": np.array([False, True]),
            "now": np.array([0, one], np.float32), "reference_logprobs": np.array([0, other], np.float32),
        }
        for one, other in zip(policy, reference, strict=True)
    ]  # fmt: skip
    batch = from_sequences(rows, prompt_lengths=[1] * 4, unit=[0, 0, 1, 1])
    return batch.with_columns(chosen=np.array([True, False, True, False]))


def test_a_hand_worked_batch() -> None:
    batch = hand_worked()
    # log-ratios of the policy 3, 1, of the reference -1, 0: the larger faces the larger, 3 - 0 and 1 - (-1)
    assert whole(chosen_loss("aot"), None)(batch)[MARGIN_SHIFT].tolist() == [-1, -1, 1, 1]
    assert objective(chosen_loss("aot", beta=1.0), whole(chosen_loss("aot"), None)(batch), batch["now"])[0] == (
        pytest.approx((0.0485874 + 0.1269280) / 2, abs=1e-6)
    )
    # scores of chosen responses 2, 1, of rejected ones -2, 0: 2 faces 0, and 1 faces -2
    found = whole(chosen_loss("aot-unpaired"), None)(batch)
    assert found[MATCHED].tolist() == [0, 1, -2, 2]
    assert objective(chosen_loss("aot-unpaired", beta=1.0), found, batch["now"])[0] == (
        pytest.approx((0.1269280 + 0.0485874) / 2, abs=1e-6)
    )
    # means 1.5 and -1: the shift is 0.25, and the scores are 1.75, -2.25, 0.75 and -0.25 from it
    found = whole(chosen_loss("bco-pair"), None)(batch)
    assert found[SHIFT].tolist() == [0.25] * 4
    value, _, metrics = objective(chosen_loss("bco-pair", beta=1.0), found, batch["now"])
    assert value == pytest.approx((0.1602242 + 0.1002066 + 0.3868710 + 0.5759394) / 2, abs=1e-6)
    assert metrics[SHIFT] == 0.25


def test_a_mean_over_kinds_is_not_the_mean_over_responses() -> None:
    tally = Tally((6.0, -1.0), (3, 1))
    assert (tally.mean("kinds"), tally.mean("responses")) == (0.5, 1.25)
    assert Tally((6.0, 0.0), (3, 0)).mean("kinds") == 2.0
    assert Tally().mean("kinds") == Tally().mean("responses") == 0.0


def labelled(desirable: list[float], others: list[float]) -> Batch:
    """Make single responses of one token with these scores."""
    scores = [*desirable, *others]
    rows = [
        {
            "tokens": np.arange(2), "loss_mask": np.array([False, True]),
            "now": np.array([0, score], np.float32), "reference_logprobs": np.zeros(2, np.float32),
        }
        for score in scores
    ]  # fmt: skip
    batch = from_sequences(rows, prompt_lengths=[1] * len(rows))
    return batch.with_columns(desirable=np.arange(len(scores)) < len(desirable))


GAVE = (
    (
        ([1.5, -0.5, 2.0], [-1.0, 0.25]),
        0.6087828,
        0.1350000,
        [-0.0253137, -0.0342463, -0.0231480, 0.0235760, 0.0291003],
    ),
    (([0.5], [1.25, -2.0, 3.0]), 0.7528451, 0.1666667, [-0.0378125, 0.0413922, 0.0237900, 0.0506652]),
)
"""Two batches in a row, as scores of desirable responses and others, and what `BCOTrainer.bco_loss` of TRL 0.21
computes from them with its `RunningMoments` and beta 0.3: loss, delta, and gradient by the scores.
"""


def test_a_running_mean_gives_the_numbers_of_trls_bco_trainer(tmp_path: Any) -> None:
    loss = chosen_loss("bco", beta=0.3, shift="running", shift_mean="responses")
    prepare = whole(loss, None, tmp_path)
    for step, (scores, value, delta, slope) in enumerate(GAVE, 1):
        batch = prepare(labelled(*scores), step)
        found, gradient, metrics = objective(loss, batch, batch["now"])
        assert found == pytest.approx(value, abs=1e-6)
        assert gradient[1::2].tolist() == pytest.approx(slope, abs=1e-6)
        assert 0.3 * metrics[SHIFT] == pytest.approx(delta, abs=1e-6)


def test_a_resume_goes_on_with_the_mean_of_its_checkpoint_bit_for_bit(tmp_path: Any) -> None:
    loss = chosen_loss("bco", shift="running")
    rng = np.random.default_rng(1)
    batches = [labelled(rng.normal(size=3).tolist(), rng.normal(size=2).tolist()) for _ in range(6)]
    first = whole(loss, None, tmp_path / "one")
    expected = [first(batch, step)[SHIFT][0] for step, batch in enumerate(batches, 1)]
    before = whole(loss, None, tmp_path / "other")
    found = [before(batch, step)[SHIFT][0] for step, batch in enumerate(batches[:4], 1)]
    with (tmp_path / "other" / "score-shift.jsonl").open("a") as file:
        file.write('{"step": 5, "sums": [1.')  # killed as it was written
    after = whole(loss, None, tmp_path / "other", done=2)
    found[2:] = [after(batch, step)[SHIFT][0] for step, batch in enumerate(batches[2:], 3)]
    assert found == expected
    later = whole(loss, None, tmp_path / "other", done=3)
    assert later(batches[3], 4)[SHIFT][0] == expected[3]


def test_validation_is_compared_with_the_mean_so_far_and_does_not_move_it(tmp_path: Any) -> None:
    prepare = whole(chosen_loss("bco", shift="running"), None, tmp_path)
    assert prepare(labelled([4.0], [8.0]))[SHIFT][0] == 0
    assert prepare(labelled([1.0], [2.0]), 1)[SHIFT][0] == 1.5
    assert prepare(labelled([4.0], [8.0]))[SHIFT][0] == 1.5
    rows = [json.loads(line) for line in (tmp_path / "score-shift.jsonl").read_text().splitlines()]
    assert rows == [{"step": 1, "sums": [1.0, 2.0], "counts": [1, 1]}]


def test_a_mean_that_is_gone_is_told_rather_than_begun_anew(tmp_path: Any) -> None:
    with pytest.raises(CheckpointError, match=r"score-shift.jsonl has no line of step 3.*shift: running"):
        RunningTally(str(tmp_path), 3).add(Tally(), 4)


@pytest.mark.parametrize("use", ["dpo", "sft", "nca-pair"])
def test_losses_that_read_nothing_of_the_whole_batch_have_nothing_scored(use: str) -> None:
    batch, _ = pairs()
    broken = SimpleNamespace(score=lambda *_: pytest.fail("scored"))
    parts: Any = SimpleNamespace(backend=broken, steps=SimpleNamespace(done=0))
    assert WholeBatch(parts, chosen_loss(use))(batch) is batch


def test_terms_of_a_sum_have_their_columns_by_their_own_settings() -> None:
    batch, policy = pairs()
    terms = [chosen_loss("aot", average_logprobs=True), chosen_loss("bco-pair", ld_alpha=0.2), chosen_loss("sft")]
    section = WeightedSumConfig([SumTerm(component=term) for term in terms])
    found = whole(chosen_loss("weighted-sum", terms=section.terms), policy)(batch)
    for term in terms[:2]:
        own = whole(term, policy)(batch)
        (name,) = set(own.columns) - set(batch.columns)
        assert np.array_equal(found[name], own[name])


def test_responses_of_the_tally_are_counted_where_they_can_be_learned() -> None:
    batch, policy = pairs()
    scores = sums(batch, policy) - sums(batch, batch["reference_logprobs"])
    learned = np.array([length > 0 for pair in LENGTHS for length in pair])
    means = [scores[learned & of].mean() for of in (batch["chosen"], ~batch["chosen"])]
    found = whole(chosen_loss("bco-pair"), policy)(batch)[SHIFT]
    assert found[0] == pytest.approx(np.mean(means), rel=1e-6)
