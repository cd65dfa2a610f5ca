"""Templates that rewrite history: the conversation goes on in a further sequence, and each response is trained once."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from whet.data.messages import Message
from whet.data.metrics import mean
from whet.data.records import Episode, Group, Sampling, Task
from whet.interfaces.chat import Chat
from whet.interfaces.environment import Model
from whet.plugins.features import chats
from whet.rollout.collate import collate, rollout_metrics
from whet.rollout.recorded import Assignment
from whet.rollout.routing import Route
from whet_testing.fakes import FakeGenerator
from whet_testing.playing import make_player

FORGETS = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content.split('</think>')[-1].lstrip() if m.role == 'assistant' and loop.index0 < ns.last else m.content }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""As Qwen 3 does: reasoning before the last message of the user is dropped. In a loop of tools it stays."""
APPENDS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ANSWERS = ["<think>ab</think>one", "two", "<think>c</think>three", "<think>d</think>four"]
TURNS = (Message("user", "1?"), Message("tool", "2"), Message("user", "3?"), Message("user", "4?"))
Talk = Callable[[Model], Awaitable[Mapping[str, float]]]


async def talk(model: Model) -> Mapping[str, float]:
    for message in TURNS:
        await model.reply(message)
    return {"done": 1.0}


def play(folder: Path, play_it: Talk = talk, template: str = FORGETS, **changes: Any) -> tuple[Episode, FakeGenerator]:
    class Played:
        reward_weights: Mapping[str, float] = {"turn": 2.0}

        def tasks(self, split: str) -> list[Task]:
            return [Task("hello")]

        async def run(self, task: Task, model: Model) -> Mapping[str, float]:
            return await play_it(model)

        def close(self) -> None:
            pass

    chat = chats().ChatTokenizer(folder, template)
    generator = FakeGenerator(list(ANSWERS), chat)
    player = make_player(generator, chat, **{"sampling": Sampling(max_tokens=100), **changes})
    return asyncio.run(player.episode(Assignment(Route("e", Played(), "train"), Task("x"), 0, 0), 0)), generator


def trained(chat: Chat, episode: Episode) -> list[str]:
    return [chat.decode(t.tokens[a:b], skip_special=False) for t in episode.trajectories for a, b in t.turns]


def test_each_response_is_trained_once_with_the_tokens_that_the_engine_made(tiny_model_folder: Path) -> None:
    episode, generator = play(tiny_model_folder)
    chat = chats().ChatTokenizer(tiny_model_folder, FORGETS)
    assert [t.part for t in episode.trajectories] == [0, 1, 2]
    assert [len(t.turns) for t in episode.trajectories] == [2, 1, 1], "a loop of tools only appends"
    assert trained(chat, episode) == [f"{answer}<|im_end|>" for answer in ANSWERS]
    for t in episode.trajectories:
        inside = np.zeros(len(t.tokens), np.bool_)
        for begin, end in t.turns:
            inside[begin:end] = True
        assert np.array_equal(inside, t.loss_mask)
        assert np.array_equal(t.logprobs != 0, t.loss_mask)
    asked = [t.tokens[:begin].tolist() for t in episode.trajectories for begin, _ in t.turns]
    assert asked == [request.tokens.tolist() for request in generator.requests]
    assert len({request.id for request in generator.requests}) == 4
    assert len({request.seed for request in generator.requests}) == 4
    assert episode.turns == 4
    assert [content for role, content in episode.messages if role == "assistant"] == ANSWERS, "what was written"


def test_a_further_sequence_begins_with_what_the_template_renders(tiny_model_folder: Path) -> None:
    episode, _ = play(tiny_model_folder)
    chat = chats().ChatTokenizer(tiny_model_folder, FORGETS)
    last = episode.trajectories[-1]
    said = [Message("assistant", text) for text in ANSWERS]
    whole = tuple(m for pair in zip(TURNS, said, strict=True) for m in pair)[:-1]
    assert last.tokens[: last.prompt_length].tolist() == chat.prompt(whole).tolist()
    assert "<think>" not in chat.decode(last.tokens[: last.prompt_length])


def test_a_template_that_appends_makes_one_sequence(tiny_model_folder: Path) -> None:
    episode, _ = play(tiny_model_folder, template=APPENDS)
    assert [t.part for t in episode.trajectories] == [0]
    group = Group(0, "e", 0, (episode,))
    assert not {"share", "conversation", "span_rewards"} & set(collate([group], {"e": 1.0}).columns)
    assert "rewritten" not in rollout_metrics([group])


def test_an_episode_counts_once_however_many_sequences_it_has(tiny_model_folder: Path) -> None:
    rewritten, appended = (play(tiny_model_folder, template=template)[0] for template in (FORGETS, APPENDS))
    group = Group(0, "e", 0, (rewritten, appended))
    batch = collate([group], {"e": 1.0})
    assert batch["member"].tolist() == [0, 0, 0, 1]
    assert batch["episode"].tolist() == [0, 0, 0, 1]
    counts = [int(t.loss_mask.sum()) for t in rewritten.trajectories]
    assert batch["conversation"].tolist() == [0, 0, 0, 1]
    np.testing.assert_allclose(batch["share"], [*(n / sum(counts) for n in counts), 1.0], rtol=1e-6)
    assert group.compared()[0].tolist() == [1.0, 1.0]
    assert rollout_metrics([group])["rewritten"] == mean(1, 2)


async def rewarded(model: Model) -> Mapping[str, float]:
    for number, message in enumerate(TURNS):
        await model.reply(message)
        model.reward("turn", float(10**number))
    model.reward("whole", 0.5, of="sequence")
    return {"given": 0.25}


def test_rewards_of_turns_stay_with_their_tokens_and_the_total_is_that_of_one_sequence(tiny_model_folder: Path) -> None:
    (rewritten, _), (appended, _) = (play(tiny_model_folder, rewarded, template) for template in (FORGETS, APPENDS))
    assert rewritten.rewards == appended.rewards == {"given": 0.25, "turn": 1111.0, "whole": 0.5}
    assert rewritten.reward == appended.reward == 2 * 1111 + 0.75
    assert [[s.value for s in t.spans] for t in rewritten.trajectories] == [[1.0, 10.0], [100.0], [1000.0]]
    for t in rewritten.trajectories:
        assert [(s.begin, s.end) for s in t.spans] == list(t.turns)
    batch = collate([Group(0, "e", 0, (rewritten,))], {"e": 1.0})
    assert batch["reward"].tolist() == [2 * 1111 + 0.75] * 3
    assert batch["turn"][batch["loss_mask"]].tolist() == batch["turn"][batch["turn"] >= 0].tolist()
    assert list(dict.fromkeys(batch["turn"][batch["turn"] >= 0].tolist())) == [0, 1, 2, 3], "turns of the conversation"
    assert batch["member"].tolist() == [0, 0, 0], "a conversation is one member even where it has rewards of its own"
    np.testing.assert_allclose(rewritten.trajectories[0].reward, appended.trajectories[0].reward)


async def forked(model: Model) -> Mapping[str, float]:
    await model.reply(TURNS[0])
    other = model.fork()
    await other.reply(TURNS[2])
    await model.reply(TURNS[1])
    await other.reply(TURNS[3])
    return {"done": 1.0}


def test_a_fork_whose_history_is_rewritten_trains_its_own_responses_alone(tiny_model_folder: Path) -> None:
    episode, _ = play(tiny_model_folder, forked)
    chat = chats().ChatTokenizer(tiny_model_folder, FORGETS)
    assert sorted(trained(chat, episode)) == sorted(f"{answer}<|im_end|>" for answer in ANSWERS)
    assert [t.part for t in episode.trajectories] == [0, 0]


def test_shorter_history_makes_room_in_the_context(tiny_model_folder: Path) -> None:
    episode, _ = play(tiny_model_folder)
    longest = max(len(t.tokens) for t in episode.trajectories)
    again, _ = play(tiny_model_folder, max_context=longest)
    assert not again.context_full
    assert [t.tokens.tolist() for t in again.trajectories] == [t.tokens.tolist() for t in episode.trajectories]


@pytest.mark.parametrize(
    "arguments", [{"enable_thinking": False}, {"effort": "low"}, {"enable_thinking": True, "n": 3}]
)
def test_a_template_gets_its_arguments(tiny_model_folder: Path, arguments: dict[str, Any]) -> None:
    source = (
        APPENDS + "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{{ effort }}"
    )
    source += "{{ n }}"
    prompt = chats().ChatTokenizer(tiny_model_folder, source, arguments=arguments).prompt((Message("user", "x"),))
    text = chats().ChatTokenizer(tiny_model_folder).decode(prompt)
    assert text.endswith("assistant\n" + {False: "<think></think>"}.get(arguments.get("enable_thinking"), "")
                         + str(arguments.get("effort", "")) + str(arguments.get("n", "")))  # fmt: skip


def test_a_response_that_is_forgotten_leaves_the_history_as_it_was(tiny_model_folder: Path) -> None:
    async def given_up(model: Any) -> Mapping[str, float]:
        await model.reply(TURNS[0])
        for one in (model, model.fork()):  # the fork has no response of its own
            before = [part.tokens.tolist() for part in one._parts], one.messages, one.turns
            await one.reply(TURNS[2])
            one.forget()
            assert ([part.tokens.tolist() for part in one._parts], one.messages, one.turns) == before
        return {"done": 1.0}

    episode, _ = play(tiny_model_folder, given_up)
    assert [len(t.turns) for t in episode.trajectories] == [1]
