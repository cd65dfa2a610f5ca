import asyncio
import json
import math
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from whet.config.build import build_selection
from whet.config.structure import structure
from whet.data.records import Episode, Task, Trajectory
from whet.errors import ConfigError, ContextFull, EpisodeError, Undecided
from whet.interfaces.undecided import noted
from whet.plugins.registry import load_plugins
from whet.rollout.rewards import total_reward
from whet_data.finished import Finished
from whet_env_rewards.answers import edit_similarity, f1
from whet_env_rewards.config import RewardedConfig, RewardSection
from whet_env_rewards.dapo import normalised
from whet_env_rewards.json_schema import fenced, fits
from whet_env_rewards.rewarded import Rewarded
from whet_testing.fakes import FakeModel
from whet_testing.hostile import HOSTILE_ANSWERS

installed = cache(load_plugins)


def make(**document: Any) -> Any:
    return build_selection(structure(document, RewardSection, installed()).component)


def score(
    text: str, gold: Any = None, tokens: int = 0, rewards: Mapping[str, float] | None = None, **document: Any
) -> float:
    value = make(**document)(Finished(text, {} if gold is None else {"answer": gold}, (), tokens, False, rewards or {}))
    return float(asyncio.run(value) if asyncio.iscoroutine(value) else value)


# The form of a response.


@pytest.mark.parametrize(
    ("text", "whole", "partial"),
    [
        ("<think>2+2</think><answer>4</answer>", 1, 1),
        (" \n<think>\n2+2\n</think>\n\n<answer>4</answer>\n", 1, 1),
        ("<think></think><answer></answer>", 1, 1),
        ("So: <think>2+2</think><answer>4</answer>", 0, 1),
        ("<think>2+2</think> is <answer>4</answer>", 0, 1),
        ("<think>2+2</think><answer>4</answer>.", 0, 1),
        ("<answer>4</answer><think>2+2</think>", 0, 1),
        ("<think><answer>4</answer></think>", 0, 1),
        ("<think>2+2<answer>4</answer>", 0, 0.75),
        ("<think>a</think><think>b</think><answer>4</answer>", 0, 0.5),
        ("<THINK>2+2</THINK><answer>4</answer>", 0, 0.5),
        ("4", 0, 0),
    ],
)
def test_the_format_is_the_tags_and_nothing_else(text: str, whole: float, partial: float) -> None:
    assert score(text, use="tag-format") == whole
    assert score(text, use="tag-format", partial=True) == partial


def test_a_prompt_may_have_opened_the_first_tag() -> None:
    assert score("2+2</think><answer>4</answer>", use="tag-format", opened=True) == 1
    assert score("<think>2+2</think><answer>4</answer>", use="tag-format", opened=True) == 0
    assert score("<plan>x</plan>", use="tag-format", tags=["plan"]) == 1


@pytest.mark.parametrize(
    ("text", "words", "share"),
    [
        ("a b c d", 3, 0),  # abc, bcd
        ("a b c a b c", 3, 1 / 4),  # abc, bca, cab, abc
        ("A b C a B c", 3, 1 / 4),
        ("no no no no", 2, 2 / 3),  # one phrase three times
        ("no no", 3, 0),
        ("", 1, 0),
        ("x y x y", 1, 1 / 2),
    ],
)
def test_repetition_is_the_share_of_phrases_that_occurred_before(text: str, words: int, share: float) -> None:
    assert score(text, use="repetition", words=words) == pytest.approx(share)


# Lengths. The numbers are worked out by hand from the equations of the papers.


@pytest.mark.parametrize(("tokens", "penalty"), [(0, 0), (16, 0), (17, -0.25), (18, -0.5), (20, -1), (999, -1)])
def test_the_soft_penalty_of_dapo(tokens: int, penalty: float) -> None:
    assert score("", tokens=tokens, use="overlong", longest=20, buffer=4) == penalty


@pytest.mark.parametrize(
    ("tokens", "right", "wrong"),
    [
        (0, 1.0, -1.0),
        (50, 0.75, -0.75),  # the middle of the cosine
        (25, 0.75 + 0.25 * math.sqrt(0.5), -0.75 - 0.25 * math.sqrt(0.5)),  # cos(pi/4)
        (100, 0.5, -0.5),
        (150, 0.5, -0.5),
    ],
)
def test_the_cosine_reward_falls_for_right_and_rises_for_wrong_responses(
    tokens: int, right: float, wrong: float
) -> None:
    for correct, wanted in ((1.0, right), (0.0, wrong)):
        found = score("", tokens=tokens, rewards={"correct": correct}, use="cosine-length", longest=100)
        assert found == pytest.approx(wanted)


def test_lengths_are_compared_in_a_group_as_in_kimi() -> None:
    reward = make(use="group-length")
    episodes = [
        Finished("", {}, (), tokens, False, {"correct": c})
        for tokens, c in ((10, 1), (20, 1), (25, 0), (10, 0), (30, 1))
    ]
    assert reward.of_group(episodes) == pytest.approx([0.5, 0.0, -0.25, 0.0, -0.5])
    assert reward.of_group(episodes[:1] * 3) == [0, 0, 0]


def test_a_length_reward_says_which_reward_it_misses() -> None:
    with pytest.raises(EpisodeError, match="there is no reward 'correct' to decide what is right; there are solved"):
        score("", rewards={"solved": 1.0}, use="cosine-length", longest=100)


# Answers.


@pytest.mark.parametrize(
    ("text", "ignoring", "right"),
    [
        ("The Eiffel Tower.", "style", 1),
        ("eiffel  tower", "style", 1),
        ("Eiffel", "style", 0),
        ("the tower Eiffel", "style", 0),
        ("Eiffel Tower", "nothing", 1),
        (" Eiffel Tower\n", "nothing", 1),
        ("eiffel tower", "nothing", 0),
        ("EIFFEL-TOWER!", "signs", 1),
        ("the Eiffel Tower", "signs", 0),
    ],
)
def test_an_exact_match_ignores_what_it_is_told(text: str, ignoring: str, right: float) -> None:
    assert score(text, "Eiffel Tower", use="exact-match", ignoring=ignoring) == right


@pytest.mark.parametrize(
    ("text", "gold"), [("(3, 4)", "(3,4)"), ("12 : 30", "12:30"), ("3 + 4", "3+4"), ("1e+5", "1e5")]
)
def test_signs_leave_out_white_space_beside_them(text: str, gold: str) -> None:
    assert score(text, gold, use="exact-match", ignoring="signs") == 1


@pytest.mark.parametrize("use", ["exact-match", "fuzzy-match"])
@pytest.mark.parametrize(
    ("text", "gold"),
    [
        *((text, "A") for text in ("", "The", "!!!", "an", "B")),
        *((text, "+") for text in ("", "-", "the", "!")),
        ("5", "-5"),
        *(("2^3", "23"), ("3:4", "34"), ("1,2", "12"), ("12+3", "123"), ("5*6", "56"), ("1e-5", "1e5")),
        ("-5", "5"),
        ("15", "1.5"),
        ("1.5", "15"),
        ("5", ".5"),
        ("-0.5", "0.5"),
        ("12", "1/2"),
        ("35", "3-5"),
    ],
)
def test_what_is_ignored_decides_no_answer(text: str, gold: str, use: str) -> None:
    assert score(text, gold, use=use) == 0
    assert score(gold, gold, use=use) == 1
    if use == "exact-match":
        assert score(text, gold, use=use, ignoring="signs") == 0
        assert score(gold, gold, use=use, ignoring="signs") == 1


@pytest.mark.parametrize(
    ("text", "gold"),
    [("(A).", "a"), ("**A**", "A"), ("It's -5.", "its -5"), ("1,000.", "1000"), ("GPT-4", "gpt4"), ("$5", "5")],
)
def test_punctuation_that_is_not_of_a_number_is_ignored(text: str, gold: str) -> None:
    assert score(text, gold, use="exact-match") == score(text, gold, use="fuzzy-match") == 1


@pytest.mark.parametrize(
    ("where", "text"),
    [
        ("tag", "<answer>5</answer> or <answer>4</answer> I say"),
        ("boxed", "\\boxed{5} or \\boxed{4}"),
        ("line", "Answer: 5\nNo.\n**Answer:** 4\nDone."),
        ("response", "4"),
    ],
)
def test_the_last_answer_counts_where_it_is_looked_for(where: str, text: str) -> None:
    assert score(text, "4", use="exact-match", answer=where) == 1
    assert score(text, "5", use="exact-match", answer=where) == 0
    assert score("I do not know", "I do not know", use="exact-match", answer=where) == (where == "response")


def test_any_of_several_right_answers_counts() -> None:
    assert score("NYC", ["New York City", "NYC"], use="exact-match") == 1
    assert score("new york", ["NYC", "New York City"], use="fuzzy-match") == pytest.approx(0.8)


@pytest.mark.parametrize(
    ("answer", "gold", "value"),
    [
        ("the cat sat", "a cat sat down", 0.8),  # cat, sat: precision 2/2, recall 2/3
        ("cat cat", "cat", 2 / 3),  # precision 1/2, recall 1
        ("dog", "cat", 0),
        ("The", "a", 0),
        ("a.", "A", 1),
        ("", "cat", 0),
    ],
)
def test_f1_of_words(answer: str, gold: str, value: float) -> None:
    assert f1(answer, gold) == pytest.approx(value)


@pytest.mark.parametrize(
    ("answer", "gold", "value"),
    [
        ("kitten", "sitting", 1 - 3 / 7),  # Levenshtein's usual example: 3 edits
        ("saturday", "sunday", 1 - 3 / 8),
        ("flaw", "lawn", 1 - 2 / 4),
        (" same ", "same", 1),
        ("", "abc", 0),
        ("a" * 1_000, "a", 0),
    ],
)
def test_edit_similarity(answer: str, gold: str, value: float) -> None:
    assert edit_similarity(answer, gold) == pytest.approx(value)
    assert score(answer, gold, use="fuzzy-match", measure="edits", at_least=0.5) == (value >= 0.5)


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("Answer: C", "C"),
        ("Answer: A\nWait.\nAnswer: C", "C"),
        ("**Answer:** (c)", "C"),
        ("The answer is \\boxed{C}.", "C"),
        ("<answer> C </answer>", "C"),
        ("Answer: C) Paris", "C"),
        ("Answer: $C$", "C"),
        ("Answer: C or D", None),
        ("Answer: C, D", None),
        ("Answer: Certainly not", None),
        ("C", None),
        ("Answer: E", None),
        ("\\boxed{CD}", None),
    ],
)
def test_the_letter_of_a_choice(text: str, letter: str | None) -> None:
    for i, one in enumerate("ABCD"):
        assert score(text, one, use="multiple-choice") == (one == letter)
        assert score(text, i, use="multiple-choice") == (one == letter)


def test_a_choice_that_there_is_not_is_a_mistake_of_the_task() -> None:
    with pytest.raises(EpisodeError, match="the right answer of the task is 'E', wanted a letter up to D"):
        score("Answer: A", "E", use="multiple-choice")
    with pytest.raises(EpisodeError, match="the task has no right answer 'answer'; there are no data"):
        score("Answer: A", use="multiple-choice")


@pytest.mark.parametrize(
    ("answer", "plain"),  # by hand, from the list of appendix D.1 of Minerva
    [
        ("34", "34"),
        ("$34$", "34"),
        ("\\$1,000,000 dollars", "1000000"),
        ("x = 5", "5"),
        ("\\boxed{12}", "12"),
        ("\\frac12", "\\frac{1}{2}"),
        ("\\frac{a}{b}", "\\frac{a}{b}"),
        ("\\sqrt2", "\\sqrt{2}"),
        ("90^\\circ", "90"),
        ("12\\text{ square feet}", "12"),
        ("\\text{Monday}", "Monday"),
        ("so the value is $7$.", "7"),
        ("(1,2)", "(1,2)"),
    ],
)
def test_final_answers_are_normalised_as_in_minerva(answer: str, plain: str) -> None:
    assert normalised(answer) == plain


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("So it is.\nAnswer: 34", 1),
        ("Answer: 12\nNo.\nanswer : $34$", 1),
        ("Answer: 34" + " " * 400, -1),  # only the last 300 characters are read
        ("Answer: 34\nAnswer: 35", -1),
        ("34", -1),
        ("\\boxed{34}", -1),
        ("Answer:\n\n34", 1),  # white space may be a line break, as in DAPO's expression
    ],
)
def test_the_answer_line_of_dapo(text: str, value: float) -> None:
    assert score(text, "34", use="answer-line") == value
    assert score(text, "34", use="answer-line", wrong=0) == max(value, 0)


# JSON.

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name"],
}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('{"name": "Ann", "age": 3}', "fits"),
        ('{"name": "Ann"}', "fits"),
        ('{"age": 3}', "parsed"),
        ('{"name": "Ann", "age": "three"}', "parsed"),
        ("[]", "parsed"),
        ("{'name': 'Ann'}", ""),
        ('{"name": "Ann"} Done.', ""),
        ("NaN", ""),
        ("[" * 100_000, ""),
        ("", ""),
    ],
)
def test_json_fits_its_schema_or_does_not(text: str, found: str) -> None:
    assert fits(text, json.dumps(PERSON)) == found


def test_the_last_fenced_block_is_read() -> None:
    assert json.loads(fenced('Here:\n```json\n{"a": 1}\n```\nOr:\n```\n{"a": 2}\n```\n.')) == {"a": 2}
    assert fenced('{"a": 1}') == '{"a": 1}'


@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
def test_backquotes_in_the_text_of_json_are_no_fence(line_end: str) -> None:
    text = json.dumps({"markdown": "```py\nx\n```", "more": "use ```x``` here"})
    assert fenced(text) == text
    for ticks in ("```", "````"):
        lines = ("Here:", f"{ticks}json", text, ticks, "and ```so``` on")
        assert json.loads(fenced(line_end.join(lines))) == json.loads(text)
    assert fenced("````\n```\n1\n```\n````") == "```\n1\n```\n"
    assert fenced("```\n1") == "```\n1"


def test_a_pattern_that_never_ends_is_ended() -> None:
    slow = {"type": "string", "pattern": "^(a+)+$"}
    reward = make(use="json-schema", schema=slow, timeout_seconds=0.3, parsed=0.25)

    async def play() -> list[float]:
        found = [await reward(Finished(text)) for text in ('"aaa"', '"b"', '"b')]
        with pytest.raises(Undecided):
            await reward(Finished(json.dumps("a" * 64 + "!")))
        return found

    assert asyncio.run(play()) == [1.0, 0.25, 0.0]
    reward.close()


def test_each_task_may_have_a_schema() -> None:
    reward = make(use="json-schema", schema_key="schema")
    tasks = [({"schema": json.dumps(PERSON)}, '{"name": "Ann"}'), ({"schema": {"type": "array"}}, '{"name": "Ann"}')]
    assert [asyncio.run(reward(Finished(text, data))) for data, text in tasks] == [1.0, 0.0]
    with pytest.raises(EpisodeError, match="the task has the schema None under 'schema'"):
        asyncio.run(reward(Finished("{}", {})))
    reward.close()


# Combinations.


def test_all_is_the_product_and_any_the_largest() -> None:
    parts = [{"use": "exact-match", "answer": "tag"}, {"use": "tag-format"}]
    right, bare = "<think>x</think><answer>4</answer>", "<answer>4</answer>"
    assert [score(text, "4", use="all-of", of=parts) for text in (right, bare, "4")] == [1, 0, 0]
    assert [score(text, "4", use="any-of", of=parts) for text in (right, bare, "4")] == [1, 1, 0]
    nested = [{"use": "all-of", "of": parts}, {"use": "tag-format", "partial": True}]
    assert score(bare, "4", use="any-of", of=nested) == 0.5


def episode(task: Task, text: str, rewards: Mapping[str, float], tokens: int = 4, stop: Any = "stop") -> Episode:
    versions = np.zeros(tokens, np.int32)
    trajectory = Trajectory(np.zeros(tokens, np.int64), versions >= 0, np.zeros(tokens, np.float32), versions, 0, stop)
    said = (*((m.role, m.text) for m in task.prompt), ("assistant", text))
    return Episode("it", 0, 0, (trajectory,), rewards, 0.0, 1, said)


def rewarded(**document: Any) -> Rewarded:
    return Rewarded(structure(document, RewardedConfig, installed()))


def with_reward(name: str, reward: Any) -> Rewarded:
    pytest.importorskip("whet_env_math", reason="whet-env-math is not installed")
    environment = rewarded(environment={"use": "arithmetic"}, rewards=[{"use": "repetition", "name": name}])
    environment._rewards[name] = reward
    return environment


def totals(environment: Rewarded, task: Task, episodes: Sequence[Episode]) -> list[float]:
    further = asyncio.run(environment.group_rewards(task, episodes))
    return [
        total_reward({**e.rewards, **f}, environment.reward_weights) for e, f in zip(episodes, further, strict=True)
    ]


def test_rewards_of_a_data_set_add_up_by_their_weights(tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text(json.dumps({"prompt": "2+2?", "reward_model": {"ground_truth": 4}}) + "\n")
    rewards = [{"use": "exact-match", "answer": "tag"}, {"use": "tag-format", "weight": 0.5, "name": "shape"}]
    environment = rewarded(dataset=str(file), gold="reward_model.ground_truth", rewards=rewards)
    task = environment.tasks("train")[0]
    assert task.data == {"answer": "4"}
    assert asyncio.run(environment.run(task, FakeModel("4"))) == {}
    texts = ["<think></think><answer>4</answer>", "<think></think><answer>5</answer>", "<answer>4</answer>", "4"]
    assert totals(environment, task, [episode(task, text, {}) for text in texts]) == [1.5, 0.5, 1.0, 0.0]
    assert environment.reward_weights == {"exact-match": 1.0, "shape": 0.5}


def test_the_truncation_factor_holds_for_the_whole_reward_of_a_cut_response() -> None:
    pytest.importorskip("whet_env_math", reason="whet-env-math is not installed")
    rewards = [{"use": "repetition", "weight": -2}]
    environment = rewarded(
        environment={"use": "arithmetic"}, environment_weight=3, truncation_factor=0.25, rewards=rewards
    )
    task = Task("2+2?", {"answer": "4"})
    played = [episode(task, "a a a a a", {"correct": 1.0}, stop=stop) for stop in ("stop", "length")]
    whole = 3 - 2 * (1 - 1 / 3)
    assert totals(environment, task, played) == pytest.approx([whole, whole / 4])


def test_later_rewards_see_earlier_ones() -> None:
    pytest.importorskip("whet_env_math", reason="whet-env-math is not installed")
    rewards = [
        {"use": "exact-match", "name": "same", "weight": 0},
        {"use": "group-length", "decides": "same"},
    ]
    environment = rewarded(environment={"use": "arithmetic"}, environment_weight=0, rewards=rewards)
    task = Task("2+2?", {"answer": "4"})
    played = [episode(task, text, {"correct": 1.0}, tokens) for text, tokens in (("4", 2), ("5", 2), ("4", 6))]
    assert totals(environment, task, played) == [0.5, 0.0, -0.5]


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        ([], "rewards"),
        ([{"use": "tag-format"}, {"use": "tag-format"}], "two rewards with the name 'tag-format'"),
        ([{"use": "tag-formt"}], "tag-format"),
        ([{"use": "overlong", "longest": 3, "buffer": 4}], "buffer is 4, wanted at most longest, which is 3"),
        ([{"use": "json-schema"}], "neither of schema and schema_key given"),
        ([{"use": "tag-format", "weigth": 1}], "weight"),
    ],
)
def test_a_mistake_in_the_config_is_named(rewards: list[Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        rewarded(dataset="made-up.jsonl", rewards=rewards)


@pytest.mark.parametrize("what", HOSTILE_ANSWERS)
def test_hostile_text_costs_little_time(what: str) -> None:
    begin = time.process_time()
    parts = [
        *({"use": use} for use in ("tag-format", "repetition", "exact-match", "multiple-choice", "answer-line")),
        *(
            {"use": "fuzzy-match", "answer": a, "measure": m}
            for a in ("response", "tag", "boxed", "line")
            for m in ("f1", "edits")
        ),
    ]
    values = [score(HOSTILE_ANSWERS[what], "A", **part) for part in parts]
    assert all(-1 <= value <= 1 for value in values)
    assert time.process_time() - begin < 3


@pytest.mark.parametrize("error", [Undecided("too long"), ContextFull(5, 5)])
def test_an_episode_without_a_reward_of_its_own_is_compared_with_the_others(tmp_path: Path, error: Exception) -> None:
    environment = rewarded(environment={"use": "arithmetic"}, environment_weight=0.0, rewards=[{"use": "tag-format"}])

    async def fails(task: Task, model: Any) -> Any:
        raise error

    environment._inner.run = fails  # type: ignore[method-assign]
    with noted() as reasons:
        own = asyncio.run(environment.run(environment.tasks("train")[0], FakeModel("4")))
    assert own == dict.fromkeys(environment._inner.reward_weights, 0.0)
    assert reasons == (["too long"] if isinstance(error, Undecided) else [])


@pytest.mark.parametrize("where", ["run", "recorded", "group", "elsewhere"])
def test_the_weight_of_an_environment_holds_for_rewards_that_it_does_not_declare(where: str) -> None:
    pytest.importorskip("whet_env_math", reason="whet-env-math is not installed")
    rewards = [{"use": "group-length", "decides": "extra", "weight": 0}]
    environment = rewarded(
        environment={"use": "arithmetic"}, environment_weight=0.0, truncation_factor=0.5, rewards=rewards
    )

    async def more(task: Task, model: Any) -> Any:
        if where == "recorded":
            model.fork("other").reward("extra", 5.0)
        return {"extra": 5.0} if where == "run" else {}

    async def compared(task: Task, episodes: Sequence[Episode]) -> Any:
        return [{"extra": 5.0} if where == "group" else {} for _ in episodes]

    inner: Any = environment._inner
    inner.run, inner.group_rewards = more, compared
    task = environment.tasks("train")[0]
    if where in ("run", "recorded"):
        asyncio.run(environment.run(task, FakeModel("4")))
        assert environment.reward_weights["extra"] == 0.0
    own = {} if where == "group" else {"extra": 5.0}
    assert totals(environment, task, [episode(task, "4", own, stop="length")]) == [0.0]
    assert environment.reward_weights["extra"] == 0.0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (lambda one: one.data["no such key"], "the reward 'mine' failed: KeyError: 'no such key'"),
        (lambda one: None, "the reward 'mine' failed: TypeError"),
    ],
    ids=["raises", "none"],
)
def test_a_reward_that_fails_is_named(given: Any, message: str) -> None:
    environment, task = with_reward("mine", given), Task("?", {"answer": "4"})
    with pytest.raises(EpisodeError, match=message):
        totals(environment, task, [episode(task, "4", {"correct": 1.0})])


class Compared:
    def __init__(self, values: Any) -> None:
        self.values = values

    def of_group(self, episodes: Sequence[Finished]) -> Any:
        return self.values


def test_a_comparison_may_be_async() -> None:
    class Asked(Compared):
        async def of_group(self, episodes: Sequence[Finished]) -> Any:
            return self.values

    environment, task = with_reward("mine", Asked([2.0, 3.0])), Task("?", {"answer": "4"})
    assert totals(environment, task, [episode(task, text, {"correct": 1.0}) for text in ("4", "5")]) == [3.0, 4.0]


@pytest.mark.parametrize(
    ("values", "found"), [({0: 1.0}, "a mapping"), ({1.0}, r"set \{1\.0\}"), ("1", "the text '1'")], ids=str
)
def test_values_that_have_no_order_are_refused(values: Any, found: str) -> None:
    environment, task = with_reward("mine", Compared(values)), Task("?", {"answer": "4"})
    with pytest.raises(EpisodeError, match=f"^the reward 'mine' failed: .*`of_group` returned {found}, wanted a list"):
        totals(environment, task, [episode(task, "4", {"correct": 1.0})])


def test_an_error_of_the_infrastructure_keeps_its_type_and_a_missing_value_is_counted() -> None:
    class Compared:
        values: Any = ()

        def of_group(self, episodes: Sequence[Finished]) -> Any:
            if isinstance(self.values, Exception):
                raise self.values
            return self.values

    mine, task = Compared(), Task("?", {"answer": "4"})
    environment = with_reward("mine", mine)
    with pytest.raises(EpisodeError, match="the reward 'mine' gave 0 values for 1 episodes"):
        totals(environment, task, [episode(task, "4", {"correct": 1.0})])
    mine.values = ConnectionError("away")
    with pytest.raises(ConnectionError, match="away"):
        totals(environment, task, [episode(task, "4", {"correct": 1.0})])
