"""Episodes in worker processes are those that the driver would play; what goes wrong in a process stays there."""

import asyncio
import os
import re
import signal
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from whet.component import Spec, resolve
from whet.config.cluster import DeadlinesSection
from whet.config.sections import EnvironmentSection
from whet.config.structure import structure
from whet.data.messages import Message
from whet.data.records import Reply, Sampling, Task
from whet.errors import ConfigError, ContextFull, DataError, EpisodeError, InfrastructureError, PluginError, Undecided
from whet.interfaces.clock import RUNNING, Clock
from whet.interfaces.environment import Environment, stated_answer
from whet.interfaces.undecided import noted
from whet.plugins.registry import load_plugins
from whet.rollout.gate import Gate
from whet.rollout.recorded import Assignment
from whet.rollout.rewards import total_reward
from whet.rollout.routing import Route
from whet_envworkers.remote import RemoteEnvironment
from whet_envworkers.worker import EnvironmentWorker
from whet_testing.fakes import FakeGenerator, FakeModel
from whet_testing.playing import make_player

REGISTRY = load_plugins()
REGISTRY.load_file(Path(__file__).parent / "apart.py")


def made(processes=1, episode=60.0, memory_gib=0.0, logs=None, **settings):
    worker = {"processes": processes, "memory_gib": memory_gib}
    section = structure({"use": "apart", "worker": worker, **settings}, EnvironmentSection, REGISTRY)
    return RemoteEnvironment(section, "it", DeadlinesSection(episode=episode), logs=logs)


@pytest.fixture(scope="module")
def remote():
    environment = made(2, memory_gib=4)
    yield environment
    environment.close()


def task_of(environment, kind, number=0):
    return next(t for t in environment.tasks("train") if t.id == f"{kind}-{number}")


def backwards(messages):
    return messages[-1].text[::-1]


def played(environment, kind, model=None, number=0):
    model = model or FakeModel(backwards)
    with noted() as notes:
        rewards = asyncio.run(environment.run(task_of(environment, kind, number), model))
    return model, rewards, notes


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("reward_weights = {'right': 'much'}", "its `reward_weights` is {'right': 'much'}"),
        ("reward_weights = {}\n    def state(self): return {}", "has the method `state` and no `load`"),
    ],
)
def test_an_environment_that_breaks_its_contract_is_refused_in_the_process(tmp_path, lines, words):
    (tmp_path / "own.py").write_text(f"class Own:\n    def __init__(self, config): pass\n    {lines}\n")
    worker = EnvironmentWorker(None, Spec(f"file:{tmp_path / 'own.py'}:Own"), "it", [], 0)
    with pytest.raises(PluginError, match=re.escape(words)):
        worker.about()


def test_it_is_an_environment_with_the_tasks_and_weights_of_the_one_in_the_process(remote):
    assert isinstance(remote, Environment)
    assert dict(remote.reward_weights) == {"right": 1.0, "process": 0.0}
    assert len(remote.tasks("train")) == 220
    assert remote.tasks("test")[0].prompt == (Message("user", "plain 0"),)
    with pytest.raises(IndexError):
        remote.tasks("train")[220]
    with pytest.raises(DataError, match="no split 'valid'"):
        remote.tasks("valid")


def test_a_weight_that_the_environment_adds_when_it_plays_reaches_the_driver():
    environment = made(kinds=["metric"])
    try:
        model, rewards, _ = played(environment, "metric")
        given = {**rewards, **model.rewarded({})}
        assert given["steps"] == 100.0
        assert total_reward(given, environment.reward_weights) == 1.0
        asyncio.run(environment.group_rewards(task_of(environment, "metric"), []))
        assert environment.reward_weights["first"] == 0.5
    finally:
        environment.close()


def test_an_episode_has_the_rewards_and_records_that_its_environment_gave_in_another_process(remote):
    model, rewards, _ = played(remote, "plain")
    assert rewards["right"] == 1.0
    assert int(rewards["process"]) != os.getpid()
    assert model.rewarded({}) == {"step": 0.5}
    assert model.log == {"seen": [1, 2]}


def test_sequences_that_are_asked_at_once_belong_to_their_agents(remote):
    model, _, _ = played(remote, "forks")
    assert [one.agent for one in model._sequences()] == ["", "", "a", "b"]
    assert [one.messages[-1].text for one in model._sequences()] == ["0 skrof", "kool", "no og", "no og"]
    assert model.log == {"calls": 0}


def test_an_agent_at_an_endpoint_plays_the_episode_of_a_process(remote):
    model, rewards, _ = played(remote, "agent", FakeModel(lambda messages: "42"))
    assert rewards["right"] == 0.0
    assert model.log["agent"] == "user: hello, assistant: 42"


def test_a_thread_of_the_environment_may_ask_with_a_loop_of_its_own(remote):
    assert played(remote, "threaded")[0].log == {"said": "daerht a morf"}


def test_roles_are_asked_of_the_driver():
    class Judge:
        async def reply(self, messages, *, seed, **settings):
            return Reply(f"{messages[-1].text} by {seed}, {settings['max_tokens']} tokens", (), "stop")

    section = structure({"use": "apart", "worker": {}, "kinds": ["judged"]}, EnvironmentSection, REGISTRY)
    environment = RemoteEnvironment(section, "it", None, {"judge": Judge()})
    try:
        assert played(environment, "judged")[0].log == {"verdict": "good? by 7, 5 tokens"}
    finally:
        environment.close()


def test_final_answers_and_rewards_of_groups_are_asked_of_the_process(remote):
    said = (Message("user", "plain 0"), Message("assistant", "42"))
    assert stated_answer(remote, said) == "42"
    assert asyncio.run(remote.group_rewards(task_of(remote, "plain"), [])) == []


@pytest.mark.parametrize(
    ("kind", "error", "words"),
    [
        ("raises", EpisodeError, r"KeyError: 'no such key' \(.*apart.py:\d+, in _raises"),
        ("infrastructure", InfrastructureError, "its server is away"),
        ("group", InfrastructureError, "its server is away"),
        ("exits", EpisodeError, "SystemExit: 3"),
        ("cancels", EpisodeError, "CancelledError"),
        ("eats", EpisodeError, "MemoryError"),
    ],
)
def test_an_error_of_an_environment_keeps_its_meaning_and_its_place(remote, kind, error, words):
    with pytest.raises(error, match=words) as raised:
        played(remote, kind)
    assert type(raised.value) is error
    assert re.match(r"\w+ at .*apart.py:\d+, in _", raised.value.origin)
    assert played(remote, "plain")[1]["right"] == 1.0


def test_what_a_grader_in_the_process_cannot_decide_is_noted_by_the_driver(remote):
    with noted() as notes, pytest.raises(Undecided, match="too long"):
        asyncio.run(remote.run(task_of(remote, "undecided"), FakeModel("x")))
    assert notes == ["it is too long"]


def test_a_full_context_reaches_the_environment_and_comes_back(remote):
    with pytest.raises(ContextFull, match="leaves no room"):
        played(remote, "forks", FakeModel(backwards, room=0))


@pytest.mark.parametrize("error", [asyncio.CancelledError(), ConnectionError("away")])
def test_a_reply_that_fails_in_the_driver_ends_the_episode(remote, error):
    class Failing(FakeModel):
        async def reply(self, messages, **settings):
            raise error

    with pytest.raises(type(error)):
        played(remote, "plain", Failing("x"))
    assert played(remote, "plain")[1]["right"] == 1.0


def test_episodes_are_spread_over_the_processes(remote):
    async def together():
        task = task_of(remote, "plain")
        return await asyncio.gather(*(remote.run(task, FakeModel("x")) for _ in range(6)))

    processes = [rewards["process"] for rewards in asyncio.run(together())]
    assert sorted(map(processes.count, set(processes))) == [3, 3]


class Slow(FakeGenerator):
    """A request that says `slowly` waits for one that says `now`."""

    def __init__(self):
        super().__init__(lambda prompt, rng: "ok")
        self._now = asyncio.Event()

    async def generate(self, request):
        text = bytes(request.tokens.astype(np.uint8))
        if b"slowly" in text:
            await asyncio.wait_for(self._now.wait(), 30)
        if b"now" in text:
            self._now.set()
        return await super().generate(request)


class Handshake(FakeGenerator):
    """A request that says `slowly` ends while the process is busy."""

    def __init__(self, folder):
        super().__init__(lambda prompt, rng: "ok")
        self._folder = folder

    async def generate(self, request):
        if b"slowly" not in bytes(request.tokens.astype(np.uint8)):
            return await super().generate(request)
        (self._folder / "asked").touch()
        while not (self._folder / "busy").exists():
            await asyncio.sleep(0.01)
        made = await super().generate(request)
        (self._folder / "replied").touch()
        return made


def recorded(remote, kind, apart, generator=None):
    """Return the episode that a run records, played in a process or by the driver."""
    component = REGISTRY.find("environments", "apart").component
    environment = remote if apart else resolve(component.target)(component.config())
    task = task_of(environment, kind)
    assignment = Assignment(Route("it", environment, "train"), task, 0, 0)
    player = make_player(generator or Slow(), sampling=Sampling(max_tokens=16))
    return task, asyncio.run(player.episode(assignment, 0))


@pytest.mark.parametrize("apart", [False, True], ids=["driver", "worker"])
def test_a_reply_that_the_environment_gives_up_leaves_nothing(remote, apart):
    task, episode = recorded(remote, "impatient", apart)
    assert [text for _, text in episode.messages] == [task.prompt[0].text, "ok", "now", "ok"]
    (one,) = episode.trajectories
    assert one.loss_mask.sum() == 2 * len("ok.")
    assert episode.turns == 2


@pytest.mark.parametrize("kind", ["driver", "worker", "busy worker"])
def test_what_an_episode_does_while_a_reply_is_under_way_happens_at_once(remote, tmp_path, kind):
    if kind == "busy worker":
        busy = made(folder=str(tmp_path))
        try:
            _, episode = recorded(busy, "grades", True, Handshake(tmp_path))
        finally:
            busy.close()
    else:
        _, episode = recorded(remote, "beside", kind == "worker")
    first, other = episode.trajectories
    (early,) = first.spans
    assert (early.name, early.begin) == ("early", first.turns[0][0])
    assert (other.agent, len(first.turns), len(other.turns)) == ("other", 2, 1)
    assert b"slowly" not in bytes(other.tokens.astype(np.uint8))


def test_a_clock_that_the_environment_stops_is_that_of_the_driver(remote):
    class Told(Clock):
        def __init__(self):
            super().__init__(asyncio.timeout(None), 0.0)
            self.told = []

        def stop(self):
            self.told.append("stop")

        def go(self):
            self.told.append("go")

    def answer(messages):
        if messages[-1].text == "meanwhile":
            clock.told.append("reply")
        return "x"

    async def play():
        nonlocal clock
        clock = Told()
        RUNNING.set(clock)
        await remote.run(task_of(remote, "waits"), FakeModel(answer))

    clock = None
    asyncio.run(play())
    assert clock.told == ["stop", "reply", "go"]


def test_a_reward_after_the_end_of_an_episode_is_an_error():
    environment = made(1)
    try:
        played(environment, "late", number=0)
        model, _, _ = played(environment, "late", number=1)
    finally:
        environment.close()
    assert model.log == {
        "found": "model.reward after the episode's end has no effect; await its task before `run` returns"
    }


def test_a_process_that_dies_is_replaced_and_named(tmp_path):
    environment = made(folder=str(tmp_path), logs=tmp_path / "logs")
    try:
        with pytest.raises(InfrastructureError, match=r"environment 'it': .*(SIGABRT|signal 6|Aborted)"):
            played(environment, "dies")
        assert played(environment, "dies")[1]["right"] == 1.0
        process = int(played(environment, "plain")[1]["process"])
        os.kill(process, signal.SIGKILL)
        with pytest.raises(InfrastructureError, match="environment 'it'"):
            for _ in range(3):
                played(environment, "plain")
        assert played(environment, "plain")[1]["right"] == 1.0
        assert environment.replaced == 2
    finally:
        environment.close()
    assert "Aborted" in (tmp_path / "logs" / "environment-it-0.log").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_no_episode_is_lost_to_a_process_that_is_being_replaced(tmp_path, processes):
    environment = made(processes, folder=str(tmp_path))
    (tmp_path / "slow").touch()

    async def play():
        dying = asyncio.create_task(environment.run(task_of(environment, "dies"), FakeModel("x")))
        while not (tmp_path / "building").exists():
            await asyncio.sleep(0.01)
        task = environment.tasks("train")[0] if processes > 1 else Task("plain 0", {"kind": "plain"}, id="plain-0")
        others = [asyncio.create_task(environment.run(task, FakeModel("x"))) for _ in range(4)]
        done, _ = await asyncio.wait(others, timeout=20 if processes > 1 else 0.2)
        (tmp_path / "go").touch()
        assert len(done) == (4 if processes > 1 else 0)
        await asyncio.gather(*others)
        with pytest.raises(InfrastructureError):
            await dying

    try:
        asyncio.run(play())
        assert environment.replaced == 1
    finally:
        environment.close()


def test_an_episode_that_hangs_beyond_its_deadline_costs_its_process_and_nothing_else(tmp_path, monkeypatch):
    monkeypatch.setattr("whet_envworkers.remote.CANCEL_SECONDS", 1.0)
    environment = made(folder=str(tmp_path))

    async def hang():
        process = (await environment.run(task_of(environment, "plain"), FakeModel("x")))["process"]
        with suppress(TimeoutError):
            async with Gate().time_limit(60) as limit:
                hanging = asyncio.create_task(environment.run(task_of(environment, "hangs"), FakeModel(backwards)))
                while not (tmp_path / "hangs-0").exists():  # from here on its process obeys nothing
                    await asyncio.sleep(0.05)
                limit.reschedule(asyncio.get_running_loop().time())
                await hanging
        while not environment.replaced:
            await asyncio.sleep(0.05)
        return process, await environment.run(task_of(environment, "hangs"), FakeModel(backwards))

    try:
        process, rewards = asyncio.run(hang())
        assert rewards["right"] == 1.0
        assert rewards["process"] != process
    finally:
        environment.close()


@pytest.mark.parametrize("kind", ["tidies", "swallows"])
def test_an_episode_that_is_given_up_tidies_up_and_costs_no_healthy_one_of_its_process(tmp_path, monkeypatch, kind):
    monkeypatch.setattr("whet_envworkers.remote.CANCEL_SECONDS", 0.1)
    environment = made(folder=str(tmp_path))

    class Silent(FakeModel):
        async def reply(self, messages, **settings):
            if messages[-1].text == "for ever":
                asked.set()
                await asyncio.Event().wait()
            return await super().reply(messages, **settings)

    async def give_up():
        waiting = asyncio.create_task(environment.run(task_of(environment, kind), Silent(backwards)))
        await asked.wait()
        healthy = asyncio.create_task(environment.run(task_of(environment, "blocks"), FakeModel(backwards)))
        while not (tmp_path / "blocks-0").exists():  # from here on its process obeys nothing
            await asyncio.sleep(0.05)
        waiting.cancel()
        await asyncio.wait([healthy], timeout=1.0)
        (tmp_path / "go").touch()
        rewards = await healthy
        async with asyncio.timeout(20):
            while not (tmp_path / f"{kind}-0").exists():
                await asyncio.sleep(0.05)
        return rewards

    asked = asyncio.Event()
    try:
        assert asyncio.run(give_up())["right"] == 1.0
        assert environment.replaced == 0
    finally:
        environment.close()


def test_closing_removes_a_temporary_folder_of_logs(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    made().close()
    assert not any(tmp_path.iterdir())


def test_closing_ends_the_processes(no_orphans):
    environment = made(2)
    environment.close()
    environment.close()


def test_an_environment_is_asked_for_the_tasks_of_a_split_once(tmp_path):
    tasks = "asked = []\n    def tasks(self, split): return [self.asked.append(split), 'task'][1:]"
    lines = f"reward_weights = {{}}\n    {tasks}"
    (tmp_path / "own.py").write_text(f"class Own:\n    def __init__(self, config): pass\n    {lines}\n")
    worker = EnvironmentWorker(None, Spec(f"file:{tmp_path / 'own.py'}:Own"), "it", [], 0)
    for split in ("train", "test"):
        assert worker.count(split) == {"value": 1}
        assert worker.task(split, 0) == worker.task(split, 0) == {"value": "task"}
    assert worker._environment.asked == ["train", "test"]


def test_a_curriculum_in_processes_is_refused():
    section = structure({"use": "arithmetic", "worker": {}, "easiest_terms": 2}, EnvironmentSection, REGISTRY)
    with pytest.raises(ConfigError, match=r"it has a curriculum \(`difficulty`, .*\), which processes would"):
        RemoteEnvironment(section, "it")


def test_an_environment_that_keeps_a_state_is_not_called_a_curriculum(tmp_path):
    lines = "reward_weights = {}\n    def state(self): return {}\n    def load(self, state): pass"
    (tmp_path / "own.py").write_text(f"class Own:\n    def __init__(self, config): pass\n    {lines}\n")
    worker = EnvironmentWorker(None, Spec(f"file:{tmp_path / 'own.py'}:Own"), "it", [], 0)
    assert worker.about()["keeps"] == "a state (`state` and `load`)"
