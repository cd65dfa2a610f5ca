# ruff: noqa: E501 - a cheat is easier to read on a line of its own
"""Tests grade programs by plain data alone; a program that lies, ends or hangs earns nothing, and is named."""

import asyncio
import gzip
import json
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from whet_env_code.grading import Grader, Verdict
from whet_env_code.inside import plain
from whet_sandbox.config import NamespacesConfig
from whet_sandbox.limits import Limits
from whet_sandbox.namespaces import Namespaces
from whet_sandbox.sandbox import Sandbox

LIMITS = Limits(cpu_seconds=1.0, wall_seconds=8.0, memory_mib=256)
TESTS = """
def check(candidate):
    assert candidate(3) == 9
    assert candidate(-4) == 16, "a negative number"
    assert candidate(0) == 0
"""
RIGHT = "def square(n):\n    return n * n\n"


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    sandbox = Sandbox(Namespaces(NamespacesConfig(warm=4, at_once=8)), LIMITS)
    yield sandbox
    sandbox.close()


def graded(
    sandbox: Sandbox, program: str, tests: str = TESTS, *, every: bool = False, name: str = "square", **more: str
) -> Verdict:
    return asyncio.run(Grader(sandbox, 4, every).by_tests(program, tests, name=name, **more))


def test_a_right_program_passes(sandbox: Sandbox) -> None:
    assert graded(sandbox, RIGHT) == Verdict(3, 3, "")


def test_the_first_failure_ends_the_tests(sandbox: Sandbox) -> None:
    verdict = graded(sandbox, "def square(n): return n * abs(n)")
    assert (verdict.passed, verdict.total, verdict.correct) == (1, 3, False)
    assert verdict.reason == "assert candidate(-4) == 16, 'a negative number' -> AssertionError: a negative number"


def test_partial_credit_is_the_share_of_asserts(sandbox: Sandbox) -> None:
    verdict = graded(sandbox, "def square(n): return n * abs(n)", every=True)
    assert (verdict.passed, verdict.total, verdict.correct, verdict.share) == (2, 3, False, 2 / 3)


def test_a_program_that_ends_keeps_what_it_passed_and_no_more(sandbox: Sandbox) -> None:
    verdict = graded(sandbox, "import os\ndef square(n):\n  if n < 0: os._exit(0)\n  return n * n", every=True)
    assert (verdict.passed, verdict.total, verdict.correct) == (1, 3, False)


LOOP = "def check(candidate):\n  for n in range(20): assert candidate(n) == n * n"
WANTS_ERRORS = """
def check(candidate):
    for n in range(5):
        try: candidate(n)
        except Exception: raised = True
        else: raised = False
        assert raised"""


def test_a_program_that_ends_early_gets_no_larger_share_than_one_that_goes_on_wrong(sandbox: Sandbox) -> None:
    ends = graded(sandbox, "import os\ndef square(n):\n  if n > 9: os._exit(0)\n  return n * n", LOOP, every=True)
    wrong = graded(sandbox, "def square(n): return n * n if n < 10 else 1", LOOP, every=True)
    assert (ends.passed, ends.total) == (wrong.passed, wrong.total) == (10, 20)


@pytest.mark.parametrize("every", [False, True])
@pytest.mark.parametrize("end", ["os._exit(0)", 'def square(n): os.write(4, b\'{"gone": ""}\\n\')'])
def test_the_end_of_a_program_is_no_exception_that_tests_want(sandbox: Sandbox, end: str, every: bool) -> None:
    verdict = graded(sandbox, f"import os\n{end}", WANTS_ERRORS, every=every)
    assert (verdict.passed, verdict.correct) == (0, False)
    assert verdict.reason


def test_the_end_of_an_iteration_does_not_end_the_tests_as_passed(sandbox: Sandbox) -> None:
    tests = "def check(candidate):\n  assert all(a == b for a, b in zip(map(candidate, [1, 2]), [1, 4]))"
    assert graded(sandbox, RIGHT, tests).correct
    for error in ("StopIteration", "StopAsyncIteration"):
        assert not graded(sandbox, f"def square(n): raise {error}", tests).correct


@pytest.mark.parametrize("value", ["10 ** 5000", "functools.reduce(lambda x, _: [x], range(150), 1)"])
def test_values_that_the_tests_pass_back_to_the_program_are_no_failure_of_the_driver(
    sandbox: Sandbox, value: str
) -> None:
    tests = "def check(candidate): assert candidate(candidate(2)) == 16"
    verdict = graded(sandbox, f"import functools\ndef square(n): return {value}", tests)
    assert not verdict.correct
    assert verdict.reason.startswith("assert candidate(candidate(2)) == 16")


@pytest.mark.parametrize("first", [r"{\"value\": 9}\r{\"value\": 16}\r{\"value\": 0}", r"\xff" + "x" * 30_000])
def test_one_line_of_a_program_answers_one_call(sandbox: Sandbox, first: str) -> None:
    program = f"import os\ndef square(n):\n  if n == 3: os.write(4, b'{first}\\n'); os._exit(0)"
    verdict = graded(sandbox, program)
    assert (verdict.passed, verdict.total) == (0, 3)
    assert "the tests ended early" not in verdict.reason


CHEATS = {
    "prints that it passed": "print('passed', '{\"passed\": 3, \"total\": 3, \"failed\": \"\"}')",
    "leaves with code 0": "raise SystemExit(0)",
    "leaves by os._exit": "import os; os._exit(0)",
    "leaves in the call": "import os\ndef square(n): os._exit(0)",
    "leaves at a call of exit": "def square(n): exit(0)",
    "is killed": "import os; os.kill(os.getpid(), 9)",
    "has an equal object": "class E:\n  def __eq__(self, o): return True\n  __hash__ = None\ndef square(n): return E()",
    "has an equal number": "class E(int):\n  def __eq__(self, o): return True\n  def __ne__(self, o): return False\n  __hash__ = int.__hash__\ndef square(n): return E(7)",
    "has an equal text": "class E(str):\n  def __eq__(self, o): return True\ndef square(n): return E('x')",
    "has an equal list": "class E(list):\n  def __eq__(self, o): return True\ndef square(n): return E([1])",
    "has an equal float": "class E(float):\n  def __eq__(self, o): return True\ndef square(n): return E('nan')",
    "answers with the verdict": "import os\ndef square(n):\n  os.write(4, b'{\"passed\": 3, \"total\": 3, \"failed\": \"\"}\\n')",
    "answers with the verdict at once": "import os\nos.write(4, b'{\"passed\": 3, \"total\": 3, \"failed\": \"\"}\\n' * 50)",
    "answers with a call": "import os\nos.write(4, b'{\"call\": \"square\", \"arguments\": [3], \"keywords\": {}}\\n' * 50)",
    "answers with values of its own": "import os\nos.write(4, b'{\"value\": true}\\n' * 50)",
    "answers with damaged values": "import os\nos.write(4, b'{\"value\": {\"f\": []}}\\n' * 50)",
    "answers with deep values": "import os\nos.write(4, (b'[' * 20000 + b'\\n'))\ndef square(n): return 1",
    "answers with no message": "import os\nos.write(4, b'[]\\n' * 50)",
    "answers with a class of errors": "import os\nos.write(4, b'{\"error\": \"__import__\", \"words\": \"os\"}\\n' * 50)",
    "raises what ends the tests": "class Stop(BaseException): pass\ndef square(n): raise Stop",
    "raises what tests expect": "def square(n): raise AssertionError",
    "raises the end of an iteration": "def square(n): raise StopIteration",
    "raises an interrupt": "def square(n): raise KeyboardInterrupt",
    "changes the comparison": "import builtins, operator\noperator.eq = lambda a, b: True\nbuiltins.isinstance = lambda *a: True\ndef square(n): return 0",
    "changes the packing": "import json\nfrom whet_env_code.inside import plain\nplain.packed = lambda v: True\njson.dumps = lambda v: '{\"value\": true}'\ndef square(n): return 0",
    "traces": "import sys\nsys.settrace(lambda *a: None); sys.setprofile(lambda *a: None)\ndef square(n): return 0",
    "at exit": "import atexit\natexit.register(lambda: print('passed'))\ndef square(n): return 0",
    "reads the tests in its frames": """
import gc, sys
def square(n):
    frame, seen = sys._getframe(), ''
    while frame: seen += repr(frame.f_globals) + repr(frame.f_locals); frame = frame.f_back
    seen += ''.join(o for o in gc.get_objects() if isinstance(o, str))
    return n * n if 'candidate(-4)' in seen else 0""",
    "reads the tests in files": """
import os
def square(n):
    for top in ('/box', '/tmp', '/dev/shm', '/proc/self'):
        for at, _, names in os.walk(top):
            for name in names:
                try:
                    if 'candidate' + '(-4)' in open(os.path.join(at, name), errors='replace').read(100000): return n * n
                except OSError: pass
    return 0""",
    "reads the tests in memory": """
import re
def square(n):
    wanted = re.compile(rb'a negativ[e] numbe[r]')  # which does not find itself
    with open('/proc/self/maps') as maps, open('/proc/self/mem', 'rb') as memory:
        for line in maps:
            low, high = (int(x, 16) for x in line.split()[0].split('-'))
            if 'rw' in line and high - low < 1 << 24:
                memory.seek(low)
                if wanted.search(memory.read(high - low)): return n * n
    return 0""",
    "reads the tests of others": """
import os
def square(n):
    for pid in os.listdir('/proc'):
        if pid.isdigit() and int(pid) != os.getpid(): return n * n
    return 0""",
    "waits for the tests by a child": "import os\nif os.fork() == 0:\n  while True: os.write(4, b'{\"value\": 9}\\n')\ndef square(n): return 9",
    "hangs": "def square(n):\n  while True: pass",
    "sleeps": "import time\ndef square(n): time.sleep(100)",
    "hangs while it is loaded": "while True: pass",
    "eats memory": "def square(n): return len(bytearray(1 << 40))",
    "crashes": "import ctypes\ndef square(n): ctypes.string_at(0)",
    "floods": "def square(n):\n  while True: print('x' * 1000)",
    "has a syntax error": "def square(n: return n",
    "has no function": "x = 1",
    "answers without end": "import os\ndef square(n):\n  while True: os.write(4, b'x' * 4096)",
}  # fmt: skip


@pytest.fixture(scope="module")
def verdicts(sandbox: Sandbox) -> dict[str, Verdict]:
    async def whole() -> list[Verdict]:
        grader = Grader(sandbox, 4, every=False)
        return await asyncio.gather(*[grader.by_tests(program, TESTS, name="square") for program in CHEATS.values()])

    return dict(zip(CHEATS, asyncio.run(whole()), strict=True))


@pytest.mark.parametrize("cheat", CHEATS)
def test_a_cheat_earns_nothing(verdicts: dict[str, Verdict], cheat: str) -> None:
    assert not verdicts[cheat].correct
    assert verdicts[cheat].passed < verdicts[cheat].total or verdicts[cheat].total == 0


@pytest.mark.parametrize(
    ("cheat", "named"),
    [
        ("hangs", "used up its processor time"), ("sleeps", "did not answer in time"), ("leaves by os._exit", "left with code 0"),
        ("is killed", "ended by signal 9"), ("crashes", "ended by signal 11"), ("floods", "more output than it may"),
        ("eats memory", "MemoryError"), ("has a syntax error", "cannot be loaded: SyntaxError"), ("has no function", "KeyError"),
        ("hangs while it is loaded", "used up its processor time"), ("answers without end", "answer is longer"),
    ],
)  # fmt: skip
def test_what_a_program_did_is_named(verdicts: dict[str, Verdict], cheat: str, named: str) -> None:
    assert named in verdicts[cheat].reason


def test_tests_may_call_helpers_of_the_prompt_and_several_functions(sandbox: Sandbox) -> None:
    before = "import math\ndef twice(n):\n    return 2 * n\ndef half(n):\n    '''Return the half.'''\n"
    tests = "def check(candidate):\n    assert candidate(twice(3)) == 3 and math.pi > 3"
    assert graded(sandbox, before + "    return n / 2", tests, before=before, name="half").correct
    lines = "assert one(1) == 1\nassert sorted(two([2, 1])) == [1, 2]\nassert helper(2) == 3"
    program = "def one(n): return n\ndef two(x): return x"
    assert graded(sandbox, program, lines, name="", setup="def helper(n): return n + 1").correct


def test_annotations_are_evaluated_as_in_a_file_of_their_own(sandbox: Sandbox) -> None:
    typed = "def square(n: List[int]):\n    return n * n\n"
    assert graded(sandbox, typed).reason == "it cannot be loaded: NameError: name 'List' is not defined"
    assert graded(sandbox, f"from typing import List\n{typed}").correct
    assert "name 'List'" in graded(sandbox, RIGHT, TESTS.replace("candidate)", "candidate: List)")).reason
    assert "NameError" in graded(sandbox, RIGHT, setup="def helper(n: List): pass").reason


def test_errors_of_a_program_reach_tests_that_want_them(sandbox: Sandbox) -> None:
    tests = "def check(candidate):\n  try: candidate(1)\n  except ValueError as error: assert 'small' in str(error)\n  else: assert False"
    assert graded(sandbox, "def square(n): raise ValueError('too small')", tests).correct
    assert not graded(sandbox, "def square(n): raise KeyError('too small')", tests).correct


def test_tests_that_check_nothing_make_no_program_right(sandbox: Sandbox) -> None:
    assert not graded(sandbox, RIGHT, "def check(candidate): candidate(1)").correct
    assert not graded(sandbox, RIGHT, "def check(candidate):\n  if False: assert candidate(1)").correct


@pytest.mark.parametrize(
    "value",
    [None, True, 1, -(10**50), 1.5, float("inf"), "x", b"\xff", 1 + 2j, [1, [2]], (1, (2,)), {1, 2}, frozenset({1}),
     {(1, 2): [3], "a": {}}, [], {}, "\ud800"],
)  # fmt: skip
def test_plain_data_crosses_unchanged(value: object) -> None:
    crossed = plain.unpacked(json.loads(json.dumps(plain.packed(value))))
    assert crossed == value
    assert type(crossed) is type(value)


def test_programs_are_graded_by_their_output(sandbox: Sandbox) -> None:
    cases = [{"input": f"{n}\n", "output": f"{n * n}\n"} for n in (3, -4, 0)]

    def verdict(program: str, every: bool = False) -> Verdict:
        return asyncio.run(Grader(sandbox, 4, every).by_cases(program, cases))

    assert verdict("print(int(input()) ** 2, ' ')") == Verdict(3, 3, "")
    partly = verdict("n = int(input()); print(n * abs(n))", every=True)
    assert (partly.passed, partly.total, partly.reason) == (2, 3, "case 1: wrong output '-16\\n'")
    assert verdict("n = int(input()); print(n * abs(n))").passed == 1
    for cheat in (
        "",
        "print('passed')",
        "import sys; sys.exit(0)",
        "while True: pass",
        "print(9); import os; os.abort()",
    ):
        assert not verdict(cheat).correct


Records = list[dict[str, str]]
STRIDE = int(os.environ.get("WHET_HUMAN_EVAL_STRIDE", "4"))
"""Programs that are wrong are made of each fourth task; `WHET_HUMAN_EVAL_STRIDE=1` takes all."""


@pytest.fixture
def human_eval(shared_data: Path) -> Records:
    with gzip.open(shared_data / "HumanEval.jsonl.gz", "rt") as file:
        return [json.loads(line) for line in file]


def all_graded(programs: list[str], records: Records) -> list[Verdict]:
    sandbox = Sandbox(Namespaces(NamespacesConfig(warm=4, at_once=8)), LIMITS)
    grader = Grader(sandbox, 4, every=False)

    async def whole() -> list[Verdict]:
        tasks = [(program, one) for program, one in zip(programs, records, strict=True)]
        return await asyncio.gather(
            *[grader.by_tests(p, t["test"], name=t["entry_point"], before=t["prompt"]) for p, t in tasks]
        )

    try:
        return asyncio.run(whole())
    finally:
        sandbox.close()


def test_every_solution_of_human_eval_scores_1(human_eval: Records) -> None:
    right = all_graded([task["prompt"] + task["canonical_solution"] for task in human_eval], human_eval)
    assert [task["task_id"] for task, verdict in zip(human_eval, right, strict=True) if not verdict.correct] == []


SWAPS = (("<=", "<"), (" < ", " >= "), (" > ", " <= "), ("==", "!="), (" + ", " - "), (" - ", " + "), ("True", "False"),
         ("return ", "return not "), (" and ", " or "), ("[0]", "[-1]"), ("1", "2"))  # fmt: skip


@pytest.mark.slow
def test_empty_solutions_of_human_eval_score_0(human_eval: Records) -> None:
    some = human_eval[::STRIDE]
    empty = all_graded([task["prompt"] + "    return None\n" for task in some], some)
    assert not any(verdict.correct for verdict in empty)


@pytest.mark.slow
def test_mutants_of_human_eval_are_graded_as_by_its_own_tests_beside_the_program(human_eval: Records) -> None:
    """The independent source: the mutant and its tests in one interpreter, as the data set's authors run them."""
    draw, programs, some = random.Random(0), [], human_eval[::STRIDE]
    for task in some:
        body = task["canonical_solution"]
        fitting = [(old, new) for old, new in SWAPS if old in body]
        old, new = draw.choice(fitting) if fitting else ("return", "return None #")
        programs.append(task["prompt"] + body.replace(old, new, 1))
    sandbox = Sandbox(Namespaces(NamespacesConfig(warm=4, at_once=4)), LIMITS)

    async def beside() -> list[bool]:
        codes = [f"{p}\n{t['test']}\ncheck({t['entry_point']})" for p, t in zip(programs, some, strict=True)]
        return [result.ok for result in await asyncio.gather(*[sandbox.run(code=code) for code in codes])]

    try:
        expected = asyncio.run(beside())
    finally:
        sandbox.close()
    assert expected.count(False) > 120 / 164 * len(some)
    assert [verdict.correct for verdict in all_graded(programs, some)] == expected


def test_a_program_that_depends_on_the_order_of_a_set_is_graded_alike_each_time(sandbox: Sandbox) -> None:
    program = "def square(n): return ''.join({'a', 'b', 'c', 'd', 'e', 'f', 'g'})"
    tests = "def check(candidate): assert candidate(0) == ''"
    reasons = {
        graded(sandbox, program, "def check(candidate): assert not candidate(0), candidate(0)").reason for _ in range(4)
    }
    assert len(reasons) == 1
    assert not graded(sandbox, program, tests).correct
