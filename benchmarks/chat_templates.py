"""Plays conversations with each chat template of a folder, and prints what each template supports.

    python benchmarks/chat_templates.py FOLDER [--only WORD] [--show]

Each template meets a tokenizer of bytes that knows its special tokens. The model is a script: it writes what the
template itself would write for a turn. For each talk the table has the number of sequences that an episode of it has
(1: the template only appends), or why it could not be played. Checked are: each produced token is trained exactly once,
as the engine made it; each prompt is what the engine was asked to continue.

    plain      three turns of the user
    thinking   the same, with reasoning
    tools      a call, its result, a call, its result, an answer, a further question
    calls      how calls are written; and whether a call comes back that was written
"""

import argparse
import asyncio
import json
import re
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from whet.data.messages import Call, Conversation, Message
from whet.data.records import Episode, Sampling, Task
from whet.errors import DataError, WhetError
from whet.interfaces.environment import Model
from whet.rollout.recorded import Assignment
from whet.rollout.routing import Route
from whet_chat.learn import common
from whet_chat.response import response_format
from whet_chat.tokenizer import ChatTokenizer
from whet_testing.fakes import FakeGenerator
from whet_testing.playing import make_player

SPECIAL = re.compile(
    r"<\|[^|<>'\"{}]{1,40}\|>|<｜[^｜'\"{}]{1,40}｜>|</?s>|\[[A-Z_/]{4,30}\]|<[a-z]+_of_[a-z]+>|\[e~\[|<\|[a-z_]+>|<[a-z_]+\|>"
)
ENDS = ("<|END_OF_TURN_TOKEN|>", "<SPECIAL_12>", "<|call|>", "<|end_of_msg|>")
"""The end tokens of tokenizers whose templates do not end every turn with the same token."""
TOOL = json.dumps({
    "type": "function",
    "function": {
        "name": "look_up", "description": "Look a word up.",
        "parameters": {
            "type": "object", "required": ["word"],
            "properties": {"word": {"type": "string", "description": "The word."},
                           "limit": {"type": "integer", "description": "Most results."}},
        },
    },
})  # fmt: skip
FIRST, SECOND = (Call(f"{i}23456789", "look_up", json.dumps({"word": f"cut {i}", "limit": i})) for i in (1, 2))


def said(text: str, *calls: Call, thought: str = "") -> Message:
    """Return a message of the assistant."""
    return Message("assistant", text, calls, reasoning=thought)


TALKS: dict[str, Conversation] = {
    "plain": (
        Message("user", "One?"), said("First answer."), Message("user", "Two?"), said("Second answer."),
        Message("user", "Three?"), said("Third answer."),
    ),
    "thinking": (
        Message("user", "One?"), said("First answer.", thought="I think of one."), Message("user", "Two?"),
        said("Second answer.", thought="I think of two."), Message("user", "Three?"),
        said("Third answer.", thought="I think of three."),
    ),
    "tools": (
        Message("user", "One?"), said("", FIRST), Message("tool", "found: 7", answers=FIRST.id),
        said("", SECOND), Message("tool", "found: 8", answers=SECOND.id), said("Seven and eight."),
        Message("user", "Sure?"), said("Yes."),
    ),
}  # fmt: skip


def tokenizer_folder(folder: Path, source: str) -> Path:
    """Write a tokenizer of bytes with the special tokens of a template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    end = next((token for token in ENDS if token in source), "</s>")
    named = {"bos_token": "<s>", "eos_token": end, "pad_token": "<pad>", "unk_token": "<unk>"}
    special = dict.fromkeys([*named.values(), *SPECIAL.findall(source)])
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    (folder / "chat_template.jinja").write_text(source)
    return folder


class Scripted:
    """An environment that plays a talk. The model writes each turn as the template would."""

    reward_weights: Mapping[str, float] = {}

    def __init__(self, chat: ChatTokenizer, talk: Conversation, generator: FakeGenerator) -> None:
        self.chat, self.talk, self.generator = chat, talk, generator
        self.raw = ""
        self.read: list[tuple[tuple[Call, ...], tuple[Call, ...]]] = []

    def tasks(self, split: str) -> list[Task]:
        """Return the only task."""
        return [Task("talk")]

    async def run(self, task: Task, model: Model) -> Mapping[str, float]:
        """Play the talk."""
        tools = (TOOL,) if any(message.calls for message in self.talk) else ()
        talk = model.with_tools(tools) if tools else model
        waiting: list[Message] = []
        ids: dict[str, str] = {}
        for i, message in enumerate(self.talk):
            if message.role != "assistant":
                answers = ids.get(message.answers, message.answers)
                waiting.append(Message(message.role, message.content, answers=answers))
                continue
            self.next = raw_turn(self.chat.with_tools(tools), self.talk[:i], message)
            self.raw += self.next
            reply = await talk.reply(waiting)
            self.read.append((message.calls, reply.calls))
            ids |= {mine.id: theirs.id for mine, theirs in zip(message.calls, reply.calls, strict=False)}
            waiting = []
        return {"done": 1.0}

    def close(self) -> None:
        """Do nothing."""


def raw_turn(chat: ChatTokenizer, before: Conversation, message: Message) -> str:
    """Return what the model writes for a turn, up to the token that ends it, as the template has it last."""
    asked = chat.render(before, generation_prompt=True)
    whole = chat.render((*before, message))
    stops = [chat.decode([token], skip_special=False) for token in chat.stop_tokens]
    if not whole.startswith(asked):  # as with an empty reasoning block that later turns lack
        shared = common(asked, whole)
        head = whole.rfind("<", 0, shared) if whole.rfind("<", 0, shared) > whole.rfind(">", 0, shared) else shared
        turn = whole[head:]
        opened = asked[head:].strip()
        turn = turn.removeprefix(opened) if opened else turn
    else:
        turn = whole[len(asked) :]
    ends = [turn.rfind(stop) for stop in stops if stop and stop in turn]
    return turn[: max(ends)] if ends else turn.rstrip()


def play(chat: ChatTokenizer, talk: Conversation) -> tuple[Episode, Scripted]:
    """Play a talk as an episode."""
    stop = chat.stop_tokens[:1]
    environment: Scripted

    class Script(FakeGenerator):
        """Writes the next turn of the talk, and the token that ends it."""

        def _cut(self, tokens: Any, request: Any) -> Any:
            return np.concatenate([tokens, np.array(stop, np.int64)]), "stop"

    generator = Script(lambda prompt, rng: environment.next, chat)
    environment = Scripted(chat, talk, generator)
    player = make_player(generator, chat, sampling=Sampling(max_tokens=100_000))
    route = Route("talk", environment, "train")
    episode = asyncio.run(player.episode(Assignment(route, Task("talk"), 0, 0), 0))
    check(chat, episode, generator)
    return episode, environment


def check(chat: ChatTokenizer, episode: Episode, generator: FakeGenerator) -> None:
    """Raise `AssertionError` if a token that the engine made is not trained exactly once, as it was made."""
    trained = [t.tokens[begin:end].tolist() for t in episode.trajectories for begin, end in t.turns]
    assert len(trained) == len(generator.requests) == episode.turns
    for t in episode.trajectories:
        inside = np.zeros(len(t.tokens), bool)
        for begin, end in t.turns:
            inside[begin:end] = True
        assert np.array_equal(inside, t.loss_mask)
    prompts = [t.tokens[:begin].tolist() for t in episode.trajectories for begin, _ in t.turns]
    assert prompts == [request.tokens.tolist() for request in generator.requests]


def outcome(chat: ChatTokenizer, name: str) -> str:
    """Return the number of sequences of a talk, or why it was not played."""
    tools = (TOOL,) if name == "tools" else ()
    try:
        chat.with_tools(tools).prompt(TALKS[name][:1])
        raw_turn(chat.with_tools(tools), TALKS[name][:1], TALKS[name][1])
        chat.with_tools(tools).render(TALKS[name])
    except DataError as error:
        return f"template: {str(error).rpartition(': ')[2][:60]}"
    try:
        episode, environment = play(chat, TALKS[name])
    except WhetError as error:
        return f"REFUSED: {str(error).rpartition('last: ')[2][:300]}"
    except AssertionError as error:
        return f"WRONG: {error}"
    if tools and "look_up" not in environment.raw:
        return f"{len(episode.trajectories)}, the template writes no calls"
    for wanted, found in environment.read:
        if tools and [(c.name, json.loads(c.arguments)) for c in wanted] != [
            (c.name, json.loads(c.arguments)) for c in found
        ]:
            return f"{len(episode.trajectories)}, CALLS NOT READ: {found!r:.80}"
    return str(len(episode.trajectories))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="", help="templates with this in their name")
    only = parser.parse_args()
    totals = {name: Counter[str]() for name in TALKS}
    for file in sorted(only.folder.glob("*.jinja")):
        if only.only not in file.name:
            continue
        source = file.read_text(encoding="utf-8")
        with tempfile.TemporaryDirectory() as folder:
            chat = ChatTokenizer(tokenizer_folder(Path(folder), source))
            found = {name: outcome(chat, name) for name in TALKS}
            shows = type(response_format(chat).calls).__name__
        for name, one in found.items():
            totals[name][
                one.split(":")[0].split(",")[0] if not one[0].isdigit() or "CALLS" not in one else "calls not read"
            ] += 1
        print(f"{file.stem[:44]:45} {shows:14}", " | ".join(f"{name} {one}" for name, one in found.items()), flush=True)
    for name, counts in totals.items():
        print(name, dict(sorted(counts.items())))


if __name__ == "__main__":
    main()
