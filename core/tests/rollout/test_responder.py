"""What a further model that generates is asked, and what it answers."""

import asyncio

import pytest

from whet.data.messages import Message
from whet.errors import DataError
from whet.rollout.responder import RoleResponder
from whet_testing.fakes import ByteChat, FakeGenerator

TALK = [Message("user", "Is 4 even?"), Message("assistant", "Yes."), Message("user", "Sure?")]


def asked(rule, *calls, longest=0):
    """Return the replies to several calls made together, and the requests that the generator got."""
    generator = FakeGenerator(rule)
    responder = RoleResponder(lambda: generator, lambda: ByteChat(), 16, longest, "judge")

    async def together():
        return await asyncio.gather(*(responder.reply(TALK, **call) for call in calls))

    return asyncio.run(together()), generator.requests


def test_the_whole_conversation_is_rendered_for_the_role():
    (reply,), (request,) = asked("I am sure.", {"seed": 3})
    assert reply.text == "I am sure."
    assert ByteChat().decode(request.tokens) == (
        "user: Is 4 even?\nassistant: Yes.\nuser: Sure?\nassistant: "
    )  # fmt: skip
    assert (request.sampling.max_tokens, request.sampling.temperature, request.sampling.stop) == (16, 1.0, ())


def test_randomness_depends_on_the_seed_and_the_role_alone():
    rule = lambda prompt, rng: str(rng.integers(10**9))  # noqa: E731
    replies, requests = asked(rule, {"seed": 3}, {"seed": 4}, {"seed": 3})
    assert replies[0].text == replies[2].text != replies[1].text
    assert len({request.id for request in requests}) == 3
    other = RoleResponder(lambda: FakeGenerator(rule), lambda: ByteChat(), 16, 0, "user")
    assert asyncio.run(other.reply(TALK, seed=3)).text != replies[0].text


def test_a_reply_may_have_limits_of_its_own_and_a_beginning():
    call = {"seed": 1, "max_tokens": 4, "stop": ["."], "temperature": 0.0, "prefill": "Score: "}
    (reply,), (request,) = asked("10 of 10.", call)
    assert reply.text == "Score: 10 o"
    assert reply.stop == "length"
    assert ByteChat().decode(request.tokens).endswith("assistant: Score: ")
    assert (request.sampling.max_tokens, request.sampling.temperature, request.sampling.stop) == (4, 0.0, (".",))


def test_a_conversation_without_room_for_a_response_is_refused_with_what_to_change():
    length = len(ByteChat().prompt(TALK))
    (reply,), (request,) = asked("I am sure.", {"seed": 1}, longest=length + 4)
    assert request.sampling.max_tokens == 4
    assert reply.stop == "length"
    with pytest.raises(DataError, match=f"has {length} tokens for the role 'judge', .* {length} positions; lower"):
        asked("I am sure.", {"seed": 1}, longest=length)
