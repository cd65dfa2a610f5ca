"""Episodes that a foreign agent plays over HTTP: what is recorded, what is refused, and what fails."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from whet.data.records import Completion, Episode, Request, Task
from whet.errors import DataError, PluginError, RequestLost, RewrittenHistory, WhetError, WorkerError, WorkerLost
from whet.interfaces.environment import Address, Model
from whet.rollout.episode import EpisodeFailed
from whet.rollout.recorded import Assignment
from whet.rollout.routing import Route
from whet_chat.tokenizer import ChatTokenizer
from whet_testing.fakes import ByteChat, FakeGenerator
from whet_testing.playing import AltChat, AltTokens, alt, make_player

END = ByteChat.stop_tokens[0]
Agent = Callable[["Client"], Awaitable[Any]]


class Client:
    """What a foreign agent asks with."""

    def __init__(self, address: Address, session: Any) -> None:
        self.address, self._session = address, session
        self.statuses: list[int] = []

    async def post(self, path: str, body: Any, key: str | None = None) -> Any:
        headers = {"Authorization": f"Bearer {self.address.api_key if key is None else key}"}
        async with self._session.post(self.address.base_url + path, json=body, headers=headers) as response:
            self.statuses.append(response.status)
            return await response.json() if "json" in response.content_type else await response.text()

    async def chat(self, *said: str, **options: Any) -> Any:
        """Ask with messages of user and assistant in turn."""
        messages = [{"role": "assistant" if i % 2 else "user", "content": text} for i, text in enumerate(said)]
        return await self.post("/chat/completions", {"model": "policy", "messages": messages, **options})

    async def text(self, *said: str, **options: Any) -> str:
        """Ask, and give what was answered."""
        reply = await self.chat(*said, **options)
        return reply["choices"][0]["message"]["content"]


class Foreign:
    """An environment whose episode is played by an agent that only has the address."""

    reward_weights: Mapping[str, float] = {}

    def __init__(self, agent: Agent, ignore: tuple[str, ...] = ()) -> None:
        self._agent, self._ignore = agent, ignore

    def tasks(self, split: str) -> list[Task]:
        return [Task("hello")]

    async def run(self, task: Task, model: Model) -> Mapping[str, float]:
        async with model.endpoint(ignore=self._ignore) as address, aiohttp.ClientSession() as session:
            await self._agent(Client(address, session))
        return {"done": 1.0}

    def close(self) -> None:
        pass


def play(agent: Agent, generator: Any, chat: Any = None, ignore: tuple[str, ...] = (), **changes: Any) -> Episode:
    environment = Foreign(agent, ignore)
    assignment = Assignment(Route("foreign", environment, "train"), Task("hello"), 3, 7)
    return asyncio.run(make_player(generator, chat, **changes).episode(assignment, 0))


def test_a_conversation_is_one_sequence_with_the_tokens_that_were_sampled() -> None:
    async def agent(client: Client) -> None:
        first = await client.text("a")
        assert first == "one"
        assert await client.text("a", first, "b") == "two"

    generator = AltTokens(["one", "two"])
    generator.version = 4
    episode = play(agent, generator, AltChat())
    (one,) = episode.trajectories
    begin, between = b"user: a\nassistant: ", b"\nuser: b\nassistant: "
    assert one.tokens.tolist() == [*begin, *alt("one"), *between, *alt("two")]
    assert one.tokens[one.loss_mask].tolist() == [*alt("one"), *alt("two")]
    assert set(one.versions[one.loss_mask].tolist()) == {4}
    assert (one.prompt_length, one.stop, episode.turns) == (len(begin), "stop", 2)
    assert episode.messages == (("user", "a"), ("assistant", "one"), ("user", "b"), ("assistant", "two"))


def test_it_is_drawn_as_if_the_environment_had_asked_itself() -> None:
    drawn = FakeGenerator(lambda prompt, rng: str(rng.integers(1000)))

    async def agent(client: Client) -> None:
        await client.text("a", await client.text("a"), "b")

    class Own(Foreign):
        async def run(self, task: Task, model: Model) -> Mapping[str, float]:
            await model.reply("a")
            await model.reply("b")
            return {"done": 1.0}

    foreign = play(agent, drawn).trajectories
    assignment = Assignment(Route("foreign", Own(agent), "train"), Task("hello"), 3, 7)
    own = asyncio.run(make_player(drawn).episode(assignment, 0)).trajectories
    for name in ("tokens", "loss_mask", "logprobs", "versions"):
        assert np.array_equal(getattr(foreign[0], name), getattr(own[0], name)), name


def test_what_goes_on_elsewhere_is_a_fork_whose_history_is_not_trained_again() -> None:
    async def agent(client: Client) -> None:
        await client.text("a")
        await client.text("a", "one", "b")
        await client.text("a", "one", "c")

    episode = play(agent, AltTokens(["one", "two", "three"]), AltChat())
    first, fork = episode.trajectories
    assert first.tokens[first.loss_mask].tolist() == [*alt("one"), *alt("two")]
    assert fork.tokens[fork.loss_mask].tolist() == alt("three")
    assert fork.tokens[: fork.prompt_length].tolist() == [
        *b"user: a\nassistant: ", *alt("one"), *b"\nuser: c\nassistant: ",
    ]  # fmt: skip


def test_words_that_the_model_never_said_begin_another_sequence() -> None:
    async def agent(client: Client) -> None:
        await client.text("a")
        await client.text("a", "something else", "b")

    first, other = play(agent, AltTokens(["one", "two"]), AltChat()).trajectories
    assert first.tokens[first.loss_mask].tolist() == alt("one")
    assert other.tokens[: other.prompt_length].tolist() == [
        *b"user: a\nassistant: something else\nuser: b\nassistant: ",
    ]  # fmt: skip
    assert other.tokens[other.loss_mask].tolist() == alt("two")


def test_white_space_around_the_models_words_does_not_matter() -> None:
    async def agent(client: Client) -> None:
        assert await client.text("a") == " one\n"
        await client.text("a", "one", "b")

    (one,) = play(agent, FakeGenerator([" one\n", "two"])).trajectories
    assert b" one\n" in bytes(int(t) for t in one.tokens if t < 256)


def test_the_environments_own_history_is_continued() -> None:
    class Begun(Foreign):
        async def run(self, task: Task, model: Model) -> Mapping[str, float]:
            await model.reply("a")
            return await super().run(task, model)

    async def agent(client: Client) -> None:
        await client.text("a", "one", "b")

    assignment = Assignment(Route("foreign", Begun(agent), "train"), Task("hello"), 3, 7)
    episode = asyncio.run(make_player(FakeGenerator(["one", "two"])).episode(assignment, 0))
    assert [t.loss_mask.sum() for t in episode.trajectories] == [8]


def test_requests_at_one_time_are_sequences_of_their_own() -> None:
    async def agent(client: Client) -> None:
        await asyncio.gather(*(client.text("a") for _ in range(3)))

    episode = play(agent, FakeGenerator(lambda prompt, rng: str(rng.integers(10**6)), delay_seconds=0.2))
    assert len({tuple(t.tokens.tolist()) for t in episode.trajectories}) == 3


def test_several_answers_to_one_request_are_sequences_of_which_each_can_be_continued() -> None:
    async def agent(client: Client) -> None:
        reply = await client.chat("a", n=3)
        texts = [choice["message"]["content"] for choice in reply["choices"]]
        assert texts == ["one", "two", "three"]
        await client.text("a", "two", "b")

    generator = FakeGenerator(["one", "two", "three", "four"])
    episode = play(agent, generator)
    assert [t.loss_mask.sum() for t in episode.trajectories] == [4, 4 + 5, 6]
    assert len({request.prefix for request in generator.requests[:3]}) == 1, "they share their prompt"


def test_a_reply_says_tokens_versions_and_logprobs() -> None:
    seen: dict[str, Any] = {}

    async def agent(client: Client) -> None:
        seen.update(await client.chat("a", logprobs=True, return_token_ids=True))

    generator = FakeGenerator("yes")
    generator.version = 5
    (one,) = play(agent, generator).trajectories
    (choice,) = seen["choices"]
    assert (seen["object"], seen["model"], choice["finish_reason"]) == ("chat.completion", "policy", "stop")
    assert [*seen["prompt_token_ids"], *choice["token_ids"]] == one.tokens.tolist()
    assert choice["weight_versions"] == [[0, 5]]
    content = choice["logprobs"]["content"]
    assert [entry["token"] for entry in content] == ["y", "e", "s", ""]
    assert [entry["logprob"] for entry in content] == one.logprobs[one.loss_mask].tolist()
    assert seen["usage"] == {"prompt_tokens": 19, "completion_tokens": 4, "total_tokens": 23}


def test_limits_and_stop_strings_are_kept() -> None:
    async def agent(client: Client) -> None:
        short = await client.chat("a", max_tokens=2)
        assert short["choices"][0]["finish_reason"] == "length"
        assert short["choices"][0]["message"]["content"] == "on"
        assert await client.text("a", "on", "b", max_completion_tokens=100, stop=["e "]) == "th"
        await client.text("a", "on", "b", "th", "c")  # goes on with all that was sampled, stop string included

    (one,) = play(agent, FakeGenerator(["one", "the two", "x"])).trajectories
    assert bytes(int(t) for t in one.tokens[one.loss_mask] if t < 256) == b"onthe x"


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"temperature": 0.2}, "temperature"),
        ({"top_p": 0.9}, "top_p"),
        ({"top_k": 5}, "top_k"),
        ({"seed": 1}, "seed"),
        ({"presence_penalty": 1.0}, "presence_penalty"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
    ],
)
def test_what_training_could_not_follow_is_refused_unless_it_is_to_be_ignored(options: Any, param: str) -> None:
    async def refused(client: Client) -> None:
        reply = await client.chat("a", **options)
        assert client.statuses == [400]
        assert reply["error"]["param"] == param
        assert f"model.endpoint(ignore=['{param}'])" in reply["error"]["message"]
        await client.text("a")

    async def ignored(client: Client) -> None:
        assert await client.text("a", **options) == "yes"

    assert play(refused, FakeGenerator("yes")).turns == 1
    generator = FakeGenerator("yes")
    assert play(ignored, generator, ignore=(param,)).turns == 1
    assert generator.requests[0].sampling.temperature == 1.0


def test_tokens_are_continued_as_tokens() -> None:
    async def agent(client: Client) -> None:
        asked = {"prompt": [97, 98], "max_tokens": 3, "return_token_ids": True, "logprobs": 0}
        first = await client.post("/completions", asked)
        (choice,) = first["choices"]
        assert (choice["text"], choice["finish_reason"], first["object"]) == ("one", "length", "text_completion")
        assert choice["logprobs"]["text_offset"] == [0, 1, 2]
        await client.post("/completions", {"prompt": [97, 98, *choice["token_ids"], 99]})
        await client.post("/completions", {"prompt": "ab"})

    one, text = play(agent, FakeGenerator(["one", "two", "three"])).trajectories
    assert one.tokens.tolist() == [97, 98, *b"one", 99, *b"two", END]
    assert one.loss_mask.tolist() == [False] * 2 + [True] * 3 + [False] + [True] * 4
    assert text.tokens.tolist() == [97, 98, *b"three", END]


def test_a_prompt_that_leaves_no_room_is_refused_and_the_episode_goes_on() -> None:
    async def agent(client: Client) -> None:
        reply = await client.chat("a" * 100)
        assert (client.statuses, reply["error"]["code"]) == ([400], "context_length_exceeded")
        await client.text("a")

    assert play(agent, FakeGenerator("yes"), max_context=40).turns == 1


def test_an_agent_that_fails_when_its_context_is_full_ends_its_episode() -> None:
    async def agent(client: Client) -> None:
        said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": await client.text("a")}]
        further = {"role": "user", "content": "a" * 100}
        reply = await client.post("/chat/completions", {"messages": [*said, further]})
        raise RuntimeError(reply["error"]["code"])

    generator = FakeGenerator("yes")
    episode = play(agent, generator, max_context=40)
    assert (episode.turns, bool(episode.context_full), len(generator.requests)) == (1, True, 1)


def test_a_lost_worker_is_none_of_the_agents_also_where_its_context_is_full() -> None:
    async def agent(client: Client) -> None:
        await client.text("a")
        await client.chat("a" * 100)
        raise WorkerError("generator", 0, "generate", "gone")

    with pytest.raises(WorkerError):
        play(agent, FakeGenerator("yes"), max_context=40)


class Strict(ByteChat):
    """A template that wants one user first, and one that drops what was said."""

    def prompt(self, conversation: Any) -> Any:
        if len(conversation) == 2:
            raise DataError("the chat template refuses two messages")
        return super().prompt(conversation)


def test_a_conversation_that_the_template_refuses_is_refused() -> None:
    async def agent(client: Client) -> None:
        twice = [{"role": "user", "content": "a"}] * 2
        reply = await client.post("/chat/completions", {"messages": twice})
        assert (client.statuses, "refuses two messages" in reply["error"]["message"]) == ([400], True)
        await client.text("a")

    assert play(agent, FakeGenerator("yes"), Strict()).turns == 1


class Forgetful(ByteChat):
    def continuation(self, history: Any, stopped: bool, messages: Any) -> Any:
        raise RewrittenHistory("the chat template rewrites history")


def test_a_template_that_rewrites_history_begins_another_sequence() -> None:
    async def agent(client: Client) -> None:
        await client.chat("a")
        await client.chat("a", "yes", "b")

    first, second = play(agent, FakeGenerator(["yes", "two"]), Forgetful()).trajectories
    assert [bytes(t.tokens[t.loss_mask][:-1].tolist()) for t in (first, second)] == [b"yes", b"two"]
    assert second.prompt_length > len(first.tokens), "its prompt shows the first response"


class Broken(FakeGenerator):
    """Answers once, and raises from then on."""

    def __init__(self, error: Exception) -> None:
        super().__init__("yes")
        self.error = error

    async def generate(self, request: Request) -> Completion:
        if self.requests:
            raise self.error
        return await super().generate(request)


@pytest.mark.parametrize("swallowed", [False, True])
def test_a_lost_generator_ends_the_run_however_the_agent_takes_it(swallowed: bool) -> None:
    seen: list[int] = []

    async def agent(client: Client) -> None:
        await client.chat("a")
        try:
            await client.chat("a", "yes", "b")
            await asyncio.sleep(10)
        except asyncio.CancelledError:
            if not swallowed:
                raise
        finally:
            seen.extend(client.statuses)

    with pytest.raises(WorkerLost, match="it died"):
        play(agent, Broken(WorkerLost("generator", 0, "generate", "it died")))
    assert seen[0] == 200


def test_the_agent_is_told_that_the_model_is_gone() -> None:
    seen: dict[str, Any] = {}

    async def elsewhere(client: Client) -> None:
        await client.chat("a")
        seen.update(await client.chat("a", "yes", "b"), statuses=client.statuses)

    async def agent(client: Client) -> None:
        async def outside() -> None:  # a process of its own is not cancelled with the episode
            async with aiohttp.ClientSession() as session:
                await elsewhere(Client(client.address, session))

        task = asyncio.get_running_loop().create_task(outside())
        try:
            await asyncio.sleep(10)
        finally:
            await task

    with pytest.raises(EpisodeFailed) as caught:
        play(agent, Broken(RequestLost("3 replicas were lost")))
    assert caught.value.infrastructure
    assert (seen["statuses"], seen["error"]["code"]) == ([200, 503], "model_failed")


class Refuses(FakeGenerator):
    """Refuses a token that it does not have, as generators do, by a plain error."""

    def __init__(self, error: type[WhetError]) -> None:
        super().__init__("yes")
        self._error = error

    async def generate(self, request: Request) -> Completion:
        if request.tokens.max() > END:
            raise self._error(f"request {request.id} has a token outside the vocabulary of 257")
        return await super().generate(request)


def test_a_request_that_the_generator_refuses_is_refused_and_the_episode_goes_on() -> None:
    async def agent(client: Client) -> None:
        await client.text("a")
        reply = await client.post("/completions", {"prompt": [5, 400_000]})
        assert (client.statuses[-1], "outside the vocabulary" in reply["error"]["message"]) == (400, True)
        await client.text("a", "yes", "b")

    assert play(agent, Refuses(WhetError)).turns == 2


def test_a_generator_that_breaks_its_contract_is_none_of_the_requests_fault() -> None:
    async def agent(client: Client) -> None:
        await client.post("/completions", {"prompt": [5, 400_000]})

    with pytest.raises(WhetError, match="outside the vocabulary"):
        play(agent, Refuses(PluginError))


def test_an_image_in_a_turn_that_is_recorded_without_it_is_refused(tiny_model_folder: Path) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    chat = ChatTokenizer(tiny_model_folder)

    async def agent(client: Client) -> None:
        said = [{"role": "assistant", "content": await client.text("a")}, {"role": "user", "content": "b"}]
        other = {"role": "user", "content": [{"type": "text", "text": "a"}, image]}
        reply = await client.post("/chat/completions", {"messages": [other, *said]})
        assert (client.statuses, "image" in reply["error"]["message"]) == ([200, 400], True)

    assert play(agent, FakeGenerator("yes", codec=chat), chat).turns == 1


class Uneven(FakeGenerator):
    """Never finishes one of its responses."""

    def __init__(self, answers: list[str], endless: int) -> None:
        super().__init__(answers)
        self._endless = endless

    async def generate(self, request: Request) -> Completion:
        number = len(self.requests)
        made = await super().generate(request)
        if number == self._endless:
            await asyncio.sleep(1000)
        return made


@pytest.mark.parametrize("later", [False, True])
def test_of_a_response_that_its_client_does_not_wait_for_no_choice_is_recorded(later: bool) -> None:
    async def agent(client: Client) -> None:
        async def recorded(messages: int) -> None:
            async with asyncio.timeout(8):
                while sum(map(len, client.address.conversations())) != messages:
                    await asyncio.sleep(0.01)

        said = ["a", await client.text("a"), "b"] if later else ["a"]
        left = asyncio.create_task(client.chat(*said, n=2))
        await recorded(2 + 2 * later)
        left.cancel()
        await recorded(2 * later)
        reply = await client.chat(*said, n=2)
        assert [choice["message"]["content"] for choice in reply["choices"]] == ["yes", "no"]

    generator = Uneven([*["one"] * later, "lost", "never", "yes", "no"], 1 + later)
    texts = [bytes(t for t in one.tokens[one.loss_mask] if t < END) for one in play(agent, generator).trajectories]
    assert texts == ([b"oneyes", b"no"] if later else [b"yes", b"no"])


def test_an_agent_that_never_answers_meets_the_deadline_of_the_episode() -> None:
    async def agent(client: Client) -> None:
        await client.chat("a")
        await asyncio.sleep(100)

    with pytest.raises(EpisodeFailed, match=r"cluster\.deadlines\.episode") as caught:
        play(agent, FakeGenerator("yes"), deadline_seconds=1.0)
    assert caught.value.infrastructure


def test_a_client_that_goes_away_cancels_its_request() -> None:
    generator = FakeGenerator("yes", delay_seconds=2.0)

    async def agent(client: Client) -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(client.chat("a"), 0.3)
        for _ in range(100):
            if generator.cancelled:
                break
            await asyncio.sleep(0.02)
        assert len(generator.cancelled) == 1
        generator._delay = 0.0
        await client.text("a")

    (one,) = play(agent, generator).trajectories
    assert one.loss_mask.sum() == 4


def test_what_is_under_way_ends_with_the_episode_and_the_key_is_worth_nothing_then() -> None:
    generator = FakeGenerator("yes", delay_seconds=0.0)
    left: list[Any] = []

    async def agent(client: Client) -> None:
        await client.chat("a")
        generator._delay = 30.0

        async def late() -> Any:
            async with aiohttp.ClientSession() as session:
                return await Client(client.address, session).chat("b")

        left.append(asyncio.get_running_loop().create_task(late()))
        while len(generator.requests) < 2:
            await asyncio.sleep(0.01)

    async def both() -> Any:
        assignment = Assignment(Route("foreign", Foreign(agent), "train"), Task("hello"), 3, 7)
        episode = await make_player(generator).episode(assignment, 0)
        return episode, await left[0]

    episode, reply = asyncio.run(both())
    assert (episode.turns, reply["error"]["code"], len(generator.cancelled)) == (1, "over", 1)


def test_an_episode_that_the_agent_never_asked_in_is_a_failure() -> None:
    async def agent(client: Client) -> None:
        pass

    with pytest.raises(EpisodeFailed, match="without asking the model anything"):
        play(agent, FakeGenerator("yes"))
