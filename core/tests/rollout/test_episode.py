import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from whet.data.messages import Message
from whet.data.records import Completion, Episode, Request, Sampling, Task
from whet.errors import ContextFull, InfrastructureError, RequestLost, Undecided, WhetError, WorkerError
from whet.interfaces.environment import Model, SingleTurn
from whet.interfaces.undecided import note
from whet.plugins.features import chats
from whet.rollout.episode import EpisodeFailed
from whet.rollout.fail_fast import BrokenEnvironment
from whet.rollout.recorded import Assignment
from whet.rollout.routing import Route
from whet_testing.fakes import ByteChat, FakeGenerator
from whet_testing.playing import AltChat, AltTokens, make_player

END = ByteChat.stop_tokens[0]


class Played:
    """An environment made of one function."""

    reward_weights: Mapping[str, float] = {}

    def __init__(self, play: Callable[[Task, Model], Awaitable[Mapping[str, float]]]) -> None:
        self.run = play

    def tasks(self, split: str) -> list[Task]:
        return [Task("hello")]

    def close(self) -> None:
        pass


def assigned(environment: Any, index: int = 7, task: Task | None = None) -> Assignment:
    route = Route("puzzle", environment, "train")
    return Assignment(route, task or Task("hello", {"answer": "yes"}, "a.jsonl:4"), 3, index)


def play(environment: Any, generator: Any, chat: Any = None, **changes: Any) -> Episode:
    return asyncio.run(make_player(generator, chat, **changes).episode(assigned(environment), 0))


def talk(*turns: str) -> Played:
    """An environment that says one thing after the other."""

    async def run(task: Task, model: Model) -> Mapping[str, float]:
        for turn in turns:
            await model.reply(turn)
        return {"correct": 1.0}

    return Played(run)


def test_a_single_turn_is_prompt_then_answer() -> None:
    generator = FakeGenerator("yes")
    generator.version = 5
    environment = SingleTurn({}, {"correct": lambda text, data: float(text == data["answer"])})
    episode = play(environment, generator)
    (one,) = episode.trajectories
    prompt = b"user: hello\nassistant: "
    assert one.tokens.tolist() == [*prompt, *b"yes", END]
    assert one.loss_mask.tolist() == [False] * len(prompt) + [True] * 4
    assert one.versions.tolist() == [-1] * len(prompt) + [5] * 4
    assert (one.logprobs[: len(prompt)] == 0).all()
    assert (one.logprobs[len(prompt) :] < 0).all()
    assert (one.prompt_length, one.stop) == (len(prompt), "stop")
    assert (episode.rewards, episode.reward, episode.turns) == ({"correct": 1.0}, 1.0, 1)
    assert (episode.environment, episode.task, episode.task_id, episode.sample) == ("puzzle", 3, "a.jsonl:4", 0)
    assert episode.messages == (("user", "hello"), ("assistant", "yes"))


def test_rewards_are_weighed() -> None:
    environment = SingleTurn({}, {"correct": lambda text, data: 1.0, "format": (lambda text, data: 2.0, 0.1)})
    episode = play(environment, FakeGenerator("x"))
    assert episode.rewards == {"correct": 1.0, "format": 2.0}
    assert episode.reward == pytest.approx(1.2)


def test_what_the_model_produced_is_never_tokenised_again() -> None:
    generator = AltTokens(["one", "two"])
    play(talk("a", "b"), generator, AltChat())
    first, second = generator.requests
    history = [*first.tokens.tolist(), *(300 + b for b in b"one"), END]
    assert second.tokens.tolist() == [*history, *b"\nuser: b\nassistant: "]


def test_a_real_tokenizer_would_merge_what_history_keeps_apart(tiny_model_folder: Any) -> None:
    chat = chats().ChatTokenizer(tiny_model_folder)
    spelt = np.concatenate([chat.encode(letter) for letter in "Compute"])
    assert chat.decode(spelt) == "Compute"
    assert len(chat.encode("Compute")) < len(spelt)

    class Spelling(FakeGenerator):
        async def generate(self, request: Request) -> Completion:
            self.requests.append(request)
            tokens = np.append(spelt, chat.stop_tokens[0])
            return Completion(request.id, tokens, -np.ones(len(tokens), np.float32), "stop", ((0, 0),))

    generator = Spelling("")
    episode = play(talk("What?", "And then?"), generator, chat, sampling=Sampling(max_tokens=32))
    first, second = (request.tokens for request in generator.requests)
    answer = [*spelt.tolist(), chat.stop_tokens[0]]
    assert second[: len(first) + len(answer)].tolist() == [*first.tolist(), *answer]
    after = chat.decode(second[len(first) + len(answer) :], skip_special=False)
    assert after == "\n<|im_start|>user\nAnd then?<|im_end|>\n<|im_start|>assistant\n"
    assert episode.trajectories[0].loss_mask.sum() == 2 * len(answer)


def test_only_the_models_turns_carry_loss() -> None:
    (one,) = play(talk("a", "b"), FakeGenerator(["one", "two"])).trajectories
    learned = [bytes(t for t in one.tokens[one.loss_mask] if t < 256)]
    assert learned == [b"onetwo"]
    hidden = bytes(int(t) for t in one.tokens[~one.loss_mask])
    assert hidden == b"user: a\nassistant: " + b"\nuser: b\nassistant: "
    assert (one.logprobs[~one.loss_mask] == 0).all()
    assert (one.versions[~one.loss_mask] == -1).all()


def test_a_turn_that_was_cut_is_closed_before_the_next() -> None:
    generator = FakeGenerator("too long")
    play(talk("a", "b"), generator, sampling=Sampling(max_tokens=3))
    first, second = generator.requests
    assert second.tokens.tolist() == [*first.tokens.tolist(), *b"too", END, *b"\nuser: b\nassistant: "]


def test_versions_of_a_completion_are_spread_over_its_tokens() -> None:
    class Changing(FakeGenerator):
        async def generate(self, request: Request) -> Completion:
            made = await super().generate(request)
            return Completion(made.id, made.tokens, made.logprobs, made.stop, ((0, 3), (1, 4), (3, 9)))

    (one,) = play(talk("a"), Changing("wxyz")).trajectories
    assert one.versions[one.loss_mask].tolist() == [3, 4, 4, 9, 9]


def test_a_fork_has_the_history_as_prompt_and_learns_only_what_is_its_own() -> None:
    async def run(task: Task, model: Model) -> Mapping[str, float]:
        await model.reply("a")
        other = model.fork()
        model.fork()  # never asked: leaves nothing behind
        await asyncio.gather(model.reply("b"), other.reply("c"))
        return {"correct": 1.0}

    generator = FakeGenerator(["one", "two", "three"])
    episode = play(Played(run), generator)
    main, fork = episode.trajectories
    assert bytes(t for t in main.tokens[main.loss_mask] if t < 256) == b"onetwo"
    assert bytes(t for t in fork.tokens[fork.loss_mask] if t < 256) == b"three"
    history = [*b"user: a\nassistant: one", END]
    assert fork.tokens.tolist() == [*history, *b"\nuser: c\nassistant: three", END]
    assert fork.prompt_length == len(history) + len(b"\nuser: c\nassistant: ")
    assert episode.turns == 3
    assert len({request.seed for request in generator.requests}) == 3
    assert len({request.id for request in generator.requests}) == 3


def test_samples_of_a_group_share_the_prompt_they_have_in_common() -> None:
    class Counting(ByteChat):
        prompts = 0

        def prompt(self, conversation: Any) -> Any:
            self.prompts += 1
            return super().prompt(conversation)

    async def run(task: Task, model: Model) -> Mapping[str, float]:
        await model.reply(task.prompt)
        await model.reply("more")
        return {"correct": 1.0}

    chat, generator = Counting(), FakeGenerator("x")
    group = asyncio.run(make_player(generator, chat).group(assigned(Played(run)), 4))
    first, later = generator.requests[:4], generator.requests[4:]
    assert len({request.prefix for request in first}) == 1
    assert first[0].prefix
    assert all(np.array_equal(request.tokens, first[0].tokens) for request in first)
    assert not any(request.prefix for request in later)
    assert [episode.sample for episode in group.episodes] == [0, 1, 2, 3]
    assert chat.prompts == 1


def test_different_prompts_of_a_group_are_told_apart() -> None:
    async def run(task: Task, model: Model) -> Mapping[str, float]:
        await model.reply([Message("system", f"s{len(generator.requests) % 2}"), *task.prompt])
        return {"correct": 1.0}

    generator = FakeGenerator("x")
    asyncio.run(make_player(generator).group(assigned(Played(run)), 4))
    by_prefix: dict[str, set[bytes]] = {}
    for request in generator.requests:
        by_prefix.setdefault(request.prefix, set()).add(request.tokens.tobytes())
    assert len(by_prefix) == 2
    assert all(len(prompts) == 1 for prompts in by_prefix.values())


@pytest.mark.parametrize("copied", [True, False], ids=["to_thread", "executor"])
def test_a_thread_of_the_environment_asks_on_the_loop_of_the_episode(copied: bool) -> None:
    class OfOneLoop(FakeGenerator):
        async def generate(self, request: Any) -> Any:
            loops.append(asyncio.get_running_loop())
            return await super().generate(request)

    async def run(task: Task, model: Model) -> Mapping[str, float]:
        def blocking(text: str) -> str:
            return asyncio.run(model.reply(text)).text

        loops.append(asyncio.get_running_loop())
        for text in ("a", "b"):
            if copied:  # with the context of the episode
                assert await asyncio.to_thread(blocking, text) == "x"
            else:
                assert await asyncio.get_running_loop().run_in_executor(None, blocking, text) == "x"
        return {"correct": 1.0}

    loops: list[Any] = []
    episode = play(Played(run), OfOneLoop("x"))
    assert episode.turns == 2
    assert loops == [loops[0]] * 3


def test_requests_are_seeded_by_their_position_alone() -> None:
    def seeds(index: int, purpose: str = "sample", seed: int = 0) -> list[int]:
        generator = FakeGenerator("x")
        team = make_player(generator, purpose=purpose, seed=seed)
        asyncio.run(team.group(assigned(talk("a", "b"), index), 3))
        return sorted(request.seed for request in generator.requests)

    assert seeds(7) == seeds(7)
    every = [*seeds(7), *seeds(8), *seeds(7, "evaluate"), *seeds(7, seed=1)]
    assert len(set(every)) == len(every) == 24


def test_answers_fit_into_the_context() -> None:
    generator = FakeGenerator("abcdefgh")
    prompt = len(b"user: a\nassistant: ")
    (one,) = play(talk("a"), generator, max_context=prompt + 5).trajectories
    assert generator.requests[0].sampling.max_tokens == 5
    assert (len(one.tokens), one.stop) == (prompt + 5, "length")


@pytest.mark.parametrize("caught", [True, False])
def test_a_full_context_is_an_event_and_nothing_is_appended(caught: bool) -> None:
    replies = []

    async def run(task: Task, model: Model) -> Mapping[str, float]:
        try:
            for text in ("a", "b", "c"):
                replies.append(await model.reply(text))
                model.reward("turns", 1.0)
        except ContextFull:
            if not caught:
                raise
            with pytest.raises(ContextFull):
                await model.fork().reply("")
        return {"caught": 1.0}

    environment, generator = Played(run), FakeGenerator("xy")
    environment.reward_weights = {"caught": 1.0, "turns": 0.5}
    prompt = len(b"user: a\nassistant: ")
    episode = play(environment, generator, max_context=prompt + 10)
    assert [(reply.text, reply.stop) for reply in replies] == [("xy", "stop")]
    assert len(generator.requests) == 1
    (one,) = episode.trajectories
    assert (len(one.tokens), one.stop, episode.context_full) == (prompt + 3, "context", True)
    assert episode.rewards == {"caught": float(caught), "turns": 1.0}
    assert episode.reward == caught + 0.5


def test_a_shorter_message_is_answered_after_one_that_was_too_long() -> None:
    async def run(task: Task, model: Model) -> Mapping[str, float]:
        await model.reply("a")
        with pytest.raises(ContextFull):
            await model.reply("long" * 20)
        await model.fork().reply("b")
        await model.reply("c")
        return {"correct": 1.0}

    episode = play(Played(run), FakeGenerator("xy"), max_context=80)
    assert [one.stop for one in episode.trajectories] == ["stop", "stop"]
    assert not episode.context_full


def test_a_prompt_without_room_for_an_answer_fails() -> None:
    with pytest.raises(EpisodeFailed, match=r"prompt of 19 tokens leaves no room .* in 19; raise rollout.max_context"):
        play(talk("a"), FakeGenerator("x"), max_context=19)


def test_stop_tokens_and_strings_reach_the_generator() -> None:
    generator = FakeGenerator("x")
    play(talk("a"), generator, sampling=Sampling(4, 0.7, stop=("###",)))
    sampling = generator.requests[0].sampling
    assert (sampling.stop, sampling.stop_tokens, sampling.temperature) == (("###",), (END,), 0.7)


def test_a_failed_episode_is_played_again_with_other_randomness() -> None:
    async def run(task: Task, model: Model) -> Mapping[str, float]:
        await model.reply("a")
        if len(generator.requests) < 3:
            raise KeyError("grader")
        return {"correct": 1.0}

    generator = FakeGenerator("x")
    assignment = assigned(Played(run))
    episode = asyncio.run(make_player(generator, retries=2).episode(assignment, 0))
    assert episode.rewards == {"correct": 1.0}
    assert len({request.seed for request in generator.requests}) == 3
    assert assignment.tally == {"retried": 2, "done": 1}


@pytest.mark.parametrize("error", [ConnectionResetError, TimeoutError, InfrastructureError])
def test_what_breaks_down_in_passing_leaves_no_trace(error: type[Exception]) -> None:
    async def run(task: Task, model: Model) -> Mapping[str, float]:
        await model.reply("a")
        if len(generator.requests) == 1:
            raise error("the sandbox is gone")
        return {"correct": 1.0}

    generator = FakeGenerator("x")
    assignment = assigned(Played(run))
    asyncio.run(make_player(generator, retries=0, infrastructure_retries=1).episode(assignment, 0))
    first, second = generator.requests
    assert first.seed == second.seed
    assert assignment.tally == {"retried": 1, "done": 1}


def test_a_request_that_was_lost_with_its_replicas_is_not_made_again() -> None:
    async def run(task: Task, model: Model) -> Mapping[str, float]:
        await model.reply("a")
        raise RequestLost("3 replicas were lost while they had request a")

    generator = FakeGenerator("x")
    assignment = assigned(Played(run))
    with pytest.raises(EpisodeFailed, match="sample 0 failed once; last: 3 replicas were lost") as caught:
        asyncio.run(make_player(generator, retries=5, infrastructure_retries=5).episode(assignment, 0))
    assert caught.value.infrastructure
    assert len(generator.requests) == 1
    assert assignment.tally == {"infrastructure": 1}


def test_what_breaks_down_twice_is_tried_with_other_randomness_until_its_own_budget_is_spent() -> None:
    async def run(task: Task, model: Model) -> Mapping[str, float]:
        await model.reply("a")
        raise ConnectionError("the sandbox is gone")

    generator = FakeGenerator("x")
    assignment = assigned(Played(run))
    with pytest.raises(EpisodeFailed, match="sample 0 failed 3 times; last: ConnectionError: the sandbox") as caught:
        asyncio.run(make_player(generator, retries=5, infrastructure_retries=2).episode(assignment, 0))
    assert caught.value.infrastructure
    assert len({request.seed for request in generator.requests[:2]}) == 1
    assert len({request.seed for request in generator.requests}) == 2
    assert assignment.tally == {"retried": 2, "infrastructure": 1}


async def _raised(task: Task, model: Model) -> Mapping[str, float]:
    await model.reply("hello")
    raise Undecided("it needs too much")


async def _noted_and_raised(task: Task, model: Model) -> Mapping[str, float]:
    await model.reply("hello")
    note("it needs too much")
    raise Undecided("it needs too much, says the pool")


async def _raised_in_a_group(task: Task, model: Model) -> Mapping[str, float]:
    await model.reply("hello")
    raise ExceptionGroup("tasks", [Undecided("it needs too much"), ExceptionGroup("more", [Undecided("and this")])])


async def _noted_and_scored(task: Task, model: Model) -> Mapping[str, float]:
    await model.reply("hello")
    await asyncio.create_task(asyncio.to_thread(note, "it needs too much"))
    return {"fine": 0.0, "right": 0.0}


@pytest.mark.parametrize("run", [_raised, _noted_and_raised, _raised_in_a_group, _noted_and_scored])
def test_an_answer_that_nobody_can_decide_about_is_worth_nothing_and_is_counted_once(run: Any) -> None:
    environment, generator = Played(run), FakeGenerator("yes")
    environment.reward_weights = {"fine": 2.0, "right": 1.0}
    assignment = assigned(environment)
    episodes = asyncio.run(make_player(generator).group(assignment, 2)).episodes
    assert [episode.rewards for episode in episodes] == [{"fine": 0.0, "right": 0.0}] * 2
    assert [(episode.reward, episode.undecided) for episode in episodes] == [(0.0, ("it needs too much",))] * 2
    assert assignment.tally == {"done": 2, "undecided": 2}
    assert all(episode.trajectories[0].loss_mask.any() for episode in episodes)


@pytest.mark.parametrize(
    ("errors", "raised", "attempts"),
    [
        ([Undecided("it needs too much"), KeyError("answer")], EpisodeFailed, 2),
        ([ConnectionError("the sandbox"), ExceptionGroup("more", [InfrastructureError("a server")])], EpisodeFailed, 4),
        ([KeyError("answer"), WorkerError("generator", 0, "generate", "died")], WorkerError, 1),
    ],
)
def test_a_group_of_errors_means_what_it_holds(errors: list[Exception], raised: type, attempts: int) -> None:
    async def run(task: Task, model: Model) -> Mapping[str, float]:
        await model.reply("hello")
        raise ExceptionGroup("tasks", errors)

    generator = FakeGenerator("yes")
    with pytest.raises(raised):
        play(Played(run), generator, retries=1, infrastructure_retries=3)
    assert len(generator.requests) == attempts


def test_an_episode_that_records_no_reward_is_not_played_again() -> None:
    async def run(task: Task, model: Model) -> Mapping[str, float]:
        await model.reply("?")
        return {}

    environment, generator = Played(run), FakeGenerator("a")
    episode = play(environment, generator, retries=2)
    assert (episode.rewards, episode.reward, len(generator.requests)) == ({}, 0.0, 1)


def test_what_an_episode_does_to_its_task_reaches_no_other_episode() -> None:
    async def run(task: Task, model: Model) -> Mapping[str, float]:
        await model.reply("?")
        task.data["seen"].append(model.episode.sample)
        return {"seen": float(len(task.data["seen"]))}

    assignment = assigned(Played(run), task=Task("hello", {"seen": []}))
    group = asyncio.run(make_player(FakeGenerator("a")).group(assignment, 3))
    assert [episode.rewards["seen"] for episode in group.episodes] == [1.0, 1.0, 1.0]
    assert assignment.task.data == {"seen": []}


def test_only_the_reward_that_nobody_can_decide_about_is_0() -> None:
    def grade(text: str, data: Any) -> float:
        raise Undecided("it needs too much")

    episode = play(SingleTurn({}, {"right": grade, "long": lambda text, data: float(len(text))}), FakeGenerator("yes"))
    assert episode.rewards == {"right": 0.0, "long": 3.0}


async def _no_question(task: Task, model: Model) -> Mapping[str, float]:
    return {"correct": 1.0}


async def _nan(task: Task, model: Model) -> Mapping[str, float]:
    await model.reply("a")
    return {"correct": float("nan")}


async def _no_rewards(task: Task, model: Model) -> Any:
    await model.reply("a")


async def _bug(task: Task, model: Model) -> Mapping[str, float]:
    raise ZeroDivisionError("whoops")


async def _exit(task: Task, model: Model) -> Mapping[str, float]:
    raise SystemExit(3)


async def _cancelled(task: Task, model: Model) -> Mapping[str, float]:
    raise asyncio.CancelledError


async def _for_ever(task: Task, model: Model) -> Mapping[str, float]:
    while True:
        with suppress(ContextFull):
            await model.reply("more")


def _not_async(task: Task, model: Model) -> Any:
    return {"correct": 1.0}


async def _nothing_said(task: Task, model: Model) -> Mapping[str, float]:
    await model.reply([])
    return {"correct": 1.0}


async def _no_room(task: Task, model: Model) -> Mapping[str, float]:
    await model.reply("?", max_tokens=0)
    return {"correct": 1.0}


async def _at_once(task: Task, model: Model) -> Mapping[str, float]:
    await asyncio.gather(model.reply("a"), model.reply("b"))
    return {"correct": 1.0}


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (_no_question, "without asking the model anything"),
        (_nan, r"reward 'correct' = nan, wanted a finite number"),
        (_no_rewards, "wanted a mapping of reward names"),
        (_nothing_said, "asked the model without a message"),
        (_no_room, "max_tokens is 0, wanted a whole number of at least 1"),
        (_bug, "ZeroDivisionError: whoops"),
        (_exit, "SystemExit: 3"),
        (_cancelled, "CancelledError"),
        (_for_ever, r"not over after 0.3 seconds \(cluster.deadlines.episode\)"),
        (_at_once, "use model.fork"),
    ],
)
def test_what_goes_wrong_in_an_episode_is_named(run: Any, message: str) -> None:
    context = 100 if run is _for_ever else 0
    with pytest.raises(EpisodeFailed, match=rf"(?s)'puzzle', task 3, sample 0 failed once; last: .*{message}"):
        play(Played(run), FakeGenerator("x"), deadline_seconds=0.3, max_context=context)


def test_a_method_that_is_not_async_is_named_at_once() -> None:
    with pytest.raises(BrokenEnvironment, match=r"'puzzle': `run` returned dict and no coroutine; write `async"):
        play(Played(_not_async), FakeGenerator("x"))


def _broken(change: Callable[[Completion], Completion]) -> FakeGenerator:
    class Broken(FakeGenerator):
        async def generate(self, request: Request) -> Completion:
            return change(await super().generate(request))

    return Broken("abc")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: Completion(c.id, c.tokens[:0], c.logprobs[:0], "stop", c.versions), "gave 0 tokens"),
        (lambda c: Completion(c.id, np.tile(c.tokens, 9), np.tile(c.logprobs, 9), "stop", c.versions), "wanted 1 to 8"),
        (lambda c: Completion(c.id, c.tokens, c.logprobs[1:], "stop", c.versions), "gave 3 logprobs for the 4 tokens"),
        (lambda c: Completion(c.id, c.tokens, c.logprobs * np.nan, "stop", c.versions), "wanted a finite one"),
        (lambda c: Completion(c.id, c.tokens, c.logprobs, "stop", ()), "no weight version"),
        (lambda c: Completion("x", c.tokens, c.logprobs, "stop", c.versions), "the completion x with"),
        (lambda c: Completion(c.id, c.tokens, c.logprobs, "eos", c.versions), "with stop 'eos'"),
        (lambda c: Completion(c.id, c.tokens - 200, c.logprobs, "stop", c.versions), "tokens from -"),
        (lambda c: None, "the generator gave NoneType for request .*, wanted a Completion"),
    ],
)
def test_a_completion_that_breaks_the_contract_is_not_trained_on(change: Any, message: str) -> None:
    with pytest.raises(EpisodeFailed, match=message):
        play(talk("a"), _broken(change))


@pytest.mark.parametrize(
    ("asked", "words"),
    [({"stop": "END"}, "stop is 'END', wanted a list"), ({"stop": [""]}, r"stop is \[''\]"),
     ({"temperature": -1.0}, "wanted a temperature and top_k of at least 0")],
)  # fmt: skip
def test_a_request_that_makes_no_sense_is_refused(asked: dict[str, Any], words: str) -> None:
    async def run(task: Task, model: Model) -> Mapping[str, float]:
        await model.reply("a", **asked)
        return {"correct": 1.0}

    with pytest.raises(EpisodeFailed, match=words):
        play(Played(run), FakeGenerator("x"))


@pytest.mark.parametrize("error", [WorkerError("generator", 0, "generate", "it died"), RequestLost("it is lost")])
def test_a_failure_of_the_model_that_the_environment_catches_is_not_scored(error: Exception) -> None:
    class Second(FakeGenerator):
        async def generate(self, request: Request) -> Completion:
            if len(self.requests) == 1:
                raise error
            return await super().generate(request)

    async def run(task: Task, model: Model) -> Mapping[str, float]:
        await model.reply("a")
        with suppress(Exception):
            await model.fork().reply("b")
        return {"correct": 0.0}

    with pytest.raises((WorkerError, EpisodeFailed), match=r"it died|it is lost"):
        play(Played(run), Second("x"))


def test_an_environment_may_go_on_after_a_request_that_the_generator_refused() -> None:
    class Refusing(FakeGenerator):
        async def generate(self, request: Request) -> Completion:
            if b"odd" in bytes(request.tokens.tolist()):
                raise WhetError("a token outside the vocabulary")
            return await super().generate(request)

    async def run(task: Task, model: Model) -> Mapping[str, float]:
        with pytest.raises(WhetError, match="outside"):
            await model.reply("odd")
        await model.reply("a")
        return {"correct": 1.0}

    assert play(Played(run), Refusing("x")).reward == 1.0


def test_a_dead_worker_is_not_the_episodes_fault() -> None:
    class Dead(FakeGenerator):
        async def generate(self, request: Request) -> Completion:
            self.requests.append(request)
            raise WorkerError("generator", 0, "generate", "it died")

    generator = Dead("x")
    with pytest.raises(WorkerError, match="generator rank 0 failed in generate"):
        play(talk("a"), generator, retries=3)
    assert len(generator.requests) == 1


def test_the_first_failure_ends_the_other_samples_of_the_group() -> None:
    async def run(task: Task, model: Model) -> Mapping[str, float]:
        answer = await model.reply("a")
        if answer.text == "bad":
            raise ValueError("bad")
        await model.reply("b")
        return {"correct": 1.0}

    class Slow(FakeGenerator):
        async def generate(self, request: Request) -> Completion:
            self._delay = 30.0 if len(self.requests) >= 3 else 0.0
            return await super().generate(request)

    generator = Slow(["good", "bad", "good", "x", "x"])
    with pytest.raises(EpisodeFailed, match="sample 1"):
        asyncio.run(make_player(generator).group(assigned(Played(run)), 3))
    assert len(generator.cancelled) == 2


@pytest.mark.parametrize("begun", [False, True], ids=["first", "later"])
def test_a_response_that_is_forgotten_leaves_nothing(begun: bool) -> None:
    async def run(task: Task, model: Any) -> Mapping[str, float]:
        if begun:
            await model.reply("hello")
        before = (model.turns, model.messages)
        await model.reply("slowly")
        model.forget()
        assert (model.turns, model.messages) == before
        await model.reply("again")
        return {"correct": 1.0}

    generator = FakeGenerator(lambda prompt, rng: f"{len(prompt)}")
    found = play(Played(run), generator)
    wanted = play(talk(*(["hello"] if begun else []), "again"), FakeGenerator(lambda prompt, rng: f"{len(prompt)}"))
    (one,), (other,) = found.trajectories, wanted.trajectories
    assert np.array_equal(one.tokens, other.tokens)
    assert np.array_equal(one.loss_mask, other.loss_mask)
    assert found.messages == wanted.messages
    assert found.turns == 1 + begun


def test_rewards_of_a_group_are_asked_for_again_if_the_infrastructure_failed() -> None:
    class Compared(Played):
        failing = 2

        async def group_rewards(self, task: Task, episodes: Any) -> Any:
            if self.failing:
                self.failing -= 1
                raise ConnectionError("away")
            return [{"best": 1.0} for _ in episodes]

    async def run(task: Task, model: Model) -> Mapping[str, float]:
        await model.reply("hello")
        return {}

    assignment = assigned(Compared(run))
    group = asyncio.run(make_player(FakeGenerator("x"), infrastructure_retries=2).group(assignment, 2))
    assert [episode.rewards for episode in group.episodes] == [{"best": 1.0}] * 2
    assert assignment.tally["retried"] == 2
    assignment = assigned(Compared(run))
    with pytest.raises(EpisodeFailed, match="group_rewards failed 2 times; last: ConnectionError: away"):
        asyncio.run(make_player(FakeGenerator("x"), infrastructure_retries=1).group(assignment, 2))
    assert (assignment.tally["infrastructure"], assignment.tally["done"]) == (2, 0)
