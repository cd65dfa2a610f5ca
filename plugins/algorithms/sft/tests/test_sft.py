import json
import math
from types import SimpleNamespace

import numpy as np
import pytest

from whet.component import Spec
from whet.config.sections import DataFile, DataSection
from whet.config.structure import structure
from whet.data.metrics import mean, plain
from whet.plugins.registry import load_plugins
from whet_chat.tokenizer import ChatTokenizer
from whet_data.offline import OfflineData
from whet_sft.config import SftConfig
from whet_sft.sft import Sft, encoder, with_perplexity
from whet_testing.fakes import FakeBackend


class Recorded:
    """Steps that remember what they are told."""

    def __init__(self, number: int, last: int, events: list) -> None:
        self.number, self._last, self._events = number, last, events
        self.metrics: dict[str, float] = {}

    def log(self, metrics) -> None:
        self.metrics |= plain(metrics)

    def due(self, every: int) -> bool:
        return self.number == self._last or (every > 0 and self.number % every == 0)

    def finish(self, batch) -> None:
        self._events.append(f"finish {self.number}")


class Listed(list):
    """The steps that are left."""

    def __init__(self, steps, done: int) -> None:
        super().__init__(steps)
        self.done, self.start = done, {}

    def log_start(self, metrics) -> None:
        self.start.update(plain(metrics))


def chosen(**keys) -> SftConfig:
    return structure(keys, SftConfig, load_plugins())


@pytest.fixture
def run(tmp_path, tiny_model_folder):
    def run(
        count: int, config: SftConfig, begin: int = 1, end: int = 6, evaluate_every: int = 0, backend=None, more=()
    ):
        for name, size in (("train", count), ("validation", 5)):
            rows = [{"prompt": f"{n}?", "completion": f"{n}"} for n in range(size)]
            (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        train, validation = ([DataFile(str(tmp_path / f"{name}.jsonl"))] for name in ("train", "validation"))
        section = DataSection(train, [*validation, *(DataFile(validation[0].path, **keys) for keys in more)])
        events: list[str] = []
        steps = Listed([Recorded(n, end, events) for n in range(begin, end + 1)], begin - 1)
        parts = SimpleNamespace(
            backend=backend or FakeBackend(),
            data=OfflineData(section, ChatTokenizer(tiny_model_folder), 0, 0, encode=encoder(config, None)),
            steps=steps,
            loss=Spec("whet_sft.losses:Nll"),
            config=SimpleNamespace(evaluation=SimpleNamespace(every=evaluate_every)),
            sync_weights=lambda version: events.append(f"sync_weights {version}"),
        )
        Sft(config).run(parts)
        return SimpleNamespace(steps=steps, batches=parts.backend.trained, events=events)

    return run


def test_every_step_takes_one_optimizer_step_on_its_batch(run):
    found = run(20, chosen(batch_size=4))
    assert [batch.sequences for batch in found.batches] == [4] * 6
    assert [step.metrics["epoch"] for step in found.steps] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.2])
    assert [event for event in found.events if "finish" in event] == [f"finish {n}" for n in range(1, 7)]


def test_a_resumed_run_sees_the_batches_it_would_have_seen(run):
    whole, rest = run(20, chosen(batch_size=4)), run(20, chosen(batch_size=4), begin=4)
    for one, two in zip(whole.batches[3:], rest.batches, strict=True):
        assert np.array_equal(one["tokens"], two["tokens"])


def test_validation_comes_before_the_first_step_when_due_and_after_the_last(run):
    found = run(20, chosen(batch_size=4, validate_every=4))
    assert [step.number for step in found.steps if "validation/loss" in step.metrics] == [4, 6]
    assert "validation/loss" in found.steps.start


def test_a_resumed_run_does_not_begin_its_curves_again(run):
    assert not run(20, chosen(batch_size=4), begin=4).steps.start


def test_the_generator_gets_the_weights_before_it_is_evaluated(run):
    found = run(20, chosen(batch_size=4), evaluate_every=3)
    order = ["sync_weights 3", "finish 3", "sync_weights 6", "finish 6"]
    assert [event for event in found.events if event in order] == order
    assert sum("sync_weights" in event for event in found.events) == 2


@pytest.mark.parametrize(("weighting", "share"), [("none", 1.0), ("probability", 0.1)])
def test_the_validation_loss_is_the_mean_likelihood_of_the_tokens_of_all_batches_whatever_they_weigh(
    run, weighting, share
):
    class Backend(FakeBackend):
        def evaluate(self, batch, loss):
            number, count = float(batch.sequences), float(batch["loss_mask"].sum())
            tokens.append((number, count))
            return {"loss": mean(number * share), "nll": mean(number * count, count)}

    tokens: list[tuple[float, float]] = []
    config = chosen(batch_size=4, loss={"use": "nll", "weighting": weighting})
    found = run(20, config, backend=Backend()).steps.start
    mean_loss = sum(number * count for number, count in tokens[:2]) / sum(count for _, count in tokens[:2])
    assert len({number for number, _ in tokens}) == 2  # batches of four records and of one
    assert found == pytest.approx({"validation/loss": mean_loss, "validation/perplexity": math.exp(mean_loss)})


def test_each_of_several_validation_files_has_a_loss_beside_that_of_all(run):
    class Backend(FakeBackend):
        def evaluate(self, batch, loss):
            number, count = float(batch.sequences), float(batch["loss_mask"].sum())
            return {"loss": mean(number), "nll": mean(number * count, count)}

    more = [{"limit": 2}, {"limit": 4, "name": "short"}]
    found = run(20, chosen(batch_size=4), backend=Backend(), more=more).steps.start
    names = ["", "validation/", "validation-1/", "short/"]
    assert set(found) == {f"validation/{name}{metric}" for name in names for metric in ("loss", "perplexity")}
    assert found["validation/validation/loss"] == pytest.approx((4 * 4 + 1) / 5)  # each record has as many tokens
    assert (found["validation/validation-1/loss"], found["validation/short/loss"]) == pytest.approx((2, 4))
    assert found["validation/loss"] == pytest.approx((4 * 4 + 1 + 2 * 2 + 4 * 4) / 11)


def test_perplexity_is_given_only_of_a_likelihood_and_never_overflows():
    assert with_perplexity({"loss": mean(2.0)}) == {"loss": mean(2.0)}
    assert math.isfinite(with_perplexity({"nll": mean(1e9)})["perplexity"].number())
