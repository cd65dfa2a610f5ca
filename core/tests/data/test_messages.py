import pytest

from whet.data.messages import Message, Text, conversation
from whet.errors import DataError


def test_a_string_is_one_part_of_text():
    assert Message("user", "hi") == Message("user", (Text("hi"),)) == Message("user", [Text("hi")])


def test_the_text_of_a_message_joins_its_parts():
    assert Message("user", (Text("a"), Text("b"))).text == "ab"


@pytest.mark.parametrize(
    "written",
    [
        "hi",
        Message("user", "hi"),
        [Message("user", "hi")],
        [{"role": "user", "content": "hi"}],
        [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
    ],
    ids=["string", "message", "messages", "dicts", "parts"],
)
def test_conversations_are_read_from_what_people_write(written):
    assert conversation(written) == (Message("user", "hi"),)


@pytest.mark.parametrize(
    ("written", "complaint"),
    [
        ([{"role": "user"}], "needs `role` and `content`"),
        (["hi"], "needs `role` and `content`"),
        ([{"role": "robot", "content": "hi"}], "role 'robot'.*wanted one of system, user, assistant, tool"),
        ([{"role": "user", "content": None}], "string or a list of parts"),
        ([{"role": "user", "content": ["hi"]}], "string or a list of parts"),
        ([{"role": "user", "content": [{"type": "image", "url": 7}]}], "a part of a message must be a text.*'url': 7"),
        ([{"role": [], "content": "hi"}], r"role \[\].*wanted one of"),
        (
            [{"role": "user", "content": [{"type": "text"}]}],
            "a part .* must be a text, .*found {'type': 'text'}",
        ),
        ([{"role": "user", "content": [{"type": "text", "text": 5}]}], "a part of a message must be a text.*5"),
        ({"role": "user"}, "needs `role` and `content`"),
        (7, "string or a list of messages, found 7"),
    ],
)
def test_what_is_no_conversation_is_named(written, complaint):
    with pytest.raises(DataError, match=complaint):
        conversation(written)


def test_conversations_are_hashable():
    assert len({conversation("hi"), conversation([{"role": "user", "content": "hi"}])}) == 1


def test_one_message_may_be_a_dict() -> None:
    assert conversation({"role": "user", "content": "hi"}) == (Message("user", "hi"),)
