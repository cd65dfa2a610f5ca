"""The contract of backends holds for a plain loop over `transformers`, and each rule catches one that breaks it."""

import copy
import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve

from whet.component import BackendFacts, Spec
from whet.config.build import build
from whet.data.batch import Batch
from whet.data.metrics import Metric, mean, merge, total
from whet.data.model_info import write_chat_template
from whet.errors import CheckpointError, WhetError
from whet.interfaces.backend import Weights
from whet.interfaces.loss import LossResult
from whet.interfaces.weights import TransferSpec
from whet.interfaces.workers import RoleContext
from whet_testing.contracts.backend import BackendContract
from whet_testing.fakes import Done
from whet_testing.reference import Reference
from whet_testing.role_context import make_context
from whet_weights import transfer

WORK = ("train", "evaluate", "score", "send_weights", "save", "load", "export")


class PlainBackend:
    """One sequence at a time, in this process: too slow to use, short enough to read."""

    asleep = False

    def __init__(self, context: RoleContext) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.model: Any = AutoModelForCausalLM.from_pretrained(context.model.path, dtype="float32").eval()
        self.frozen: Any = AutoModelForCausalLM.from_pretrained(context.model.path, dtype="float32").eval()
        self.tokenizer: Any = AutoTokenizer.from_pretrained(context.model.path)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, weight_decay=0.0)
        self.described, self.closed = context.model, False

    def train(self, batch: Batch, loss: Spec, count_over: Batch | None = None) -> Mapping[str, Metric]:
        made = build(loss)
        counts = made.counts(tensors(batch if count_over is None else count_over))
        rate = {"lr": mean(1e-2)}
        if not any(float(count) for count in counts.values()):
            return {"loss": mean(0.0), "grad_norm": mean(0.0), **rate}
        self.optimizer.zero_grad()
        found: list[Mapping[str, Metric]] = []
        for unit in self.units(batch, made):
            value, result = self.part(unit, made, counts)
            torch.autograd.backward(value)
            found.append({"loss": total(float(value.detach())), **result.metrics})
        norm = torch.nn.utils.get_total_norm([p.grad for p in self.model.parameters() if p.grad is not None])
        self.optimizer.step()
        return {**merge(found), "grad_norm": mean(float(norm)), **rate}

    def units(self, batch: Batch, loss: Any) -> list[Batch]:
        live = batch.where(loss.live(tensors(batch)).numpy())
        return live.split(len(live.units()), seed=None) if live.sequences else []

    def part(self, unit: Batch, loss: Any, counts: Mapping[str, Any]) -> tuple[Any, LossResult]:
        rows = [self.outputs(unit, i, self.model) for i in range(unit.sequences)]
        outputs = {name: torch.cat([row[name] for row in rows]) for name in loss.outputs}
        result = loss(outputs, tensors(unit))
        return sum(loss.weights[n] * term / float(counts[n]) for n, term in result.terms.items()), result

    def outputs(self, batch: Batch, index: int, model: Any) -> dict[str, Any]:
        one = tensors(batch.take([index]))
        if one.tokens == 1:
            return {name: torch.zeros(1) for name in ("logprobs", "entropy")}
        logits = model(one["tokens"][None]).logits[0, :-1]
        follows = torch.log_softmax(logits / self.temperature(one), -1)
        found = {
            "logprobs": follows.gather(-1, one["tokens"][1:, None])[:, 0],
            "entropy": -(follows.exp() * follows).sum(-1),
        }
        padded = {name: torch.cat([torch.zeros(1), values]) for name, values in found.items()}
        return {name: torch.where(self.mask(one), values, 0.0) for name, values in padded.items()}

    def mask(self, one: Batch) -> Any:
        return one["loss_mask"]

    def temperature(self, one: Batch) -> Any:
        return one["temperature"] if "temperature" in one else 1.0  # noqa: SIM401  a batch has no `get`

    @torch.no_grad()
    def evaluate(self, batch: Batch, loss: Spec) -> Mapping[str, Metric]:
        made = build(loss)
        counts = made.counts(tensors(batch))
        value, result = self.part(batch, made, counts)
        return {"loss": mean(float(value)), **result.metrics}

    @torch.no_grad()
    def score(self, batch: Batch, outputs: tuple[str, ...], weights: Weights = "policy") -> dict[str, Any]:
        model = self.model if weights == "policy" else self.frozen
        rows = [self.outputs(batch, i, model) for i in range(batch.sequences)]
        return {name: np.concatenate([row[name].numpy() for row in rows]).astype(np.float32) for name in outputs}

    def send_weights(self, spec: TransferSpec) -> Done:
        transfer.send(spec, self.sent())
        return Done()

    def sent(self) -> list[tuple[str, Any]]:
        return [(name, parameter.detach()) for name, parameter in self.model.named_parameters()]

    def save(self, folder: Path) -> Done:
        folder.mkdir(parents=True)
        torch.save({"model": self.model.state_dict(), "optimizer": self.state()}, folder / "state.pt")
        (folder / "config.json").write_text(json.dumps(self.model.config.hidden_size))
        return Done()

    def state(self) -> Any:
        return self.optimizer.state_dict()

    def load(self, folder: Path) -> None:
        try:
            width = json.loads((folder / "config.json").read_text())
        except OSError as error:
            raise CheckpointError(f"{folder} holds no checkpoint") from error
        if width != self.model.config.hidden_size:
            raise CheckpointError(f"{folder} is of a model of width {width}")
        state = torch.load(folder / "state.pt", weights_only=True)
        self.model.load_state_dict(state["model"])
        if state["optimizer"]:
            self.optimizer.load_state_dict(state["optimizer"])

    def export(self, folder: Path) -> None:
        self.model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
        write_chat_template(self.described, folder)

    def __getattribute__(self, name: str) -> Any:
        if name in WORK and object.__getattribute__(self, "asleep"):
            raise WhetError(f"{name} comes while the backend sleeps")
        return super().__getattribute__(name)

    def sleep(self) -> int | None:
        self.asleep = True
        return None

    def wake(self) -> None:
        self.asleep = False

    def close(self) -> None:
        self.closed = True


def tensors(batch: Batch) -> Batch:
    return batch.map(lambda column: torch.from_numpy(np.array(column)))


class Plain(BackendContract):
    has_reference = True

    def make(self, context: RoleContext) -> Any:
        return PlainBackend(context)


class TestOfAPlainBackend(Plain):
    def facts(self) -> BackendFacts:
        return BackendFacts(
            outputs_given=frozenset({"logprobs", "entropy"}),
            weights_given=frozenset({"policy", "reference"}),
            transports=("shared", "disk"),
        )


class FreezesEmbeddings(PlainBackend):
    def __init__(self, context: RoleContext) -> None:
        super().__init__(context)
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_("embed" not in name)
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.0)


class WithoutEmbeddings(Plain):
    def make(self, context: RoleContext) -> Any:
        return FreezesEmbeddings(context)

    def trains(self, name: str) -> bool:
        return "embed" not in name


class Adapted(torch.nn.Module):
    """A linear layer with a LoRA adapter of rank 4, whose product is part of `weight`."""

    def __init__(self, linear: Any) -> None:
        super().__init__()
        rows, columns = linear.weight.shape
        self.a = torch.nn.Parameter(torch.randn(4, columns, generator=torch.Generator().manual_seed(0)) / 8)
        self.b = torch.nn.Parameter(torch.zeros(rows, 4))

    def forward(self, weight: Any) -> Any:
        return weight + self.b @ self.a


class WithAdapters(PlainBackend):
    """LoRA on every linear layer of the attention."""

    def __init__(self, context: RoleContext) -> None:
        super().__init__(context)
        self.model.requires_grad_(False)
        for name, module in self.model.named_modules():
            if name.endswith(("q_proj", "v_proj", "o_proj")):
                torch.nn.utils.parametrize.register_parametrization(module, "weight", Adapted(module))
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.0)

    def merged(self) -> Any:
        model = copy.deepcopy(self.frozen)
        for name, parameter in model.named_parameters():
            module, _, kind = name.rpartition(".")
            parameter.data = getattr(self.model.get_submodule(module), kind).detach()
        return model

    def sent(self) -> list[tuple[str, Any]]:
        return [(name, parameter.detach()) for name, parameter in self.merged().named_parameters()]

    def export(self, folder: Path) -> None:
        self.merged().save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
        write_chat_template(self.described, folder)


class AdaptersAlone(Plain):
    adapters = True

    def make(self, context: RoleContext) -> Any:
        return WithAdapters(context)


class WorksAsleep(PlainBackend):
    def sleep(self) -> None:
        pass


class ForgetsTheOptimizerAsleep(PlainBackend):
    def sleep(self) -> None:
        super().sleep()
        self.optimizer.state.clear()


class ForgetsTheOptimizerOnceItSent(PlainBackend):
    slept = False

    def sleep(self) -> None:
        super().sleep()
        self.slept = True

    def sent(self) -> list[tuple[str, Any]]:
        if self.slept:
            self.optimizer.state.clear()
        return super().sent()


class GivesBackTwice(PlainBackend):
    def sleep(self) -> int:
        super().sleep()
        return 1


class IgnoresTheMask(PlainBackend):
    def mask(self, one: Batch) -> Any:
        return torch.ones(one.tokens, dtype=torch.bool)


class IgnoresTheTemperature(PlainBackend):
    def temperature(self, one: Batch) -> Any:
        return 1.0


class OneTemperature(PlainBackend):
    first: Any = None

    def temperature(self, one: Batch) -> Any:
        self.first = super().temperature(one) if self.first is None else self.first
        return self.first


class MeanOfMeans(PlainBackend):
    def part(self, unit: Batch, loss: Any, counts: Mapping[str, Any]) -> tuple[Any, LossResult]:
        value, result = super().part(unit, loss, loss.counts(tensors(unit)))
        return value / 12, result


class CountsThePart(PlainBackend):
    def train(self, batch: Batch, loss: Spec, count_over: Batch | None = None) -> Mapping[str, Metric]:
        return super().train(batch, loss)


class DropsTheLastSequence(PlainBackend):
    def units(self, batch: Batch, loss: Any) -> list[Batch]:
        return super().units(batch, loss)[:-1] or super().units(batch, loss)


class AlwaysSteps(PlainBackend):
    def train(self, batch: Batch, loss: Spec, count_over: Batch | None = None) -> Mapping[str, Metric]:
        if not batch["loss_mask"].any():
            self.optimizer.step()
        return super().train(batch, loss, count_over)


class NeverSteps(PlainBackend):
    def train(self, batch: Batch, loss: Spec, count_over: Batch | None = None) -> Mapping[str, Metric]:
        before = {name: value.clone() for name, value in self.model.state_dict().items()}
        found = super().train(batch, loss, count_over)
        self.model.load_state_dict(before)
        return found


class TrainsWhileEvaluating(PlainBackend):
    def evaluate(self, batch: Batch, loss: Spec) -> Mapping[str, Metric]:
        return self.train(batch, loss)


class ForgetsTheOptimizer(PlainBackend):
    def state(self) -> Any:
        return {}


class LoadsAnything(PlainBackend):
    def load(self, folder: Path) -> None:
        pass


class MovingReference(PlainBackend):
    def train(self, batch: Batch, loss: Spec, count_over: Batch | None = None) -> Mapping[str, Metric]:
        self.frozen = self.model
        return super().train(batch, loss, count_over)


class ExportsTheStart(PlainBackend):
    def export(self, folder: Path) -> None:
        self.frozen.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)


class ForgetsTheTokenizer(PlainBackend):
    def export(self, folder: Path) -> None:
        self.model.save_pretrained(folder)


class ForgetsTheTemplate(PlainBackend):
    def export(self, folder: Path) -> None:
        self.model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)


class SendsAPart(PlainBackend):
    def sent(self) -> list[tuple[str, Any]]:
        return super().sent()[:-1]


class SendsTheStart(PlainBackend):
    def sent(self) -> list[tuple[str, Any]]:
        return [(name, parameter.detach()) for name, parameter in self.frozen.named_parameters()]


class ScoresInHalfPrecision(PlainBackend):
    def score(self, batch: Batch, outputs: tuple[str, ...], weights: Weights = "policy") -> dict[str, Any]:
        found = super().score(batch, outputs, weights)
        return {name: values.astype(np.float16).astype(np.float32) for name, values in found.items()}


class ClosesOnce(PlainBackend):
    def close(self) -> None:
        assert not self.closed
        self.closed = True


MUTANTS: dict[type[PlainBackend], str] = {
    IgnoresTheMask: "test_scores_are_0_at_the_first_position_and_where_nothing_is_learned",
    OneTemperature: "test_each_sequence_has_its_own_temperature",
    MeanOfMeans: "test_the_gradient_is_that_of_transformers",
    CountsThePart: "test_a_part_is_normalised_by_what_it_is_counted_over",
    DropsTheLastSequence: "test_value_gradient_and_step_do_not_depend_on_order",
    AlwaysSteps: "test_a_count_of_0_takes_no_step",
    NeverSteps: "test_training_lowers_the_loss",
    TrainsWhileEvaluating: "test_evaluating_and_scoring_change_nothing",
    ForgetsTheOptimizer: "test_a_loaded_backend_takes_the_same_next_step_bitwise",
    LoadsAnything: "test_loading_what_nobody_saved_is_refused",
    MovingReference: "test_the_reference_stays_what_the_run_started_from",
    ExportsTheStart: "test_an_exported_folder_is_the_same_model_to_transformers",
    ForgetsTheTokenizer: "test_an_exported_folder_is_the_same_model_to_transformers",
    ForgetsTheTemplate: "test_an_exported_folder_has_the_chat_template_of_the_run",
    SendsAPart: "test_synced_weights_are_the_whole_policy",
    SendsTheStart: "test_synced_weights_are_the_whole_policy",
    WorksAsleep: "test_asleep_it_refuses_work_and_woken_it_trains_as_if_it_had_not_slept",
    ForgetsTheOptimizerAsleep: "test_asleep_it_refuses_work_and_woken_it_trains_as_if_it_had_not_slept",
    ForgetsTheOptimizerOnceItSent: "test_sent_between_sleeps_its_weights_are_the_same_and_it_trains_on",
    GivesBackTwice: "test_what_it_gives_back_asleep_is_told_in_bytes",
    ClosesOnce: "test_closing_twice_is_safe",
}


@pytest.mark.parametrize(("kind", "rule"), MUTANTS.items())
def test_the_contract_catches(kind: type[PlainBackend], rule: str, tmp_path: Path, tiny_model_folder: Path) -> None:
    with pytest.raises((AssertionError, pytest.fail.Exception, OSError, ValueError)):
        keep(Plain(), kind, rule, tmp_path, tiny_model_folder)


def keep(contract: Plain, kind: type[PlainBackend], rule: str, tmp_path: Path, tiny_model_folder: Path) -> None:
    """Try one rule of a contract with backends of a kind."""
    count, test = iter(range(99)), getattr(contract, rule)

    def fresh(model_folder: Path = tiny_model_folder, chat_template: str = "") -> PlainBackend:
        context = make_context(tmp_path / f"backend-{next(count)}", "backend", model_folder)
        return kind(evolve(context, model=evolve(context.model, chat_template=chat_template)))

    wanted = inspect.signature(test).parameters
    parts = {"tmp_path": tmp_path, "fresh": fresh, "reference": Reference(tiny_model_folder)}
    arguments = {name: part for name, part in parts.items() if name in wanted}
    test(**arguments, **({"backend": fresh()} if "backend" in wanted else {}))


OF_A_PART = (
    "test_the_gradient_is_that_of_transformers",
    "test_fewer_units_than_ranks_are_enough",
    "test_training_lowers_the_loss",
    "test_frozen_weights_stay_as_they_were",
    "test_the_reference_stays_what_the_run_started_from",
    "test_synced_weights_are_the_whole_policy",
)


@pytest.mark.parametrize("rule", OF_A_PART)
@pytest.mark.parametrize("adapters", [False, True])
def test_a_backend_may_train_a_part(adapters: bool, rule: str, tmp_path: Path, tiny_model_folder: Path) -> None:
    contract, kind = (AdaptersAlone(), WithAdapters) if adapters else (WithoutEmbeddings(), FreezesEmbeddings)
    if not adapters or "frozen" not in rule:
        keep(contract, kind, rule, tmp_path, tiny_model_folder)


@pytest.mark.parametrize("kind", [FreezesEmbeddings, WithAdapters])
def test_a_backend_that_trains_a_part_must_say_so(
    kind: type[PlainBackend], tmp_path: Path, tiny_model_folder: Path
) -> None:
    backend = kind(make_context(tmp_path, "backend", tiny_model_folder))
    with pytest.raises(AssertionError, match=r"If it freezes some, override `trains`; .* set `adapters`"):
        Plain().test_the_gradient_is_that_of_transformers(backend, Reference(tiny_model_folder))


def test_the_contract_catches_frozen_weights_that_move(tmp_path: Path, tiny_model_folder: Path) -> None:
    backend = PlainBackend(make_context(tmp_path, "backend", tiny_model_folder))
    contract = WithoutEmbeddings()
    with pytest.raises(AssertionError, match=r"`trains` says that .*embed.* is frozen, and a step changes it"):
        contract.test_frozen_weights_stay_as_they_were(backend, Reference(tiny_model_folder), tmp_path)


FACTS = TestOfAPlainBackend().facts()


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        (evolve(FACTS, outputs_given=frozenset({"logprobs"})), r"it computes \['entropy'\]"),
        (evolve(FACTS, outputs_given=FACTS.outputs_given | {"topk_ids"}), "topk_ids"),
        (evolve(FACTS, weights_given=frozenset({"policy"})), "these tests have `has_reference` True"),
        (evolve(FACTS, transports=("shared",)), r"do not name the transports \['disk'\]"),
    ],
)
def test_the_contract_catches_facts_that_differ(
    facts: BackendFacts, message: str, tmp_path: Path, tiny_model_folder: Path
) -> None:
    contract, backend = Plain(), PlainBackend(make_context(tmp_path, "backend", tiny_model_folder))
    contract.facts = lambda: facts  # type: ignore[method-assign]
    with pytest.raises((AssertionError, KeyError), match=message):
        contract.test_it_does_what_its_facts_say(backend)


@pytest.mark.parametrize("kind", [IgnoresTheTemperature, ScoresInHalfPrecision])
def test_the_contract_catches_logprobs_that_are_not_those_of_transformers(
    kind: type[PlainBackend], tmp_path: Path, tiny_model_folder: Path
) -> None:
    backend = kind(make_context(tmp_path, "backend", tiny_model_folder))
    with pytest.raises(AssertionError):
        Plain().test_logprobs_are_those_of_transformers(backend, Reference(tiny_model_folder), 0.7)
