"""Rewards with an address, rewards of a group, and what an episode is told about itself."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import numpy as np
import pytest

from whet.data.batch import Batch
from whet.data.messages import Image, Message, conversation
from whet.data.records import Episode, Group, Task
from whet.errors import DataError, EpisodeError
from whet.interfaces.environment import EpisodeInfo, Model
from whet.plugins.features import chats
from whet.rollout.collate import collate, record, rollout_metrics
from whet.rollout.episode import EpisodeFailed
from whet.rollout.recorded import Assignment
from whet.rollout.rewards import total_reward
from whet.rollout.routing import Route
from whet_testing.fakes import FakeGenerator
from whet_testing.playing import make_player

Play = Callable[[Task, Model], Awaitable[Mapping[str, float]]]


class Played:
    """An environment made of one function."""

    def __init__(self, run: Play, weights: Mapping[str, float] | None = None) -> None:
        self.run, self.reward_weights = run, weights or {}

    def tasks(self, split: str) -> list[Task]:
        return [Task("hello")]

    def close(self) -> None:
        pass


def group_of(environment: Any, samples: int = 2, index: int = 7, **player: Any) -> Group:
    assignment = Assignment(Route("game", environment, "train"), Task("hello"), 3, index, step=4, difficulty=0.5)
    return asyncio.run(make_player(FakeGenerator("xyz"), retries=0, **player).group(assignment, samples))


def batch_of(*groups: Group) -> Batch:
    return collate(groups, {"game": 1.0})


async def _game(task: Task, model: Model) -> Mapping[str, float]:
    white, black = model.fork("white"), model.fork("black")
    for player in (white, black, white):
        await player.reply("your move")
    won = 1.0 if model.episode.sample else -1.0
    white.reward("won", won, of="agent")
    black.reward("won", -won, of="agent")
    white.reward("legal", 0.5)
    return {"over": 1.0}


def test_each_agent_has_rewards_of_its_own_and_is_compared_with_itself() -> None:
    group = group_of(Played(_game, {"won": 2.0}))
    batch = batch_of(group)
    assert batch.info["agents"] == ("white", "black")
    assert batch["agent"].tolist() == [0, 1, 0, 1]
    assert batch["episode"].tolist() == [0, 0, 1, 1]
    assert batch["reward"].tolist() == [1 - 2 + 0.5, 1 + 2, 1 + 2 + 0.5, 1 - 2]
    assert batch["reward:won"].tolist() == [-1, 1, 1, -1]
    assert batch["reward:over"].tolist() == [1, 1, 1, 1]
    assert batch["reward:legal"].tolist() == [0.5, 0, 0.5, 0]
    assert len(set(batch["member"])) == 4
    # What an episode is worth is the mean over its sequences, so a zero-sum game is worth nothing.
    assert [episode.rewards["won"] for episode in group.episodes] == [0, 0]
    assert [rewards.tolist() for rewards in group.compared()] == [[-0.5, 3.5], [3.0, -1.0]]
    assert [rewards.tolist() for rewards in group.compared("won")] == [[-1, 1], [1, -1]]
    metrics = {name: metric.number() for name, metric in rollout_metrics([group]).items()}
    assert (metrics["reward/white/mean"], metrics["reward/black/mean"]) == (1.5, 1.0)
    assert metrics["reward/std"] == pytest.approx((np.std([-0.5, 3.5], ddof=1) + np.std([3, -1], ddof=1)) / 2)


def test_the_reward_of_a_turn_is_at_its_last_token() -> None:
    async def run(task: Task, model: Model) -> Mapping[str, float]:
        await model.reply("a")
        model.reward("fact", 1.0, tokens=(1, 2))
        model.reward("polite", 0.25)
        model.reward("polite", 0.25)
        await model.reply("b")
        model.reward("polite", 3.0)
        return {}

    group = group_of(Played(run, {"fact": 10.0}), samples=1)
    batch = batch_of(group)
    turns = group.episodes[0].trajectories[0].turns
    assert [int(batch["turn"][begin]) for begin, _ in turns] == [0, 1]
    assert ((batch["turn"] >= 0) == batch["loss_mask"]).all()
    placed = {int(i): float(batch["span_rewards"][i]) for i in np.flatnonzero(batch["span_rewards"])}
    assert placed == {turns[0][0] + 1: 10.0, turns[0][1] - 1: 0.5, turns[1][1] - 1: 3.0}
    assert batch["reward"].tolist() == [13.5]
    assert group.episodes[0].rewards == {"fact": 1.0, "polite": 3.5}
    (row,) = record(group)
    assert row["addressed"][0]["turns"] == [
        {"turn": 0, "name": "fact", "value": 1.0},
        {"turn": 0, "name": "polite", "value": 0.25},
        {"turn": 0, "name": "polite", "value": 0.25},
        {"turn": 1, "name": "polite", "value": 3.0},
    ]


def test_forks_with_rewards_of_their_own_count_each_and_others_count_together() -> None:
    def branching(own: bool) -> Play:
        async def run(task: Task, model: Model) -> Mapping[str, float]:
            await model.reply("a")
            branches = [model.fork(), model.fork()]
            for i, branch in enumerate(branches):
                await branch.reply("b")
                if own and model.episode.sample:  # in one of two episodes only: it decides for its group
                    branch.reward("solved", float(i), of="sequence")
            return {"done": 1.0}

        return run

    own = batch_of(group_of(Played(branching(True))))
    assert len(set(own["member"])) == 6
    assert own["reward"].tolist() == [1, 1, 1, 1, 1, 2]
    assert own["reward:solved"].tolist() == [0, 0, 0, 0, 0, 1]
    together = batch_of(group_of(Played(branching(False))))
    assert together["member"].tolist() == together["episode"].tolist() == [0, 0, 0, 1, 1, 1]
    assert not {"span_rewards"} & set(together.per_token)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (lambda model: model.reward("x", float("nan")), "wanted a finite number"),
        (lambda model: model.fork().reward("x", 1.0), "a turn of a sequence without a response"),
        (lambda model: model.reward("x", 1.0, tokens=(2, 9)), r"tokens \(2, 9\) of a turn; wanted .* from 0 to 4"),
        (lambda model: model.reward("x", 1.0, of="agent", tokens=(0, 1)), "of a agent; wanted a turn"),
    ],
)
def test_a_reward_without_an_address_is_refused(bad: Callable[[Any], None], message: str) -> None:
    async def run(task: Task, model: Model) -> Mapping[str, float]:
        await model.reply("a")
        bad(model)
        return {"done": 1.0}

    with pytest.raises(EpisodeFailed, match=message):
        group_of(Played(run))


class Ranked(Played):
    """Ranks the samples of a group by a secret."""

    def __init__(self, given: Callable[[Sequence[Episode]], Any]) -> None:
        super().__init__(_game, {"rank": 2.0})
        self.given = given

    async def group_rewards(self, task: Task, episodes: Sequence[Episode]) -> Sequence[Mapping[str, float]]:
        await asyncio.sleep(0)
        found: Sequence[Mapping[str, float]] = self.given(episodes)
        return found


def _raised(error: BaseException) -> Any:
    raise error


def test_an_environment_compares_the_episodes_of_a_group() -> None:
    group = group_of(Ranked(lambda episodes: [{"rank": float(e.sample)} for e in episodes]), samples=3)
    assert [episode.rewards["rank"] for episode in group.episodes] == [0, 1, 2]
    batch = batch_of(group)
    assert batch["reward:rank"].tolist() == [0, 0, 1, 1, 2, 2]
    assert batch["reward"].tolist() == [0.5, 2.0, 2.5 + 2, 0 + 2, 2.5 + 4, 0 + 4]


def test_a_weight_that_is_added_while_a_group_is_compared_holds_for_this_group() -> None:
    def given(episodes: Sequence[Episode]) -> list[dict[str, float]]:
        environment.reward_weights = {"rank": 0.0}
        return [{"rank": 5.0}] * len(episodes)

    environment = Ranked(given)
    assert [one.reward for one in group_of(environment).episodes] == [
        one.reward for one in group_of(Played(_game)).episodes
    ]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (lambda episodes: [{}], "group_rewards gave 1 items, wanted a mapping for each of 2 episodes"),
        (lambda episodes: None, "group_rewards gave None, wanted a mapping for each of 2 episodes"),
        (lambda episodes: {"rank": 1.0, "won": 0.0}, r"group_rewards gave {'rank': 1.0, .*, wanted a mapping for each"),
        (lambda episodes: [{"won": 1.0}] * 2, "gave the reward 'won', which the episode has already; rename one"),
        (lambda episodes: [1.0] * 2, "failed once; last: environment 'game' returned 1.0, wanted a mapping of reward"),
        (lambda episodes: [{"rank": float("inf")}] * 2, "gave the reward 'rank' = inf, wanted a finite number"),
        (lambda episodes: 1 / 0, r"task 3, group_rewards failed once; last: ZeroDivisionError"),
        (lambda episodes: _raised(asyncio.CancelledError()), "group_rewards failed once; last: CancelledError"),
        (lambda episodes: _raised(SystemExit(3)), "group_rewards failed once; last: SystemExit: 3"),
    ],
)
def test_wrong_rewards_of_a_group_fail_the_group(given: Any, message: str) -> None:
    with pytest.raises(EpisodeFailed, match=message):
        group_of(Ranked(given))


def test_an_episode_is_told_its_split_seeds_and_place() -> None:
    told: dict[int, EpisodeInfo] = {}

    async def run(task: Task, model: Model) -> Mapping[str, float]:
        told[model.episode.sample] = model.fork("other").episode
        await model.reply("a")
        return {"done": 1.0}

    for _ in range(2):
        group_of(Played(run), samples=2)
        first, second = told[0], told[1]
        assert (first.split, first.training, first.task, first.group, first.step) == ("train", True, 3, 7, 4)
        assert first.group_seed == second.group_seed
        assert first.seed != second.seed
        assert first.difficulty == 0.5
    group_of(Played(run), index=8)
    assert told[0].group_seed != first.group_seed
    group_of(Played(run), training=False, purpose="evaluate game")
    assert (told[0].training, told[0].group_seed == first.group_seed) == (False, False)


def test_a_response_at_another_temperature_and_a_prefill_are_context() -> None:
    generator = FakeGenerator("xyz")

    async def run(task: Task, model: Model) -> Mapping[str, float]:
        first = await model.reply("a", temperature=0.0, max_tokens=2, stop=["z"])
        assert first.text == "xy"
        second = await model.reply("b", prefill="<think>", max_tokens=100)
        assert second.text == "<think>xyz"
        return {"done": 1.0}

    assignment = Assignment(Route("game", Played(run), "train"), Task("hello"), 3, 7)
    episode = asyncio.run(make_player(generator, retries=0).episode(assignment, 0))
    asked = [(r.sampling.temperature, r.sampling.max_tokens, r.sampling.stop) for r in generator.requests]
    own = make_player(generator).sampling
    assert asked == [(0.0, 2, (*own.stop, "z")), (own.temperature, own.max_tokens, own.stop)]
    (one,) = episode.trajectories
    (begin, end), (again, last) = one.turns
    assert not one.loss_mask[begin:end].any()
    assert (one.versions[begin:end] == 0).all()
    assert (one.logprobs[begin:end] == 0).all()
    assert one.loss_mask[again:last].all()
    assert bytes(one.tokens[:again].astype(np.uint8)).endswith(b"<think>")
    assert episode.messages[-1] == ("assistant", "<think>xyz")
    assert not one.loss_mask[:again].any()


def test_rewards_that_nobody_gives_count_as_0_and_are_noted(caplog: pytest.LogCaptureFixture) -> None:
    async def run(task: Task, model: Model) -> Mapping[str, float]:
        await model.reply("a")
        return {}

    assert {episode.reward for episode in group_of(Played(run)).episodes} == {0.0}
    words = "environment 'game': an episode has no rewards, which counts as 0"
    assert caplog.messages == [words]
    group_of(Played(run))
    assert caplog.messages == [words] * 2, "once in each run"


@pytest.mark.parametrize("of_group", [False, True])
def test_a_weight_for_a_reward_that_no_episode_has_is_told_once(
    caplog: pytest.LogCaptureFixture, of_group: bool
) -> None:
    async def run(task: Task, model: Model) -> Mapping[str, float]:
        await model.reply("a")
        return {"ok": 1.0, "length": 3.0}

    async def ranked(task: Task, episodes: Sequence[Episode]) -> list[dict[str, float]]:
        return [{"lenght": 1.0}] * len(episodes)

    environment: Any = Played(run, {"lenght": 0.0})
    if of_group:
        environment.group_rewards = ranked
    route = Route("game", environment, "train")
    for index in range(2):
        asyncio.run(make_player(FakeGenerator("xyz")).group(Assignment(route, Task("hello"), 3, index), 2))
    words = "environment 'game': `reward_weights` names the reward 'lenght', which no episode has so far; length, ok"
    assert [message[: len(words)] for message in caplog.messages] == ([] if of_group else [words])


@pytest.mark.parametrize(
    ("weights", "given"),
    [
        ({"ok": 1.0, "rare": -0.1}, {"ok": 1.0}),  # no reward counts as 1 by mistake
        ({"rare": 0.5}, {}),
        ({"ok": 1.0}, {"ok": 1.0, "further": 1.0}),
    ],
)
def test_a_reward_that_an_episode_has_only_sometimes_may_have_a_weight(
    caplog: pytest.LogCaptureFixture, weights: Mapping[str, float], given: Mapping[str, float]
) -> None:
    async def run(task: Task, model: Model) -> Mapping[str, float]:
        await model.reply("a")
        return given

    group_of(Played(run, weights))
    assert "reward_weights" not in caplog.text


def test_a_reward_after_the_end_of_an_episode_is_an_error_and_told_once(caplog: pytest.LogCaptureFixture) -> None:
    late: list[asyncio.Task[None]] = []

    async def run(task: Task, model: Model) -> Mapping[str, float]:
        await model.reply("a")

        async def grade(fork: Model, what: Callable[[Model], object]) -> None:
            await asyncio.sleep(0.01)
            what(fork)

        late.append(asyncio.create_task(grade(model, lambda m: m.reward("late", 1.0))))
        late.append(asyncio.create_task(grade(model.fork(), lambda m: m.record("note", "x"))))
        return {"ok": 1.0}

    async def play() -> tuple[Group, list[Any]]:
        assignment = Assignment(Route("game", Played(run), "train"), Task("hello"), 3, 0)
        group = await make_player(FakeGenerator("xyz")).group(assignment, 2)
        return group, await asyncio.gather(*late, return_exceptions=True)

    group, errors = asyncio.run(play())
    assert [episode.rewards for episode in group.episodes] == [{"ok": 1.0}] * 2
    words = [f"environment 'game': model.{call} after the episode's end has no effect" for call in ("reward", "record")]
    assert [str(error).split(";")[0] for error in errors] == words * 2
    assert [type(error) for error in errors] == [EpisodeError] * 4
    assert [message.split(";")[0] for message in caplog.messages] == words


@pytest.mark.parametrize("begun", [True, False])
def test_a_reply_that_nobody_awaits_is_an_error(begun: bool, caplog: pytest.LogCaptureFixture) -> None:
    late: list[asyncio.Task[Any]] = []

    async def run(task: Task, model: Model) -> Mapping[str, float]:
        await model.reply("a")
        late.append(asyncio.create_task(model.reply("b")))  # type: ignore[arg-type]
        if begun:
            await asyncio.sleep(0.005)
        return {"ok": 1.0}

    async def play() -> Any:
        assignment = Assignment(Route("game", Played(run), "train"), Task("hello"), 3, 0)
        episode = await make_player(FakeGenerator("xyz", delay_seconds=0.03)).episode(assignment, 0)
        return episode, await asyncio.gather(*late, return_exceptions=True)

    episode, (error,) = asyncio.run(play())
    assert (episode.turns, len(episode.messages), type(error)) == (1, 2, EpisodeError)
    assert "model.reply after the episode's end has no effect" in caplog.text


def test_an_episode_records_what_its_environment_wants_to_see_again() -> None:
    board = Image("data:image/png;base64,AAAA")

    async def run(task: Task, model: Model) -> Mapping[str, float]:
        await model.reply("a")
        model.record("gold", "x" * 30_000)
        model.fork().record("board", board)
        model.record("state", np.arange(6).reshape(2, 3))
        return {"done": 1.0}

    (row,) = record(group_of(Played(run), samples=1))
    assert row["recorded"]["gold"] == "x" * 20_000 + " [10000 more characters]"
    assert row["recorded"]["board"] == {"type": "image", "url": board.url}
    assert row["recorded"]["state"] == [[0, 1, 2], [3, 4, 5]]
    json.dumps(row)


@pytest.mark.parametrize("value", [object(), np.zeros(5000), [{"a": 1}], b"x"])
def test_a_value_that_cannot_be_recorded_is_refused(value: Any) -> None:
    async def run(task: Task, model: Model) -> Mapping[str, float]:
        await model.reply("a")
        model.record("it", value)
        return {"done": 1.0}

    with pytest.raises(EpisodeFailed, match=r"it recorded 'it': an episode cannot record .*wanted text"):
        group_of(Played(run))


def test_a_message_may_have_an_image_that_records_show_and_models_do_not_read() -> None:
    parts = [
        {"type": "text", "text": "Look: "},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}},
    ]
    (message,) = conversation([{"role": "user", "content": parts}])
    assert message.text == "Look: "
    assert message.plain == [parts[0], {"type": "image", "url": "data:image/png;base64,AA"}]
    assert Message("user", "x").plain == "x"
    template = chats().ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", {}, datetime.now())
    with pytest.raises(DataError, match="a user message has an image, and no model reads images yet"):
        template.render((message,))
    with pytest.raises(DataError, match="a part of a message must be a text"):
        conversation([{"role": "user", "content": [{"type": "video"}]}])


def test_weights_that_make_a_reward_too_large_fail_the_episode() -> None:
    with pytest.raises(EpisodeError, match=r"weighted rewards add up to 1e\+19, wanted a finite number up to 1e"):
        total_reward({"a": 1e17}, {"a": 100.0})
    assert total_reward({"a": 1e17}, {"a": 10.0}) == 1e18
