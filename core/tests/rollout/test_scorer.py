"""What is asked of a further model, and what becomes of conversations that are too long for it."""

import asyncio
import logging
from types import SimpleNamespace

import numpy as np
import pytest

from whet.data.messages import Message
from whet.errors import DataError
from whet.rollout.scorer import RoleScorer

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


@pytest.mark.parametrize("copied", [True, False], ids=["to_thread", "executor"])
def test_threads_of_an_episode_are_answered(copied):
    chat = SimpleNamespace(training=lambda talk, train_on: SimpleNamespace(tokens=np.array([len(talk)])))
    scorer = RoleScorer(lambda: Last(), lambda: chat, 0, "judge")

    async def episode():
        def blocking():
            return asyncio.run(scorer.value(TALK))

        started = (
            asyncio.to_thread(blocking) if copied else asyncio.get_running_loop().run_in_executor(None, blocking)
            for _ in range(5)
        )
        return await asyncio.gather(*started, scorer.value(TALK[:1]))

    try:
        assert asyncio.run(asyncio.wait_for(episode(), 60)) == [2.0] * 5 + [1.0]
    finally:
        scorer.close()


def test_a_request_that_is_cancelled_holds_up_no_other():
    chat = SimpleNamespace(training=lambda talk, train_on: SimpleNamespace(tokens=np.array([len(talk)])))
    scorer = RoleScorer(lambda: Last(), lambda: chat, 0, "judge")

    async def episode():
        given_up = asyncio.create_task(scorer.value(TALK))
        await asyncio.sleep(0)
        given_up.cancel()
        return await scorer.value(TALK)

    try:
        assert asyncio.run(asyncio.wait_for(episode(), 60)) == 2.0
    finally:
        scorer.close()


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
