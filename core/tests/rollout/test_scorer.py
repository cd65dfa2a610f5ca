"""What is asked of a further model, and what becomes of conversations that are too long for it."""

import asyncio
import logging
from types import SimpleNamespace

import numpy as np
import pytest

from whet.data.messages import Message
from whet.errors import DataError
from whet.rollout.gate import Gate
from whet.rollout.responder import RoleResponder
from whet.rollout.scorer import RoleScorer
from whet_testing.fakes import ByteChat, FakeGenerator

TALK = (Message("user", "?"), Message("assistant", "0123456789"))


class Last:
    """A model to which a conversation is worth its first token that it sees; keeps the batches."""

    def __init__(self):
        self.batches = []

    def score(self, batch, outputs):
        self.batches.append(batch)
        starts = np.cumsum(batch["lengths"]) - batch["lengths"]
        return {"values": np.repeat(batch["tokens"][starts], batch["lengths"]).astype(np.float32)}


@pytest.fixture
def ask():
    def ask(longest, *talks, cut=False):
        chat = SimpleNamespace(
            training=lambda talk, train_on: SimpleNamespace(tokens=np.frombuffer(talk[-1].text.encode(), "u1"))
        )
        backend = Last()
        scorer = RoleScorer(lambda: backend, lambda: chat, longest, "critic")

        async def together():
            return await asyncio.gather(*[scorer.value(talk, cut=cut) for talk in talks])

        try:
            return asyncio.run(together()), backend.batches
        finally:
            scorer.close()

    return ask


def test_what_is_asked_together_travels_together(ask):
    values, (batch,) = ask(0, TALK, TALK[:1])
    assert values == [ord("0"), ord("?")]
    assert batch["lengths"].tolist() == [11, 2]


def test_threads_of_an_episode_are_answered_on_its_loop():
    chat = SimpleNamespace(training=lambda talk, train_on: SimpleNamespace(tokens=np.array([len(talk)])))
    responding, loops = FakeGenerator("yes"), []
    scorer = RoleScorer(lambda: Last(), lambda: chat, 0, "judge")
    responder = RoleResponder(lambda: responding, lambda: ByteChat(), 16, 0, "user")

    async def answers():
        loops.append(asyncio.get_running_loop())
        return await scorer.value(TALK), (await responder.reply(TALK, seed=1)).text

    async def episode():
        async with Gate().time_limit(60):
            return await asyncio.gather(*(asyncio.to_thread(asyncio.run, answers()) for _ in range(3)), answers())

    try:
        assert asyncio.run(asyncio.wait_for(episode(), 60)) == [(2.0, "yes")] * 4
    finally:
        scorer.close()
    assert len(set(loops)) == 4


def test_a_conversation_that_is_too_long_is_refused_with_what_to_change(ask):
    assert ask(10, TALK)[0] == [ord("0")]
    with pytest.raises(DataError, match="has 10 tokens for the role 'critic', whose positions end at 9; lower rollout"):
        ask(9, TALK)


def test_where_it_is_to_be_cut_its_end_is_read_and_a_warning_counts(ask, caplog):
    with caplog.at_level(logging.WARNING):
        values, (batch,) = ask(4, TALK, TALK, TALK[:1], cut=True)
    assert values == [ord("6"), ord("6"), ord("?")]
    assert batch["lengths"].tolist() == [5, 5, 2]
    assert [record.message.rpartition("(")[2] for record in caplog.records] == ["1 of these so far)"]
