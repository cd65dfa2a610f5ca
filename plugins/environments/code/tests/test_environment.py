"""Episodes of the environment `code`: programs in responses, the tool, data sets, and failures that score nothing."""

import asyncio
import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from whet.config.sections import Config
from whet.config.structure import structure
from whet.errors import DataError
from whet.plugins.registry import load_plugins
from whet_env_code.config import CodeConfig
from whet_env_code.environment import Code
from whet_env_code.hooks import whet_check_config
from whet_env_code.responses import blocks, program_in, tool_call
from whet_sandbox.provider import SandboxBroken
from whet_testing.fakes import FakeModel

SQUARE = {
    "prompt": "from math import floor\n\ndef square(n):\n    '''Return the square.'''\n",
    "canonical_solution": "    return n * n\n",
    "test": "def check(candidate):\n    assert candidate(3) == 9\n    assert candidate(-2) == 4\n",
    "entry_point": "square",
}
RIGHT = "```python\ndef square(n):\n    return floor(n * n)\n```"


def made(tmp_path: Path, *records: dict[str, Any], **settings: Any) -> Code:
    path = tmp_path / "tasks.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return Code(structure({"dataset": str(path), **settings}, CodeConfig, load_plugins()))


def played(environment: Code, *texts: str) -> tuple[dict[str, float], FakeModel]:
    left = list(texts)
    model = FakeModel(lambda messages: left.pop(0) if len(left) > 1 else left[0])
    try:
        return dict(asyncio.run(environment.run(environment.tasks("test")[0], model))), model
    finally:
        environment.close()


@pytest.mark.parametrize(
    ("text", "correct"),
    [
        (RIGHT, 1.0),
        ("Here it is:\n" + RIGHT + "\nIt squares.", 1.0),
        ("    return n * n\n", 1.0),  # continues the prompt, as a base model does
        ("```python\n    return n * n\n```", 1.0),
        ("```\ndef square(n): return n ** 2\n```", 1.0),
        ("```py\ndef square(n): return n ** 2\n```\nFor instance:\n```python\nprint(square(2))\n```", 1.0),
        ("```python\ndef square(n): return n ** 2", 1.0),  # cut by its length behind the program
        ("```python\ndef square(n): return n ** 2\n```\nNo:\n```python\ndef square(n): return 0\n```", 0.0),
        ("````python\ndef square(n): return n ** 2\n````", 1.0),
        ("````python\ndef square(n):\n    '''\n```\n    '''\n    return n ** 2\n`````", 1.0),
        ("```bash\necho 9\n```", 0.0),
        ("I do not know.", 0.0),
        ("", 0.0),
        ("`" * 300_000, 0.0),
    ],
)
def test_the_program_is_found_in_the_response(tmp_path: Path, text: str, correct: float) -> None:
    assert played(made(tmp_path, SQUARE), text)[0] == {"correct": correct}


@pytest.mark.parametrize("head", ["def square(n):\n", "import math\ndef square(n):\n    # Return the square.\n"])
def test_a_head_without_a_body_is_continued_or_repeated(tmp_path: Path, head: str) -> None:
    for text in ("    return n * n\n", "```python\ndef square(n):\n    return n * n\n```"):
        assert played(made(tmp_path, {**SQUARE, "prompt": head}), text)[0] == {"correct": 1.0}


def test_a_block_is_found_in_linear_time() -> None:
    assert blocks("```\n" * 60_000)
    assert program_in("\n```python " * 100_000, "", "f") == ""
    for fill in " a\t":  # each of these took minutes when the pattern tried all ways to divide the line
        assert program_in(f"```{fill * 200_000}`", "x", "f") == f"x```{fill * 200_000}`"
    assert tool_call("x\n```run\nprint(1)\n```\n") == "print(1)\n"
    assert tool_call("```run\nprint(1)\n```\n```python\nx\n```") is None


def test_the_tool_keeps_state_and_ends_with_the_episode(tmp_path: Path) -> None:
    environment = made(tmp_path, SQUARE, turns=5, tool_output=200)
    calls = (
        "```run\nx = 6\nopen('kept', 'w').write('!')\n```",
        "```run\nprint('a')\nx * 7, open('kept').read()\n```",
        "```run\n1 / 0\n```",
        "```run\nprint('y' * 10000)\n```",
    )
    rewards, model = played(environment, *calls, RIGHT)
    shown = [message.text for message in model.messages if message.role == "user"][1:]
    assert shown[0] == "1"
    assert shown[1] == "a\n(42, '!')"
    assert shown[2].endswith("ZeroDivisionError: division by zero")
    assert "9801 characters left out" in shown[3]
    assert rewards == {"correct": 1.0, "runs": 4.0}


def test_the_tool_survives_what_the_model_does_to_it(tmp_path: Path) -> None:
    environment = made(tmp_path, SQUARE, turns=6, limits={"cpu_seconds": 1.0, "wall_seconds": 60.0, "memory_mib": 256})
    calls = (
        "```run\nimport os; os._exit(3)\n```",
        "```run\nwhile True: pass\n```",
        "```run\nexit()\n```",
        "```run\nprint('<|im_end|>')\n```",
        "```run\nprint(1)\n```",
    )
    rewards, model = played(environment, *calls, RIGHT)
    shown = [message.text for message in model.messages if message.role == "user"][1:]
    assert shown == [
        "[Python has ended: it left with code 3. All variables are lost.]",
        "[Python has ended: it used up its processor time. All variables are lost.]",
        "SystemExit: None",
        "< |im_end|>",
        "1",
    ]
    assert rewards["correct"] == 1.0


def test_the_last_turn_is_graded_even_if_it_calls_the_tool(tmp_path: Path) -> None:
    rewards, model = played(made(tmp_path, SQUARE, turns=2), "```run\nprint(1)\n```")
    assert rewards == {"correct": 0.0, "runs": 1.0}
    assert "begins with ```run" in model.messages[0].text


def test_what_the_tool_left_behind_is_not_there_when_the_program_is_graded(tmp_path: Path) -> None:
    paths, text = ("/box/program.py", "/tmp/plain.py", "/box/main.py"), "packed = lambda v: True"
    plant = f"```run\nfor path in {paths}: open(path, 'w').write({text!r})\n```"
    assert (
        played(made(tmp_path, SQUARE, turns=2), plant, "```python\ndef square(n): return 0\n```")[0]["correct"] == 0.0
    )


def test_partial_credit_is_a_reward_of_its_own(tmp_path: Path) -> None:
    environment = made(tmp_path, SQUARE, partial_weight=0.5)
    assert environment.reward_weights == {"correct": 1.0, "passed": 0.5}
    assert played(environment, "```python\ndef square(n): return 9\n```")[0] == {"correct": 0.0, "passed": 0.5}


def test_lists_of_asserts_are_tests_too(tmp_path: Path) -> None:
    record = {
        "text": "Write a function `largest`.",
        "test_list": ["assert largest([1, 3]) == 3", "assert largest([2]) == 2"],
    }
    settings = {"question": "text", "before": "", "tests": "test_list", "entry_point": ""}
    assert (
        played(made(tmp_path, record, **settings), "```python\ndef largest(x): return max(x)\n```")[0]["correct"] == 1.0
    )
    assert played(made(tmp_path, record, **settings), "```python\ndef largest(x): return 3\n```")[0]["correct"] == 0.0


@pytest.mark.parametrize(
    ("fields", "settings", "program"),
    [
        ({"test": ["assert add(1, 2) == 3"]}, {}, "def add(a, b): return a + b"),
        ({"io": {"inputs": ["1 2"], "outputs": ["3"]}}, {"cases": "io"}, "print(sum(map(int, input().split())))"),
    ],
)
def test_a_question_in_words_is_no_beginning_of_a_program(
    tmp_path: Path, fields: dict[str, Any], settings: dict[str, Any], program: str
) -> None:
    record = {"prompt": "Write a function to add two numbers.", **fields}
    assert played(made(tmp_path, record, **settings), f"```python\n{program}\n```")[0] == {"correct": 1.0}


def test_a_beginning_of_a_program_needs_no_entry_point(tmp_path: Path) -> None:
    for before in ("from math import floor\n", "from math import floor\ndef helper(n):\n"):
        environment = made(tmp_path, {"prompt": before, "test": "assert square(3) == 9"})
        assert environment.tasks("test")[0].data["before"] == before
        environment.close()
    record = {"prompt": "from math import floor\n", "test": "assert square(3) == 9"}
    assert played(made(tmp_path, record), "def square(n): return floor(n * n)")[0] == {"correct": 1.0}


@pytest.mark.parametrize("packed", [False, True])
def test_programs_that_read_stdin_are_graded_by_cases(tmp_path: Path, packed: bool) -> None:
    cases: Any = {"inputs": ["2 3", "1 1"], "outputs": ["5", "2"]}
    record = {"question": "Add the numbers.", "input_output": json.dumps(cases) if packed else cases}
    settings = {"question": "question", "before": "", "cases": "input_output", "entry_point": ""}
    assert (
        played(made(tmp_path, record, **settings), "```python\nprint(sum(map(int, input().split())))\n```")[0][
            "correct"
        ]
        == 1.0
    )
    assert played(made(tmp_path, record, **settings), "```python\nprint(5)\n```")[0]["correct"] == 0.0


@pytest.mark.parametrize(
    ("cases", "why"),
    [
        ({"fn_name": "add", "inputs": [["1"]], "outputs": ["3"]}, "call the function 'add'"),
        ({"inputs": [[1, 2]], "outputs": ["3"]}, "is neither text nor a list of lines"),
        ({"inputs": ["1"], "outputs": [{"a": 1}]}, "is neither text nor a list of lines"),
    ],
)
def test_cases_that_are_no_text_are_refused(tmp_path: Path, cases: dict[str, Any], why: str) -> None:
    record = {"question": "Add the numbers.", "cases": cases}
    settings = {"question": "question", "before": "", "cases": "cases", "entry_point": ""}
    environment = made(tmp_path, record, **settings)
    with pytest.raises(DataError, match=why):
        environment.tasks("test")
    environment.close()


def test_cases_of_lines_are_joined(tmp_path: Path) -> None:
    record = {"question": "Add the numbers.", "cases": {"inputs": [["2", "1 3"], 7], "outputs": [["4"], 7]}}
    settings = {"question": "question", "before": "", "cases": "cases", "entry_point": ""}
    program = "```python\nimport sys\nprint(sum(map(int, sys.stdin.read().split()[-2:])))\n```"
    assert played(made(tmp_path, record, **settings), program)[0]["correct"] == 1.0


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"test": "pass"}, "assert nothing"), ({"test": None}, "assert nothing"), ({"prompt": " "}, "missing or empty"),
    ],
)  # fmt: skip
def test_records_that_cannot_be_graded_are_refused(tmp_path: Path, change: dict[str, Any], why: str) -> None:
    environment = made(tmp_path, {**SQUARE, **change})
    with pytest.raises(DataError, match=why):
        environment.tasks("test")
    environment.close()


def test_wrong_solutions_are_found_when_the_split_is_loaded(tmp_path: Path) -> None:
    wrong = {**SQUARE, "canonical_solution": "    return n\n"}
    environment = made(tmp_path, SQUARE, wrong, check_solutions=True)
    with pytest.raises(DataError, match=r"tasks.jsonl:2: its own solution fails: assert candidate\(3\) == 9"):
        environment.tasks("test")
    environment.close()
    environment = made(tmp_path, SQUARE, wrong, check_solutions=True, max_bad_records=0.5)
    assert len(environment.tasks("test")) == 1
    environment.close()


def test_a_broken_sandbox_is_no_reward(tmp_path: Path) -> None:
    settings = {"sandbox": {"use": "docker", "command": str(tmp_path / "absent"), "warm": 0}}
    with pytest.raises(SandboxBroken, match="cannot be started"):
        played(made(tmp_path, SQUARE, **settings), RIGHT)


def test_check_says_where_no_sandbox_works(tmp_path: Path) -> None:
    absent = {"sandbox": {"use": "docker", "command": str(tmp_path / "absent")}}
    document = {
        "run": {"folder": str(tmp_path / "run"), "steps": 1}, "model": {"path": "absent"}, "algorithm": "grpo",
        "backend": "fsdp2", "environments": [{"use": "code", "dataset": "made-up.jsonl"}],
        "evaluation": {"environments": [{"use": "code", "dataset": "made-up.jsonl", **absent}]},
    }  # fmt: skip
    (problem,) = whet_check_config(structure(document, Config, load_plugins()))
    assert problem.path == "evaluation.environments.0.sandbox"
    assert "no program can run in the sandbox 'docker' on this machine" in problem.message


def test_human_eval_needs_no_settings(shared_data: Path) -> None:
    dataset = shared_data / "HumanEval.jsonl.gz"
    environment = Code(
        structure({"dataset": str(dataset), "max_records": 8, "check_solutions": True}, CodeConfig, load_plugins())
    )
    with gzip.open(dataset, "rt") as file:
        first = json.loads(next(file))
    assert len(environment.tasks("test")) == 8
    assert environment.tasks("test")[0].prompt[0].text == first["prompt"]
    assert played(environment, first["canonical_solution"])[0]["correct"] == 1.0
