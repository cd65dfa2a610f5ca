import asyncio
import json
import math

import pytest
from attrs import frozen

from whet.component import Component, RoleNeed, Selection
from whet.config.structure import structure
from whet.data.messages import Message
from whet.data.model_info import ModelInfo
from whet.data.records import Episode
from whet.errors import ConfigError, DataError, EpisodeError, Undecided
from whet.interfaces.environment import Adaptive, GroupRewarding
from whet.interfaces.state import Stateful
from whet.plugins.registry import load_plugins
from whet.rollout.rewards import total_reward
from whet_env_judge.config import JudgeConfig, judge_facts
from whet_env_judge.judge import Judge
from whet_env_judge.judged import Recorder
from whet_testing.fakes import FakeModel
from whet_testing.responding import selected

MODEL = ModelInfo("", {})


class Heard:
    """Keeps what it was asked, and says what it was told to."""

    def __init__(self, value=3.0):
        self.said, self.asked, self.cut = value, [], []

    async def value(self, messages, cut=False):
        self.asked.append(tuple(messages))
        self.cut.append(cut)
        return self.said


def play(environment, answers, task=None, split="train"):
    task = task or environment.tasks(split)[0]
    return asyncio.run(environment.run(task, FakeModel(answers)))


@pytest.fixture
def prompts(tmp_path):
    def write(*records, **config):
        file = tmp_path / "prompts.jsonl"
        file.write_text("".join(json.dumps(record) + "\n" for record in records))
        return Judge(JudgeConfig(dataset=str(file), **config), {"judge": (judge := Heard())}), judge

    return write


def test_the_judge_sees_the_whole_conversation(prompts):
    environment, judge = prompts({"asked": [{"role": "user", "content": "6*7?"}]}, question="asked", system="Be brief.")
    assert play(environment, "42") == {"judge": 3.0}
    assert judge.asked == [(Message("system", "Be brief."), Message("user", "6*7?"), Message("assistant", "42"))]


def test_the_judge_sees_what_a_foreign_agent_and_the_model_said():
    pytest.importorskip("whet_endpoint", reason="whet-endpoint is not installed")
    http = pytest.importorskip("aiohttp")
    model = Recorder(FakeModel("42"))

    async def asked():
        async with model.endpoint() as address, http.ClientSession() as session:
            headers = {"Authorization": f"Bearer {address.api_key}"}
            said = {"messages": [{"role": "user", "content": "6*7?"}]}
            async with session.post(f"{address.base_url}/chat/completions", json=said, headers=headers) as response:
                assert response.status == 200

    asyncio.run(asked())
    assert model.messages == [Message("user", "6*7?"), Message("assistant", "42")]


def test_the_judge_sees_all_turns_and_no_other_sequence():
    judge = Heard()
    puzzle = selected("sliding-puzzle", turns=2, shuffle=20, move="line")
    environment = Judge(JudgeConfig(environment=puzzle), {"judge": judge})
    rewards = play(environment, ["up", "down"])
    assert rewards["judge"] == 3.0
    assert [message.role for message in judge.asked[0]] == ["user", "assistant", "user", "assistant"]
    assert judge.asked[0][-1].text == "down"


def test_sequences_that_are_started_beside_are_not_judged(prompts):
    async def talk():
        first = Recorder(FakeModel(["one", "aside", "two"]))
        await first.reply("a")
        await first.fork().reply("b")
        await first.reply("c")
        return [message.text for message in first.messages]

    assert asyncio.run(talk()) == ["a", "one", "c", "two"]


@pytest.mark.parametrize(
    ("settings", "reward"),
    [
        ({}, 3.0),
        ({"mean": 1.0, "scale": 4.0}, 0.5),
        ({"clip": (-1.0, 2.0)}, 2.0),
        ({"mean": 9.0, "scale": 2.0, "clip": (-1.0, 2.0)}, -1.0),
    ],
)
def test_a_value_is_shifted_scaled_and_then_clipped(prompts, settings, reward):
    environment, _ = prompts({"prompt": "x"}, **settings)
    assert play(environment, "y") == {"judge": reward}


def test_what_is_too_long_is_cut_only_if_wanted(prompts):
    for settings, cut in (({}, False), ({"too_long": "cut"}, True)):
        environment, judge = prompts({"prompt": "x"}, **settings)
        play(environment, "y")
        assert judge.cut == [cut]


def test_own_rewards_are_recorded_and_count_only_if_wanted():
    for factor in (0.0, 2.0):
        config = JudgeConfig(environment=selected("arithmetic"), judge_weight=0.5, environment_weight=factor)
        environment = Judge(config, {"judge": Heard()})
        task = environment.tasks("train")[0]
        assert play(environment, f"\\boxed{{{task.data['answer']}}}", task) == {"correct": 1.0, "judge": 3.0}
        assert environment.reward_weights == {"correct": factor, "judge": 0.5}


@frozen
class Nothing:
    """No settings."""


SOURCE = """
from whet.data.messages import Message
from whet.data.records import Task
from whet.interfaces.environment import SingleTurn


class Build(SingleTurn):
    reward_weights = {}

    def __init__(self, config):
        tasks = {"train": [Task((Message("user", "x"),), {})]}
        super().__init__(tasks, rewards={"%s": lambda text, data: 1.0})
"""


@pytest.fixture
def giving(tmp_path):
    def write(name):
        (tmp_path / "own.py").write_text(SOURCE % name)
        return Selection("environments", Component("own", Nothing, f"file:{tmp_path / 'own.py'}:Build"), Nothing())

    return write


def test_own_rewards_without_a_weight_of_their_own_count_by_the_factor_too(giving):
    environment = Judge(JudgeConfig(environment=giving("extra")), {"judge": Heard()})
    rewards = play(environment, "y")
    assert rewards == {"extra": 1.0, "judge": 3.0}
    assert total_reward(rewards, environment.reward_weights) == 3.0


LATE = """
from whet.data.records import Task


class Build:
    def __init__(self, config):
        self.reward_weights = {}

    def tasks(self, split):
        return [Task("x", {})]

    async def run(self, task, model):
        reply = await model.reply("x")
        if reply.text == "adds":
            self.reward_weights = {"late": 2.0}
        if reply.text == "records":
            model.fork().reward("late", 5.0)
        return {}

    async def group_rewards(self, task, episodes):
        return [{} if "late" in one.rewards else {"late": 5.0} for one in episodes]
"""


@pytest.mark.parametrize("where", ["adds", "records", "compares", "elsewhere"])
@pytest.mark.parametrize("rank", [False, True])
def test_the_weight_of_an_environment_holds_for_rewards_that_it_names_late(tmp_path, where, rank):
    (tmp_path / "own.py").write_text(LATE)
    own = Selection("environments", Component("own", Nothing, f"file:{tmp_path / 'own.py'}:Build"), Nothing())
    environment = Judge(JudgeConfig(environment=own, environment_weight=0.0, rank=rank), {"judge": Heard()})
    given = {"judge_value" if rank else "judge": 3.0}
    if where in ("adds", "records"):
        assert play(environment, where) == given
    else:
        further = {"late": 5.0} if where == "elsewhere" else {}
        episodes = [Episode("judge", 0, 0, (), {**given, **further}, 0.0, 1)]
        asyncio.run(environment.group_rewards(environment.tasks("train")[0], episodes))
    assert environment.reward_weights["late"] == 0.0


def test_an_own_reward_with_the_name_of_the_role_is_refused(giving):
    environment = Judge(JudgeConfig(environment=giving("judge")), {"judge": Heard()})
    with pytest.raises(EpisodeError, match="has a reward 'judge', too; give the role another name"):
        play(environment, "y")


def test_judges_can_be_stacked_and_each_gets_its_role(prompts, tmp_path):
    prompts({"prompt": "x"})
    inner = selected("judge", role="helpful", dataset=str(tmp_path / "prompts.jsonl"))
    config = JudgeConfig(role="harmless", environment=inner, environment_weight=2.0)
    assert judge_facts(config, MODEL).roles == dict.fromkeys(
        ("helpful", "harmless"), RoleNeed(frozenset({"values"}), conversations=True)
    )
    environment = Judge(config, {"helpful": Heard(1.0), "harmless": Heard(5.0)})
    assert play(environment, "y") == {"helpful": 1.0, "harmless": 5.0}
    assert environment.reward_weights == {"helpful": 2.0, "harmless": 1.0}


def test_votes_are_those_of_the_environment_within(prompts):
    environment = Judge(JudgeConfig(environment=selected("arithmetic")), {"judge": Heard()})
    assert environment.final_answer((Message("assistant", "\\boxed{4}"),)) == "4"
    assert judge_facts(JudgeConfig(environment=selected("arithmetic")), MODEL).states_answers
    assert prompts({"prompt": "x"})[0].final_answer is None
    assert judge_facts(JudgeConfig(dataset="x"), MODEL).states_answers is False


@pytest.mark.parametrize(
    ("record", "complaint"),
    [
        ({"question": "x"}, "the field 'prompt' is missing; there are ['question']"),
        ({"prompt": " "}, "the prompt is ' ', wanted words"),
        ({"prompt": [{"role": "assistant", "content": "x"}]}, "wanted words that the model is to respond to"),
        ({"prompt": 3}, "the column 'prompt' must be text or a list of messages, found the number 3"),
    ],
)
def test_records_that_are_no_prompts_are_refused_or_left_out(prompts, record, complaint):
    with pytest.raises(DataError) as caught:
        prompts({"prompt": "x"}, record)[0].tasks("train")
    assert "prompts.jsonl:2" in str(caught.value)
    assert complaint in str(caught.value)
    assert len(prompts({"prompt": "x"}, record, max_bad_records=0.5)[0].tasks("train")) == 1


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({}, "neither of dataset and environment given; wanted one"),
        ({"dataset": "x", "environment": "arithmetic"}, "dataset: both of dataset and environment given"),
        ({"dataset": "x", "scale": 0}, "scale: must be > 0"),
        ({"dataset": "x", "clip": [1, -1]}, "clip: is [1.0, -1.0], wanted the lower bound"),
        ({"dataset": "x", "mean": math.nan}, "mean: wanted a finite number, found nan"),
        ({"environment": {"use": "arithmetic", "term": 3}}, "environment.term: unknown key"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, complaint):
    with pytest.raises(ConfigError) as caught:
        structure(settings, JudgeConfig, load_plugins())
    assert complaint in str(caught.value)


def test_the_judge_s_reward_stands_where_the_environment_s_grader_cannot_decide(monkeypatch):
    judge = Heard()
    environment = Judge(JudgeConfig(environment=selected("arithmetic")), {"judge": judge})

    async def run(task, model):
        await model.reply(task.prompt)
        raise Undecided("it needs too much")

    monkeypatch.setattr(environment._environment, "run", run)
    assert play(environment, "\\boxed{1}") == {"correct": 0.0, "judge": 3.0}
    assert judge.asked[0][-1] == Message("assistant", "\\boxed{1}")


def test_the_reward_is_the_rank_of_the_value_in_its_group(prompts):
    environment, judge = prompts({"prompt": "x"}, rank=True, judge_weight=2.0)
    assert isinstance(environment, GroupRewarding)
    assert environment.reward_weights == {"judge_value": 0.0, "judge": 2.0}
    episodes = []
    for sample, judge.said in enumerate((5.0, -1.0, 5.0, 7.0)):
        rewards = play(environment, "y")
        assert rewards == {"judge_value": judge.said}
        episodes.append(Episode("judge", 0, sample, (), rewards, 0.0, 1))
    ranks = asyncio.run(environment.group_rewards(environment.tasks("train")[0], episodes))
    assert ranks == [{"judge": 0.5}, {"judge": 0.0}, {"judge": 0.5}, {"judge": 1.0}]
    alone = asyncio.run(environment.group_rewards(environment.tasks("train")[0], episodes[:1]))
    assert alone == [{"judge": 0.5}]
    assert not isinstance(prompts({"prompt": "x"})[0], GroupRewarding)


def test_a_curriculum_within_is_that_of_the_judge():
    config = JudgeConfig(environment=selected("arithmetic", terms=4, easiest_terms=2))
    environment = Judge(config, {"judge": Heard()})
    assert isinstance(environment, Adaptive)
    assert isinstance(environment, Stateful)
    assert environment.difficulty() == 2


def test_the_splits_of_the_environment_within_are_facts():
    of_prompts = JudgeConfig(dataset={"train": "a.jsonl"})
    assert judge_facts(JudgeConfig(environment=selected("arithmetic")), MODEL).splits == ("train", "test")
    assert judge_facts(of_prompts, MODEL).splits == ("train",)
    assert judge_facts(JudgeConfig(environment=selected("judge", dataset="a.jsonl")), MODEL).splits is None
