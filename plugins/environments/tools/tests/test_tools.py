"""Episodes of the environment `tool-use`: calls, results, limits and answers. Hostile tools are tested elsewhere."""

import asyncio
import json
import time

import pytest
from tool_episodes import FILE, call, episode, made, played, result

from whet.errors import ConfigError, DataError
from whet.rollout.gate import Gate
from whet_env_tools.answers import canonical, final_answer, is_right
from whet_env_tools.processes import Outcome, ToolsBroken
from whet_env_tools.text_calls import LONGEST, read_calls

NONE = {"wrong_calls": 0.0, "failed_calls": 0.0}


def test_a_call_is_answered_and_the_last_response_graded(tmp_path):
    environment = made(tmp_path, "weather", "slowly")
    system = environment.tasks("test")[0].prompt[0]
    assert system.role == "system"
    shown = [json.loads(line) for line in system.text.splitlines() if line.startswith('{"type"')]
    assert [tool["function"]["name"] for tool in shown] == ["weather", "slowly"]
    rewards, results = played(environment, "I ask. " + call("slowly", number=21), r"\boxed{42}")
    assert results == [result("42")]
    assert rewards == {"correct": 1.0, "calls": 1.0, **NONE}


def test_calls_of_one_response_run_at_the_same_time_and_are_answered_in_order(tmp_path):
    environment = made(tmp_path, "meets", "slowly")
    calls = [call("meets"), call("slowly", number=1), *[call("meets")] * 4]
    try:
        rewards, results = asyncio.run(episode(environment, "".join(calls), "no"))
    finally:
        environment.close()
    assert results == [result("met", "2", *["met"] * 4)]  # one after another the first would wait for ever
    assert rewards["calls"] == 6.0


def test_wrong_calls_are_answered_with_what_is_wrong_and_counted(tmp_path):
    texts = [
        call("wether", city="Rome"),
        call("weather", town="Rome"),
        "<tool_call>\n{name: weather}\n</tool_call>",
        '<tool_call>["weather"]</tool_call>',
        call("raises", text="x"),
    ]
    rewards, results = played(made(tmp_path, "weather", "raises"), *texts, "done")
    for found, words in zip(
        results,
        ["There is no tool 'wether'. There are: weather, raises", "Object contains unknown field `town`", "is no JSON",
         'no object with "name"', "LookupError: nothing about x"],
        strict=True,
    ):  # fmt: skip
        assert words in found
    assert rewards == {"correct": 0.0, "calls": 5.0, "wrong_calls": 5.0, "failed_calls": 0.0}


def test_calls_turns_and_results_have_limits(tmp_path):
    environment = made(tmp_path, "slowly", "floods", calls=4, parallel=2, turns=4, result_characters=100)
    three = call("slowly", number=1) * 3
    rewards, results = played(environment, three, call("floods", mib=3), three, call("slowly", number=1), "never")
    assert results[0] == result("2", "2", "At most 2 calls can be in one message.")
    assert "y" * 50 in results[1]
    assert "characters left out" in results[1]
    assert len(results[1]) < 200
    assert results[2] == result(*["No call is left. Answer now."] * 2, "At most 2 calls can be in one message.")
    assert len(results) == 3
    assert rewards["calls"] == 7.0


def test_functions_keep_state_over_an_episode_and_no_longer(tmp_path):
    environment = made(tmp_path, "remember", processes=2)
    try:
        for _ in range(2):
            both = call("remember", word="a") + call("remember", word="b")
            _, results = asyncio.run(episode(environment, both, call("remember", word="c"), "no"))
            assert sorted(results[0].split("\n")[1].split(" ")[-2:])
            assert "a" in results[1] and "b" in results[1]  # noqa: PT018 - in either order
            assert results[1].endswith("c\n</tool_response>")
            assert "What is 6*7? train" in results[1]
    finally:
        environment.close()


def test_search_and_python_are_tools_too(tmp_path):
    (tmp_path / "corpus.jsonl").write_text('{"text": "The Meuse flows past the quarry."}\n{"text": "Steel."}\n')
    environment = made(tmp_path, search={"corpus": str(tmp_path / "corpus.jsonl")}, python={})
    texts = [
        call("search", query="quarry") + call("python", code="x = 6"),
        call("python", code="print('a')\nx * 7"),
        call("python", code="import os; os._exit(3)"),
        call("python", code="x") + call("search", q="quarry"),
    ]
    rewards, results = played(environment, *texts, "Answer: the Meuse", task=1)
    assert results[0] == result("[1] The Meuse flows past the quarry.", "[no output]")
    assert results[1] == result("a\n42")
    assert "Python has ended: it left with code 3" in results[2]
    assert "NameError" in results[3]
    assert 'wanted {"query": text}' in results[3]
    assert rewards == {"correct": 1.0, "calls": 6.0, "wrong_calls": 1.0, "failed_calls": 1.0}


HALF = "\\ud800"
"""Half of a character, as JSON has it."""


def test_half_of_a_character_in_a_call_is_a_wrong_call_and_harms_no_other(tmp_path):
    bad = [
        call("slowly", number=1).replace('"number"', f'"{HALF}"'),
        call("raises", text="x").replace('"x"', f'"{HALF}"'),
    ]
    rewards, results = played(made(tmp_path, "slowly", "raises"), "".join([*bad, call("slowly", number=2)]), "no")
    assert results[0].count("Wrong arguments: ") == 2
    assert results[0].count("surrogates not allowed") == 2
    assert "\n4\n" in results[0]
    assert (rewards["wrong_calls"], rewards["failed_calls"]) == (2.0, 0.0)


def test_half_of_a_character_in_a_result_is_replaced(tmp_path):
    environment = made(tmp_path, "slowly", python={})
    code = "x = 6\nprint('a' + chr(0xd800))"
    texts = [call("python", code=code), call("python", code="raise ValueError(chr(0xd800))"), call("python", code="x")]
    rewards, results = played(environment, *texts, "no")
    assert results[0] == result("a\\ud800")
    assert "ValueError: \\ud800" in results[1]
    assert results[2] == result("6"), "the variables are there"
    assert rewards["failed_calls"] == 0.0
    assert Outcome("a\ud800b\U0001f600").text == "a\ufffdb\U0001f600"


def test_special_tokens_in_results_are_broken(tmp_path):
    _, results = played(made(tmp_path, "raises"), call("raises", text="<|im_end|>"), "no")
    assert "< |im_end|>" in results[0]


def test_what_has_no_tools_or_two_of_one_name_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="has no tool"):
        made(tmp_path)
    with pytest.raises(ConfigError, match="two tools have the name 'weather'"):
        made(tmp_path, "weather", python={"name": "weather"})
    with pytest.raises(ConfigError, match="the name 'run code'"):
        made(tmp_path, python={"name": "run code"})
    with pytest.raises(ToolsBroken, match=r"functions cannot be started: .*no_words' is no tool: it has no docstring"):
        made(tmp_path, "no_words")


def test_records_without_question_or_answer_are_refused(tmp_path):
    for record in (
        {"question": "Q"},
        {"answer": "A"},
        {"question": " ", "answer": "A"},
        {"question": "Q", "answer": []},
    ):
        environment = made(tmp_path, python={}, records=[record])
        with pytest.raises(DataError, match=r"tasks.jsonl:1: the field '(question|answer)' has no"):
            environment.tasks("test")
        environment.close()


def test_calls_are_read_in_linear_time():
    begin = time.process_time()
    for text in ("<tool_call>" * 20_000, "<tool_call>" + "[" * 200_000, "</tool_call>" * 20_000, "<" * LONGEST):
        assert all(found.problem for found in read_calls(text))
    assert read_calls("x" * (LONGEST + 1) + call("f")) == []
    assert time.process_time() - begin < 1
    assert [found.name for found in read_calls(call("f") + "and" + call("g", x=1)[:-12])] == ["f", "g"]


@pytest.mark.parametrize(
    ("text", "gold", "right"),
    [
        (r"\boxed{42}", "42", True),
        (r"so \boxed{41}, no, \boxed{ 42.0 }", "42", True),
        (r"\boxed{4,200}", "4200", True),
        (r"\boxed{1,234,567.80}", "1234567.8", True),
        (r"\boxed{1,2}", "12", False),
        (r"\boxed{3,14}", "314", False),
        (r"\boxed{3,14}", "3, 14", True),
        ("\\boxed{10\u00b2}", "102", False),
        ("\\boxed{10\u00b2\u2074}", "10^24", True),
        ("\\boxed{x\u00b2}", "x2", False),
        ("\\boxed{CO\u2082}", "co2", True),
        (r"\boxed{042}", "42", True),
        (r"\boxed{-0}", "0", True),
        (r"\boxed{42}", "-42", False),
        (r"\boxed{4.2}", "42", False),
        (r"\boxed{42", "42", False),
        ("Answer: The Meuse.\nBecause", "meuse", True),
        ("**Answer:** Meuse", "meuse", True),
        ("the Meuse!", "Meuse", True),
        ("It is the Meuse", "Meuse", False),
        ("\u0130ki \u0130l var. Answer: 142", "142", True),
        ("Meuse, Rhine", "Meuse", False),
        (r"\boxed{9!}", "9", False),
        (r"\boxed{1/2}", "12", False),
        (r"\boxed{May 4, 1990}", "may 4 1990", True),
        ("", "", False),
        (r"\boxed{}", "!", False),
        ("\u0664\u0662", "42", False),
    ],
)
def test_answers_are_compared_whole(text, gold, right):
    assert is_right(final_answer(text), [gold]) is right


def test_canonical_answers_of_hostile_text_cost_no_time():
    begin = time.process_time()
    for text in ("9" * 1_000_000, "a " * 500_000, "\u0301" * 100_000, "answer:" * 100_000, "{" * 1_000_000):
        canonical(final_answer(text) or text)
    assert time.process_time() - begin < 3


def test_waiting_for_a_process_counts_against_no_deadline(tmp_path):
    environment = made(tmp_path, "hangs", processes=1)

    async def play(seconds, limit):
        async with Gate().time_limit(limit):
            return await episode(environment, call("hangs", seconds=seconds), "no")

    async def both():
        return await asyncio.gather(play(6.5, 60.0), play(0.0, 6.0))

    try:
        assert [results for _, results in asyncio.run(both())] == [[result("slept")]] * 2
    finally:
        environment.close()


def test_functions_are_found_by_module_too(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(FILE.parent))
    environment = made(tmp_path, functions=["some_tools:weather"])
    assert "Rome" in played(environment, call("weather", city="Rome"), "no")[1][0]
