"""The rules that every backend must keep, tested in float32 against `transformers`.

    class TestFsdp2(BackendContract):
        def make(self, context: RoleContext) -> Fsdp2Backend:
            return Fsdp2Backend(Fsdp2Config(optimizer=OptimizerConfig(lr=1e-2)), context)

`make` must choose a constant learning rate of about 0.01. A subclass with `processes = 2` tests the same rules on two
worker processes.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attrs import evolve

from whet.component import Spec
from whet.data.batch import Batch, concatenate, from_sequences
from whet.errors import WhetError
from whet.interfaces.backend import Backend
from whet.interfaces.weights import TransferSpec
from whet.interfaces.workers import RoleContext
from whet_chat.tokenizer import ChatTokenizer
from whet_start.small_models import make_model
from whet_testing.batches import random_batch
from whet_testing.contracts.placed import WorkerGroups
from whet_testing.contracts.saving import SavingRules
from whet_testing.contracts.sleep import LIKELIHOOD, Fresh, SleepRules
from whet_testing.reference import Reference
from whet_weights import transfer

ASKED = {"logprobs": "logprobs", "entropy": "entropy", "topk_ids": "topk_ids:2", "topk_logprobs": "topk_logprobs:2"}
"""Outputs that every batch can be scored with: the name in facts -> the name in `score`."""
TOLERANCE = 1e-4
"""Largest allowed difference of a logprob from `transformers`, in nats, in float32."""


class BackendContract(SleepRules, SavingRules):
    """Inherit this class and override `make`."""

    held = ("backend",)
    transports: tuple[str, ...] = ("disk",)
    """Transports to test, named as in the facts of the component. The receiver is in the process of the test."""
    outputs: tuple[str, ...] = ("logprobs", "entropy")
    """Outputs that the backend can compute, named as in the facts of the component."""
    has_reference: bool = False
    """Whether the backend that `make` builds can score with the weights at the start of the run."""
    step_tolerance: float = 1e-5
    """Largest allowed difference of the loss after a step, in nats, between two orders of one batch."""

    adapters: bool = False
    """Whether it trains weights that the model lacks, such as those of LoRA. Then no gradient is that of the model."""
    of_transformers: bool = True
    """Whether `transformers` loads its model from the folder. If not, rules that compare the two are skipped."""

    def make(self, context: RoleContext) -> Backend:
        """Build the backend under test."""
        raise NotImplementedError("override `make` to build the backend")

    def trains(self, name: str) -> bool:
        """Return whether the backend trains the weight of this Hugging Face name. Override it if some are frozen."""
        return True

    @pytest.fixture
    def fresh(self, tmp_path: Path, tiny_model_folder: Path, groups: WorkerGroups) -> Iterator[Fresh]:
        """Yield a function that builds one more backend, and close all these backends after the test.

        Every backend has the same weights, unless the test passes another model folder.
        """
        built: list[Backend] = []

        def build(model_folder: Path = tiny_model_folder, chat_template: str = "") -> Backend:
            context = self.context(tmp_path / f"backend-{len(built)}", "backend", model_folder, groups)
            built.append(self.make(evolve(context, model=evolve(context.model, chat_template=chat_template))))
            return built[-1]

        yield build
        for backend in built:
            backend.close()

    @pytest.fixture
    def backend(self, fresh: Fresh) -> Backend:
        """Return a fresh backend."""
        return fresh()

    @pytest.fixture(scope="class")
    @classmethod
    def reference(cls, tiny_model_folder: Path) -> Reference:
        """Return the same model, loaded by `transformers`."""
        if not cls.of_transformers:
            pytest.skip("its model is none of transformers")
        return Reference(tiny_model_folder)

    def test_it_is_a_backend(self, backend: Backend) -> None:
        assert isinstance(backend, Backend)

    def test_it_does_what_its_facts_say(self, backend: Backend) -> None:
        facts, batch = self.facts(), _batch()
        if facts is None:
            pytest.skip("override `facts` to compare them")
        undeclared = sorted({name.partition(":")[0] for name in self.outputs} - facts.outputs_given)
        assert not undeclared, f"it computes {undeclared}, and its facts do not name them in `outputs_given`"
        for name in sorted(facts.outputs_given & set(ASKED)):
            shape = backend.score(batch, (ASKED[name],))[ASKED[name]].shape
            assert shape[0] == batch.tokens, f"its facts name the output {name!r}, and `score` returns {shape}"
        assert self.has_reference == ("reference" in facts.weights_given), (
            f"its facts name the weights {sorted(facts.weights_given)}; these tests have `has_reference` "
            f"{self.has_reference}"
        )
        unknown = sorted(set(self.transports) - set(facts.transports))
        assert not unknown, f"its facts do not name the transports {unknown}, with which it is tested"

    def test_closing_twice_is_safe(self, backend: Backend) -> None:
        backend.close()
        backend.close()

    # Scoring

    def test_scores_are_0_at_the_first_position_and_where_nothing_is_learned(self, backend: Backend) -> None:
        batch = _batch()
        for name, values in backend.score(batch, self.outputs).items():
            assert values.shape == (batch.tokens,), name
            assert values.dtype == np.float32, name
            assert not values[~batch["loss_mask"]].any(), f"{name} is not 0 everywhere that loss_mask is false"
            assert values[batch["loss_mask"]].all(), f"{name} is 0 somewhere that loss_mask is true"

    @pytest.mark.parametrize("temperature", [1.0, 0.7])
    def test_logprobs_are_those_of_transformers(
        self, backend: Backend, reference: Reference, temperature: float
    ) -> None:
        batch = _batch().with_columns(temperature=np.full(12, temperature, np.float32))
        found = backend.score(batch, ("logprobs",))["logprobs"]
        np.testing.assert_allclose(found, _logprobs(reference, batch, temperature), atol=TOLERANCE)

    def test_each_sequence_has_its_own_temperature(self, backend: Backend, reference: Reference) -> None:
        batch = _batch()
        temperatures = np.where(np.arange(batch.sequences) % 2, 0.5, 1.5).astype(np.float32)
        found = backend.score(batch.with_columns(temperature=temperatures), ("logprobs",))["logprobs"]
        cold, hot = (_logprobs(reference, batch, temperature) for temperature in (0.5, 1.5))
        expected = np.where(np.repeat(temperatures, batch["lengths"]) == 0.5, cold, hot)
        np.testing.assert_allclose(found, expected, atol=TOLERANCE)

    def test_entropies_are_those_of_transformers(self, backend: Backend, reference: Reference) -> None:
        if "entropy" not in self.outputs:
            pytest.skip("this backend gives no entropy")
        batch = _batch()

        def entropies(tokens: Any) -> Any:
            follows = reference.likelihoods(tokens)[:-1]
            return np.concatenate([[0.0], -(np.exp(follows) * follows).sum(-1)])

        expected = np.where(batch["loss_mask"], _each(entropies, batch), 0)
        np.testing.assert_allclose(backend.score(batch, ("entropy",))["entropy"], expected, atol=TOLERANCE)

    def test_scores_do_not_depend_on_company_or_order(self, backend: Backend) -> None:
        batch = _batch()
        whole = backend.score(batch, ("logprobs",))["logprobs"]
        order = np.random.default_rng(0).permutation(batch.sequences)
        shuffled = backend.score(batch.take(order), ("logprobs",))["logprobs"]
        np.testing.assert_allclose(shuffled, whole[_tokens_of(batch, order)], atol=TOLERANCE)
        alone = backend.score(batch.take([5]), ("logprobs",))["logprobs"]
        np.testing.assert_allclose(alone, whole[_tokens_of(batch, [5])], atol=TOLERANCE)

    def test_very_short_and_very_long_sequences_are_scored(self, backend: Backend, reference: Reference) -> None:
        rows = [
            {"tokens": np.arange(length) % 200 + 3, "loss_mask": np.arange(length) > 0} for length in (1, 2, 250, 1, 3)
        ]
        batch = from_sequences(rows, prompt_lengths=[1] * len(rows))
        found = backend.score(batch, ("logprobs",))["logprobs"]
        np.testing.assert_allclose(found, _logprobs(reference, batch), atol=TOLERANCE)

    # Losses

    def test_the_loss_is_the_sum_over_the_count(self, backend: Backend, reference: Reference) -> None:
        batch = _batch()
        expected = -_logprobs(reference, batch).sum() / batch["loss_mask"].sum()
        found = backend.evaluate(batch, LIKELIHOOD)
        assert found["loss"].number() == pytest.approx(expected, abs=TOLERANCE)
        assert found["learned"].number() == batch["loss_mask"].sum()

    def test_the_gradient_is_that_of_transformers(self, backend: Backend, reference: Reference) -> None:
        batch = _batch()
        found = _numbers(backend.train(batch, LIKELIHOOD))
        self._is_gradient(found, reference, batch)

    def test_value_gradient_and_step_do_not_depend_on_order(self, fresh: Fresh) -> None:
        batch = _batch()
        shuffled = concatenate(batch.split(batch.sequences, seed=3))
        one, other = fresh(), fresh()
        expected, found = _numbers(one.train(batch, LIKELIHOOD)), _numbers(other.train(shuffled, LIKELIHOOD))
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
        after = [_loss(backend, batch) for backend in (one, other)]
        assert after[0] == pytest.approx(after[1], abs=self.step_tolerance)

    def test_tokens_that_nothing_follows_have_no_influence(self, fresh: Fresh) -> None:
        results = []
        for filler in (3, 77):
            rows = [{"tokens": [5, 6, 7 + i, 8, *[filler] * i], "loss_mask": [0, 0, 1, 1] + [0] * i} for i in range(6)]
            results.append(_numbers(fresh().train(from_sequences(rows, prompt_lengths=[2] * 6), LIKELIHOOD)))
        assert results[0]["loss"] == pytest.approx(results[1]["loss"], rel=1e-6)
        assert results[0]["grad_norm"] == pytest.approx(results[1]["grad_norm"], rel=1e-5)

    def test_sequences_without_anything_to_learn_have_no_influence(self, fresh: Fresh) -> None:
        batch = _batch()
        silent = batch.with_columns(loss_mask=np.zeros(batch.tokens, bool))
        extra = silent.with_columns(unit=batch["unit"] + 100, group=batch["group"] + 100)
        alone, padded = fresh().train(batch, LIKELIHOOD), fresh().train(concatenate([batch, extra]), LIKELIHOOD)
        assert padded["loss"].number() == pytest.approx(alone["loss"].number(), rel=1e-6)
        assert padded["grad_norm"].number() == pytest.approx(alone["grad_norm"].number(), rel=1e-5)

    def test_leaving_dead_sequences_out_changes_nothing(self, fresh: Fresh) -> None:
        batch = _batch(columns=["advantages"])
        assert (batch["advantages"] == 0).any()
        kept, left = (
            _numbers(fresh().train(batch, Spec("whet_testing.losses:Weighted", config={"skip_dead": skip})))
            for skip in (False, True)
        )
        assert left["loss"] == pytest.approx(kept["loss"], rel=1e-5, abs=1e-7)
        assert left["grad_norm"] == pytest.approx(kept["grad_norm"], rel=1e-4)

    def test_a_part_is_normalised_by_what_it_is_counted_over(self, fresh: Fresh) -> None:
        batch = _batch()
        whole = _loss(fresh(), batch)
        parts = [fresh().train(part, LIKELIHOOD, count_over=batch)["loss"].number() for part in batch.split(2)]
        assert sum(parts) == pytest.approx(whole, rel=1e-5)

    def test_fewer_units_than_ranks_are_enough(self, backend: Backend, reference: Reference) -> None:
        batch = _batch().take([0])
        self._is_gradient(_numbers(backend.train(batch, LIKELIHOOD)), reference, batch)

    # Steps

    def test_training_lowers_the_loss(self, backend: Backend, reference: Reference) -> None:
        batch = _batch()
        before = _loss(backend, batch)
        for _ in range(12):
            numbers = _numbers(backend.train(batch, LIKELIHOOD))
        assert numbers["lr"] > 0
        assert np.isfinite(list(numbers.values())).all()
        whole = not self.adapters and all(map(self.trains, dict(reference.weights())))
        assert _loss(backend, batch) < (0.9 if whole else 1.0) * before

    def test_frozen_weights_stay_as_they_were(self, backend: Backend, reference: Reference, tmp_path: Path) -> None:
        frozen = {name: weight for name, weight in reference.weights() if not self.trains(name)}
        if not frozen:
            pytest.skip("it trains all weights of the model")
        backend.train(_batch(), LIKELIHOOD)
        backend.export(tmp_path / "export")
        after = dict(Reference(tmp_path / "export").weights())
        changed = [name for name, weight in frozen.items() if not np.array_equal(weight.numpy(), after[name].numpy())]
        assert not changed, f"`trains` says that {changed[0]} is frozen, and a step changes it"

    def test_a_count_of_0_takes_no_step(self, backend: Backend) -> None:
        batch = _batch()
        backend.train(batch, LIKELIHOOD)
        before = backend.score(batch, ("logprobs",))["logprobs"]
        numbers = _numbers(backend.train(batch.with_columns(loss_mask=np.zeros(batch.tokens, bool)), LIKELIHOOD))
        assert np.isfinite(list(numbers.values())).all()
        assert np.array_equal(backend.score(batch, ("logprobs",))["logprobs"], before)

    def test_evaluating_and_scoring_change_nothing(self, fresh: Fresh) -> None:
        batch = _batch()
        quiet, asked = fresh(), fresh()
        after = []
        for backend in (quiet, asked):
            backend.train(batch, LIKELIHOOD)
            if backend is asked:
                backend.evaluate(batch, LIKELIHOOD)
                backend.score(batch, self.outputs)
            backend.train(batch, LIKELIHOOD)
            after.append(backend.score(batch, ("logprobs",))["logprobs"])
        assert np.array_equal(after[0], after[1])

    def test_the_reference_stays_what_the_run_started_from(self, backend: Backend) -> None:
        if not self.has_reference:
            pytest.skip("what `make` builds holds no reference")
        batch = _batch()
        before = backend.score(batch, ("logprobs",))["logprobs"]
        backend.train(batch, LIKELIHOOD)
        held = backend.score(batch, ("logprobs",), weights="reference")["logprobs"]
        np.testing.assert_allclose(held, before, atol=1e-6)
        assert np.abs(backend.score(batch, ("logprobs",))["logprobs"] - before).max() > 1e-3

    # Folders and weight sync

    def test_a_loaded_backend_takes_the_same_next_step_bitwise(self, fresh: Fresh, tmp_path: Path) -> None:
        first, again = fresh(), fresh()
        for seed in range(2):
            first.train(_batch(seed), LIKELIHOOD)
        first.save(tmp_path / "checkpoint").result()
        again.load(tmp_path / "checkpoint")
        steps, scores = [], []
        for backend in (first, again):
            found = _numbers(backend.train(_batch(2), LIKELIHOOD))
            steps.append((found["loss"], found["grad_norm"], found["lr"]))
            scores.append(backend.score(_batch(2), ("logprobs",))["logprobs"])
        assert steps[0] == steps[1]
        assert np.array_equal(scores[0], scores[1])

    def test_saving_changes_nothing(self, fresh: Fresh, tmp_path: Path) -> None:
        scores = []
        for folder in (None, tmp_path / "checkpoint"):
            backend = fresh()
            backend.train(_batch(0), LIKELIHOOD)
            if folder is not None:
                backend.save(folder).result()
            backend.train(_batch(1), LIKELIHOOD)
            scores.append(backend.score(_batch(1), ("logprobs",))["logprobs"])
        assert np.array_equal(scores[0], scores[1])

    def test_loading_what_nobody_saved_is_refused(self, backend: Backend, tmp_path: Path) -> None:
        (tmp_path / "empty").mkdir()
        for folder in (tmp_path / "empty", tmp_path / "missing"):
            with pytest.raises(WhetError):
                backend.load(folder)

    @pytest.mark.usefixtures("reference")
    def test_loading_another_models_checkpoint_is_refused(
        self, fresh: Fresh, tmp_path: Path, tiny_tokenizer: Any
    ) -> None:
        other = fresh(make_model(tmp_path / "wider", tiny_tokenizer, hidden=96))
        other.save(tmp_path / "checkpoint").result()
        backend = fresh()
        before = backend.score(_batch(), ("logprobs",))["logprobs"]
        with pytest.raises(WhetError):
            backend.load(tmp_path / "checkpoint")
        assert np.array_equal(backend.score(_batch(), ("logprobs",))["logprobs"], before), "half of it was loaded"

    @pytest.mark.usefixtures("reference")
    def test_an_exported_folder_is_the_same_model_to_transformers(self, backend: Backend, tmp_path: Path) -> None:
        from transformers import AutoTokenizer

        batch = _batch()
        for _ in range(2):
            backend.train(batch, LIKELIHOOD)
        backend.export(tmp_path / "export")
        expected = _logprobs(Reference(tmp_path / "export"), batch)
        np.testing.assert_allclose(backend.score(batch, ("logprobs",))["logprobs"], expected, atol=TOLERANCE)
        assert AutoTokenizer.from_pretrained(tmp_path / "export").chat_template

    @pytest.mark.usefixtures("reference")
    def test_an_exported_folder_has_the_chat_template_of_the_run(self, fresh: Fresh, tmp_path: Path) -> None:
        from transformers import AutoTokenizer

        template = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}{% endfor %}"
        fresh(chat_template=template).export(tmp_path / "export")
        assert AutoTokenizer.from_pretrained(tmp_path / "export").chat_template == template
        assert ChatTokenizer(tmp_path / "export").template.source == template

    @pytest.mark.usefixtures("reference")
    def test_synced_weights_are_the_whole_policy(self, backend: Backend, tmp_path: Path) -> None:
        backend.train(_batch(), LIKELIHOOD)
        backend.export(tmp_path / "export")
        expected = dict(Reference(tmp_path / "export").weights())
        senders = facts.senders if (facts := self.facts()) else 1
        for transport in self.transports:
            received = _received(backend, transport, tmp_path, senders)
            assert len(dict(received)) == len(received), "a weight came twice"
            assert set(expected) <= set(dict(received)), "weights are missing"
            for name, tensor in received:
                if name in expected:
                    np.testing.assert_array_equal(tensor.numpy(), expected[name].numpy(), err_msg=name)

    def test_sent_between_sleeps_its_weights_are_the_same_and_it_trains_on(self, fresh: Fresh, tmp_path: Path) -> None:
        """Where roles take turns a backend may free what it does not send, and must have it for its next work."""
        senders, found = facts.senders if (facts := self.facts()) else 1, []
        for turn in (False, True):
            backend, sent = fresh(), []
            backend.train(_batch(), LIKELIHOOD)
            for transport in self.transports:
                if turn:
                    backend.sleep()
                    backend.wake()
                sent += _received(backend, transport, tmp_path / str(turn), senders)
                scores = backend.score(_batch(), ("logprobs",))["logprobs"]
                sent += _received(backend, transport, tmp_path / f"{turn}-again", senders)
                if turn:
                    backend.sleep()
                    backend.wake()
                backend.train(_batch(), LIKELIHOOD)
                after = backend.score(_batch(), ("logprobs",))["logprobs"]
                sent += [("scores", scores), ("scores after a step", after)]
            found.append(sent)
        for (name, here), (_, there) in zip(*found, strict=True):
            np.testing.assert_array_equal(np.asarray(here), np.asarray(there), err_msg=name)

    def _is_gradient(self, found: Mapping[str, float], reference: Reference, batch: Batch) -> None:
        """Check the loss and the norm of the gradient of a step against plain autograd."""
        loss, norm = _loss_and_norm(reference, batch, self.trains)
        assert found["loss"] == pytest.approx(loss, abs=TOLERANCE)
        if self.adapters:
            assert 0 < found["grad_norm"] < np.inf
            return
        assert found["grad_norm"] == pytest.approx(norm, rel=1e-3), (
            "grad_norm is not that of all weights that it trains. If it freezes some, override `trains`; if it trains "
            "weights that the model lacks, set `adapters`"
        )


def _received(backend: Backend, transport: str, folder: Path, senders: int) -> list[tuple[str, Any]]:
    """Send the weights of a backend in float32 to this process, and return them by name."""
    there = folder / f"weights-{transport}"
    there.mkdir(parents=True)
    spec = TransferSpec(transport, str(there), "session", 1, "float32", senders, timeout_seconds=60.0)
    pending = backend.send_weights(spec)
    received = [(name, tensor.clone()) for name, tensor in transfer.receive(spec)]
    pending.result()
    return received


def _batch(seed: int = 0, columns: Any = ()) -> Batch:
    return random_batch(seed, columns=columns)


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {name: metric.number() for name, metric in metrics.items()}


def _loss(backend: Backend, batch: Batch) -> float:
    return backend.evaluate(batch, LIKELIHOOD)["loss"].number()


def _each(function: Callable[[Any], Any], batch: Batch) -> Any:
    """Return the joined results of a function of the tokens of each sequence. -> [N]."""
    return np.concatenate([function(batch["tokens"][_tokens_of(batch, [i])]) for i in range(batch.sequences)])


def _logprobs(reference: Reference, batch: Batch, temperature: float = 1.0) -> Any:
    """Return the expected logprobs of `score`: 0 where `loss_mask` is false. -> [N]."""
    found = _each(lambda tokens: reference.logprobs(tokens, temperature), batch)
    return np.where(batch["loss_mask"], found, 0)


def _loss_and_norm(reference: Reference, batch: Batch, trains: Callable[[str], bool]) -> tuple[float, float]:
    """Return the mean of -logprob over the tokens to learn and the norm of its gradient, by plain autograd.

    The gradient is with respect to the weights whose names `trains` accepts.
    """
    import torch

    reference.model.zero_grad()
    summed = torch.zeros(())
    for i in range(batch.sequences):
        mine = _tokens_of(batch, [i])
        tokens, mask = torch.as_tensor(batch["tokens"][mine]), torch.as_tensor(batch["loss_mask"][mine])
        follows = torch.log_softmax(reference.model(tokens[None]).logits[0, :-1], -1)
        summed = summed - follows.gather(-1, tokens[1:, None])[:, 0][mask[1:]].sum()
    loss = summed / int(batch["loss_mask"].sum())
    torch.autograd.backward(loss)
    named = reference.model.named_parameters()
    squares = [float(p.grad.double().square().sum()) for n, p in named if p.grad is not None and trains(n)]
    reference.model.zero_grad()
    return float(loss.detach()), float(np.sqrt(sum(squares)))


def _tokens_of(batch: Batch, sequences: Any) -> Any:
    """Return the positions of the tokens of some sequences, in the order of the sequences."""
    ends = np.cumsum(batch["lengths"])
    return np.concatenate([np.arange(ends[i] - batch["lengths"][i], ends[i]) for i in sequences])
