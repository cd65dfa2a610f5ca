"""The rules that every loss must keep.

    class TestClippedPG(LossContract):
        def make(self) -> ClippedPG:
            return ClippedPG(ClippedPGConfig())

The rules import torch when they run, so that importing a contract stays cheap.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from whet.data.batch import Batch, concatenate
from whet.data.metrics import Metric
from whet.interfaces.loss import Loss, LossResult
from whet_testing.batches import Column, random_batch

OF_A_RUN = ("step", "time", "tokens", "loss", "grad_norm", "lr", "pass_rate", "context_full", "rewritten")
OF_A_RUN_ABOVE = (
    "reward/", "response_length/", "turns/", "episodes/", "groups/", "grader/", "staleness/", "evaluation/", "seconds/",
    "memory/", "probe/", "given_back_mib/",
)  # fmt: skip
"""The names, and beginnings of names, of metrics that a run has itself."""
FLIPPED = "the loss is minimised, so is a sign flipped? If the loss has another goal, override `goal`"


class LossContract:
    """Inherit this class and override `make`."""

    unit_size: int = 1
    """Number of sequences that must stay together, such as 2 for preference pairs."""
    optional_columns: tuple[str, ...] = ()
    """Columns that the loss reads if the batch has them. A second subclass that sets them tests the rules both ways."""
    makers: Mapping[str, Column] = {}
    """Functions (batch, rng) -> array for columns that are not in `whet_testing.batches.COLUMNS`."""

    def make(self) -> Loss:
        """Build the loss under test."""
        raise NotImplementedError("override `make` to build the loss")

    def batch(self, seed: int = 0) -> Batch:
        """Return a NumPy batch with the base columns, the columns that the loss declares, and the optional columns.

        It has no other columns.
        """
        columns = [*self.make().columns, *self.optional_columns]
        return random_batch(seed, columns=columns, unit_size=self.unit_size, makers=dict(self.makers))

    def outputs(self, batch: Batch, seed: int = 0) -> dict[str, Any]:
        """Return the declared model outputs as NumPy float32 [N] or [N, K]. They are 0 where `loss_mask` is false."""
        rng = np.random.default_rng(seed)
        negative = {name: name == "logprobs" or name.endswith("_logprobs") for name in self.make().outputs}
        made = {name: rng.exponential(size=batch.tokens) * (-1 if down else 1) for name, down in negative.items()}
        return {name: np.where(batch["loss_mask"], made[name], 0).astype(np.float32) for name in made}

    def goal(self, batch: Batch) -> Any:
        """Return what one step must do, for each sequence [B] or token [N]: above 0, learned tokens become likelier.

        Below 0 they become less likely; 0 demands nothing. By default the goal is the advantages if the batch has them.
        Of a pair, the first sequence becomes likelier, and the second one less likely. Otherwise all
        become likelier. Override it if the loss has another goal. None: nothing is demanded, as of losses that read
        other outputs than `logprobs` and `entropy`.
        """
        if not {"logprobs"} <= set(self.make().outputs) <= {"logprobs", "entropy"}:
            return None
        if "advantages" in batch:
            return batch["advantages"]
        chosen = np.diff(batch["unit"], prepend=-1) != 0
        return np.where(chosen, 1, -1) if self.unit_size == 2 else np.ones(batch.sequences)

    def test_it_is_a_loss(self) -> None:
        assert isinstance(self.make(), Loss)

    def test_terms_counts_and_weights_have_the_same_names(self) -> None:
        loss, batch = self.make(), self.batch()
        result, _ = self._result(loss, batch, self.outputs(batch))
        assert set(result.terms) == set(loss.counts(_torch(batch))) == set(loss.weights)

    def test_a_term_is_one_number_with_gradient(self) -> None:
        batch = self.batch()
        result, _ = self._result(self.make(), batch, self.outputs(batch))
        for name, term in result.terms.items():
            assert term.shape == (), f"the term {name!r} has the shape {tuple(term.shape)}"
            assert term.requires_grad, f"the term {name!r} carries no gradient"

    def test_metrics_are_numbers_without_gradient(self) -> None:
        batch = self.batch()
        result, _ = self._result(self.make(), batch, self.outputs(batch))
        for name, metric in result.metrics.items():
            assert isinstance(metric, Metric)
            for number in (metric.value, metric.count):
                assert not getattr(number, "requires_grad", False), f"the metric {name!r} carries gradient"
                assert np.isfinite(np.asarray(number)).all(), f"the metric {name!r} is {number}"

    def test_metrics_have_names_that_a_run_does_not_use(self) -> None:
        batch = self.batch()
        for name in self._result(self.make(), batch, self.outputs(batch))[0].metrics:
            assert name not in OF_A_RUN, f"a run has the metric {name!r} itself; rename it"
            assert not name.startswith(OF_A_RUN_ABOVE), f"a run has metrics like {name!r} itself; rename it"

    def test_a_term_that_counts_nothing_is_0(self) -> None:
        loss, batch = self.make(), self.batch()
        counts = _numbers(loss.counts(_torch(batch)))
        for name, term in self._result(loss, batch, self.outputs(batch))[0].terms.items():
            value = float(term.detach())
            assert counts[name] > 0 or not value, (
                f"the term {name!r} has the sum {value:g} and the count {counts[name]:g}; backends divide the sum by "
                "the count, and take no step if every count is 0"
            )

    def test_the_result_is_the_same_every_time(self) -> None:
        loss, batch = self.make(), self.batch()
        once, twice = (self._value_and_gradient(loss, batch, self.outputs(batch)) for _ in range(2))
        assert once[0] == twice[0]
        assert _equal(once[1], twice[1])

    def test_its_input_is_left_as_it_was(self) -> None:
        loss, batch = self.make(), self.batch()
        given, before = _torch(batch), _torch(batch)
        outputs = self.outputs(batch)
        loss.counts(given), loss.live(given), loss(_leaves(outputs), given)
        assert given.columns == before.columns
        assert all((given[name] == before[name]).all() for name in before.columns)
        assert all(np.array_equal(outputs[name], self.outputs(batch)[name]) for name in outputs)

    def test_counts_add_up_over_micro_batches(self) -> None:
        loss, batch = self.make(), self.batch()
        whole = loss.counts(_torch(batch))
        parts = [loss.counts(_torch(part)) for part in batch.split(4)]
        for name, count in whole.items():
            assert float(count) == pytest.approx(sum(float(part[name]) for part in parts)), name

    def test_no_sequences_count_nothing(self) -> None:
        batch = self.batch()
        counts = self.make().counts(_torch(batch.where(np.zeros(batch.sequences, bool))))
        assert {name: float(count) for name, count in counts.items()} == dict.fromkeys(counts, 0.0)

    def test_value_and_gradient_do_not_depend_on_micro_batches(self) -> None:
        loss, batch = self.make(), self._numbered()
        value, gradient = self._value_and_gradient(loss, batch, self.outputs(batch))
        counts = _numbers(loss.counts(_torch(batch)))
        summed, pieces = 0.0, {name: np.zeros(whole.shape) for name, whole in gradient.items()}
        for part in batch.split(4, seed=1):
            mine = np.asarray(part["position"])
            part_value, part_gradient = self._value_and_gradient(loss, *self._cut(batch, mine), counts=counts)
            summed += part_value
            for name, piece in part_gradient.items():
                pieces[name][_tokens_of(batch, mine)] = piece
        assert summed == pytest.approx(value, rel=1e-5, abs=1e-6)
        for name, whole in gradient.items():
            np.testing.assert_allclose(pieces[name], whole, rtol=1e-4, atol=1e-7)

    def test_value_and_gradient_do_not_depend_on_order(self) -> None:
        loss, batch = self.make(), self._numbered()
        value, gradient = self._value_and_gradient(loss, batch, self.outputs(batch))
        shuffled = concatenate(batch.split(len(batch.units()), seed=2))
        order = np.asarray(shuffled["position"])
        other, other_gradient = self._value_and_gradient(loss, *self._cut(batch, order))
        assert other == pytest.approx(value, rel=1e-5, abs=1e-6)
        for name, whole in gradient.items():
            np.testing.assert_allclose(other_gradient[name], whole[_tokens_of(batch, order)], rtol=1e-4, atol=1e-7)

    def test_masked_tokens_get_no_gradient(self) -> None:
        batch = self.batch()
        _, gradient = self._value_and_gradient(self.make(), batch, self.outputs(batch))
        for name, values in gradient.items():
            assert not values[~batch["loss_mask"]].any(), f"masked tokens got gradient through {name!r}"

    def test_masked_tokens_have_no_influence(self) -> None:
        loss, batch = self.make(), self.batch()
        hidden = ~np.asarray(batch["loss_mask"])
        outputs = self.outputs(batch)
        expected = self._value_and_gradient(loss, batch, outputs)
        shifted = {name: _filled(values, hidden, -3) for name, values in outputs.items()}
        floats = [name for name, column in batch.per_token.items() if column.dtype.kind == "f"]
        columns = {name: _filled(batch[name], hidden, -5) for name in floats}
        found = self._value_and_gradient(loss, batch.with_columns(**columns), shifted)
        assert found[0] == expected[0]
        assert _equal(found[1], expected[1])

    def test_learned_tokens_get_gradient(self) -> None:
        batch = self.batch()
        _, gradient = self._value_and_gradient(self.make(), batch, self.outputs(batch))
        assert any(values[batch["loss_mask"]].any() for values in gradient.values())

    def test_a_step_moves_probabilities_towards_the_goal(self) -> None:
        batch = self.batch()
        goal = self.goal(batch)
        if goal is None:
            pytest.skip("it states no goal in probabilities of tokens")
        goal, moved = np.asarray(goal, np.float32), self._moved_by_a_step(batch)
        if len(goal) == batch.tokens:  # a loss may average the advantages of a sequence's tokens
            assert (goal * moved)[batch["loss_mask"]].sum() > 0, f"the tokens move away from it: {FLIPPED}"
            return
        for sign, wanted in ((1, "likelier"), (-1, "less likely")):
            there = batch["loss_mask"] & np.repeat(np.sign(goal) == sign, batch["lengths"])
            assert not there.any() or sign * moved[there].mean() > 0, (
                f"a step must make {there.sum()} learned tokens {wanted}, and moves their logprobs by "
                f"{moved[there].mean():.3g} nats on average: {FLIPPED}"
            )

    @pytest.mark.parametrize("log_ratio", [-100.0, -50.0, 50.0, 100.0])
    def test_extreme_log_ratios_stay_finite(self, log_ratio: float) -> None:
        loss, batch = self.make(), self.batch()
        mask = np.asarray(batch["loss_mask"])
        low, high = (-abs(log_ratio) - 0.01, -0.01)
        before, now = (low, high) if log_ratio > 0 else (high, low)
        outputs, names = self.outputs(batch), [name for name in batch.per_token if name.endswith("logprobs")]
        others = {name: _filled(np.zeros_like(batch[name]), mask, before) for name in names}
        outputs |= {name: _filled(0 * outputs[name], mask, now) for name in loss.outputs if "logprobs" in name}
        result, _ = self._result(loss, batch.with_columns(**others), outputs)
        value, gradient = self._value_and_gradient(loss, batch.with_columns(**others), outputs)
        assert np.isfinite(value)
        assert all(np.isfinite(values).all() for values in gradient.values())
        assert all(np.isfinite(np.asarray(metric.value)).all() for metric in result.metrics.values())

    def test_a_batch_with_nothing_to_learn_is_finite_and_has_no_gradient(self) -> None:
        batch = self.batch()
        batch = batch.with_columns(loss_mask=np.zeros(batch.tokens, bool))
        outputs = {name: np.zeros_like(values) for name, values in self.outputs(batch).items()}
        result, _ = self._result(self.make(), batch, outputs)
        value, gradient = self._value_and_gradient(self.make(), batch, outputs)
        assert np.isfinite(value)
        assert not any(values.any() for values in gradient.values())
        assert all(np.isfinite(metric.number()) for metric in result.metrics.values())

    def test_live_says_which_sequences_matter(self) -> None:
        batch = self.batch()
        live = np.asarray(self.make().live(_torch(batch)))
        assert live.dtype == bool
        assert live.shape == (batch.sequences,)
        for unit in batch.units():
            assert len(set(live[unit].tolist())) == 1, "a unit is partly live: it would be separated"

    def test_dead_sequences_contribute_exactly_nothing(self) -> None:
        loss, batch = self.make(), self._numbered()
        live = np.asarray(loss.live(_torch(batch)))
        if live.all():
            return
        outputs = self.outputs(batch)
        counts = _numbers(loss.counts(_torch(batch)))
        value, gradient = self._value_and_gradient(loss, batch, outputs, counts=counts)
        kept = np.flatnonzero(live)
        other, other_gradient = self._value_and_gradient(loss, *self._cut(batch, kept), counts=counts)
        assert other == pytest.approx(value, rel=1e-6, abs=1e-7)
        tokens = _tokens_of(batch, kept)
        for name, values in gradient.items():
            assert not np.delete(values, tokens).any(), f"dead sequences got gradient through {name!r}"
            np.testing.assert_allclose(other_gradient[name], values[tokens], rtol=1e-6, atol=1e-8)

    def _numbered(self) -> Batch:
        """Return a batch with the column `position`: the position of each sequence in the batch."""
        batch = self.batch()
        return batch.with_columns(position=np.arange(batch.sequences))

    def _cut(self, batch: Batch, sequences: Any) -> tuple[Batch, dict[str, Any]]:
        """Return some sequences of a batch and their model outputs."""
        outputs = self.outputs(batch)
        tokens = _tokens_of(batch, sequences)
        return batch.take(sequences), {name: values[tokens] for name, values in outputs.items()}

    def _moved_by_a_step(self, batch: Batch) -> Any:
        """Return how a step of gradient descent on logits changes the logprob of each token, in nats. -> [N].

        Before the step, the logprobs of the sampler, the old policy and the reference are those of the policy.
        """
        import torch

        loss, rng = self.make(), np.random.default_rng(0)
        logits = torch.from_numpy(rng.normal(size=(batch.tokens, 8))).requires_grad_()
        tokens, mask = torch.from_numpy(rng.integers(0, 8, (batch.tokens, 1))), torch.from_numpy(batch["loss_mask"])

        def outputs(logits: Any) -> dict[str, Any]:
            follows = logits.log_softmax(-1)
            made = {"logprobs": follows.gather(-1, tokens)[:, 0], "entropy": -(follows.exp() * follows).sum(-1)}
            return {name: made[name].where(mask, 0.0) for name in {"logprobs", *loss.outputs}}

        before = outputs(logits.detach())["logprobs"].numpy().astype(np.float32)
        same = [name for name in ("sampler_logprobs", "old_logprobs", "reference_logprobs") if name in batch]
        given = _torch(batch.with_columns(**dict.fromkeys(same, before)))
        counts = _numbers(loss.counts(given))
        terms = loss(outputs(logits), given).terms
        sum(loss.weights[name] * term / max(counts[name], 1) for name, term in terms.items()).backward()
        assert logits.grad is not None, "no gradient reaches the logits"
        step = 0.1 / max(float(logits.grad.abs().max()), 1e-30)
        return outputs((logits - step * logits.grad).detach())["logprobs"].numpy() - before

    def _result(self, loss: Loss, batch: Batch, outputs: Mapping[str, Any]) -> tuple[LossResult, dict[str, Any]]:
        leaves = _leaves(outputs)
        return loss(leaves, _torch(batch)), leaves

    def _value_and_gradient(
        self, loss: Loss, batch: Batch, outputs: Mapping[str, Any], counts: Mapping[str, float] | None = None
    ) -> tuple[float, dict[str, Any]]:
        """Return the sum over terms of weight x term / count, and its gradient with respect to each output."""
        counts = counts or _numbers(loss.counts(_torch(batch)))
        result, leaves = self._result(loss, batch, outputs)
        objective = sum(loss.weights[name] * term / max(counts[name], 1) for name, term in result.terms.items())
        objective.backward()
        gradient = {n: np.zeros(x.shape) if x.grad is None else x.grad.numpy() for n, x in leaves.items()}
        return float(objective.detach()), gradient


def _filled(values: Any, where: Any, number: float) -> Any:
    """Return values [N] or [N, K] with a number wherever the mask [N] is true."""
    filled = np.array(values)
    filled[where] = number
    return filled


def _torch(batch: Batch) -> Batch:
    import torch

    return batch.map(lambda column: torch.from_numpy(np.array(column)))


def _leaves(outputs: Mapping[str, Any]) -> dict[str, Any]:
    import torch

    return {name: torch.from_numpy(np.array(values)).requires_grad_() for name, values in outputs.items()}


def _numbers(counts: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(count) for name, count in counts.items()}


def _equal(one: Mapping[str, Any], two: Mapping[str, Any]) -> bool:
    return all(np.array_equal(one[name], two[name]) for name in one)


def _tokens_of(batch: Batch, sequences: Any) -> Any:
    """Return the positions of the tokens of some sequences, in the order of the sequences."""
    ends = np.cumsum(batch["lengths"])
    return np.concatenate([np.arange(ends[i] - batch["lengths"][i], ends[i]) for i in sequences])
