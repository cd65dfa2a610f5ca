import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from whet.component import Spec
from whet.data.batch import from_sequences
from whet.data.messages import Message
from whet.data.records import Completion, Request, Sampling
from whet.errors import CheckpointError
from whet.interfaces.backend import Backend
from whet.interfaces.environment import Model
from whet.interfaces.generator import Generator
from whet.interfaces.logger import Logger
from whet.interfaces.weights import TransferSpec
from whet_testing.fakes import ByteCodec, FakeBackend, FakeGenerator, FakeModel, MemoryLogger

CODEC = ByteCodec()
LINK = TransferSpec("disk", "nowhere", "session", version=3)


def ask(generator: Generator, prompt: str = "2+2=", seed: int = 0, **sampling: Any) -> Completion:
    settings = Sampling(**{"stop_tokens": CODEC.stop_tokens, **sampling})
    return asyncio.run(generator.generate(Request("r", CODEC.encode(prompt), settings, seed)))


def test_fakes_are_what_they_stand_in_for() -> None:
    assert isinstance(FakeModel(""), Model)
    assert isinstance(FakeGenerator(""), Generator)
    assert isinstance(FakeBackend(), Backend)
    assert isinstance(MemoryLogger(), Logger)


def test_a_model_keeps_the_conversation() -> None:
    model = FakeModel(["calc 2+2", "4"])
    first = asyncio.run(model.reply("2+2?"))
    second = asyncio.run(model.reply([Message("tool", "4")]))
    assert (first.text, second.text) == ("calc 2+2", "4")
    assert [(m.role, m.text) for m in model.messages] == [
        ("user", "2+2?"), ("assistant", "calc 2+2"), ("tool", "4"), ("assistant", "4"),
    ]  # fmt: skip


def test_a_fork_has_the_history_and_leaves_its_origin_alone() -> None:
    model = FakeModel(["a", "b"])
    asyncio.run(model.reply("hello"))
    fork = model.fork()
    assert asyncio.run(fork.reply("again")).text == "b"
    assert [m.text for m in fork.messages] == ["hello", "a", "again", "b"]
    assert [m.text for m in model.messages] == ["hello", "a"]
    assert model.forks == [fork]


def test_a_model_may_follow_a_rule() -> None:
    model = FakeModel(lambda conversation: conversation[-1].text.upper())
    assert asyncio.run(model.reply("shout")).text == "SHOUT"


def test_the_stop_token_is_kept_last() -> None:
    completion = ask(FakeGenerator("four"))
    assert CODEC.decode(completion.tokens) == "four"
    assert completion.tokens[-1] == 256
    assert completion.stop == "stop"
    assert len(completion.logprobs) == 5
    assert np.all(completion.logprobs <= 0)


def test_an_answer_that_is_too_long_is_cut() -> None:
    completion = ask(FakeGenerator("four"), max_tokens=3)
    assert (CODEC.decode(completion.tokens), completion.stop) == ("fou", "length")


def test_tokens_up_to_the_one_that_completes_a_stop_string_are_kept() -> None:
    completion = ask(FakeGenerator("a</calc>b"), stop=("</calc>",))
    assert (CODEC.decode(completion.tokens), completion.stop) == ("a</calc>", "stop")


def test_a_rule_draws_from_the_requests_seed() -> None:
    generator = FakeGenerator(lambda prompt, rng: prompt + str(rng.integers(1000)))
    texts = [CODEC.decode(ask(generator, seed=seed).tokens) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    assert texts[0].startswith("2+2=")


def test_seeds_do_not_matter_at_temperature_0() -> None:
    generator = FakeGenerator(lambda prompt, rng: str(rng.integers(1000)))
    one, two = (ask(generator, seed=seed, temperature=0.0) for seed in (1, 2))
    assert np.array_equal(one.tokens, two.tokens)
    assert np.array_equal(one.logprobs, two.logprobs)


def test_a_script_is_followed_in_order_and_ends() -> None:
    generator = FakeGenerator(["one", "two"])
    assert [CODEC.decode(ask(generator).tokens) for _ in range(2)] == ["one", "two"]
    with pytest.raises(AssertionError, match="script"):
        ask(generator)


def test_new_weights_show_in_the_versions() -> None:
    generator = FakeGenerator("x")
    generator.receive_weights(LINK, version=3)
    assert ask(generator).versions == ((0, 3),)


def test_a_cancelled_request_is_remembered() -> None:
    generator = FakeGenerator("x", delay_seconds=60)

    async def cancel() -> None:
        task = asyncio.create_task(generator.generate(Request("r", CODEC.encode("a"), Sampling(), 0)))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(cancel())
    assert generator.cancelled == ["r"]


def test_a_backend_counts_steps_that_had_something_to_learn(tmp_path: Path) -> None:
    def batch(mask: list[int]) -> Any:
        return from_sequences([{"tokens": [1, 2, 3], "loss_mask": mask}], prompt_lengths=[1])

    backend = FakeBackend()
    first = backend.train(batch([0, 1, 1]), Spec("a:b"))["loss"].number()
    second = backend.train(batch([0, 0, 1]), Spec("a:b"))["loss"].number()
    backend.train(batch([0, 0, 0]), Spec("a:b"))
    assert (backend.step, len(backend.trained)) == (2, 3)
    assert second < first
    assert backend.score(batch([0, 1, 1]), ("logprobs",))["logprobs"].tolist() == [0, -1, -1]
    backend.save(tmp_path / "a").result()
    other = FakeBackend()
    other.load(tmp_path / "a")
    assert other.step == 2
    with pytest.raises(CheckpointError, match="nothing that a FakeBackend saved"):
        other.load(tmp_path)


def test_a_logger_remembers() -> None:
    logger = MemoryLogger()
    logger.log(1, {"loss": 2.0})
    logger.log(2, {"loss": 1.0, "lr": 0.1})
    logger.close(failed=False)
    logger.close(failed=True)
    assert logger.curve("loss") == [(1, 2.0), (2, 1.0)]
    assert logger.curve("lr") == [(2, 0.1)]
    assert logger.failed is False
