"""Grade a program by hidden tests: program and tests run in a sandbox each, and only plain data crosses between them.

    sandbox of the tests                driver                  sandbox of the program
    check(candidate): candidate(3)  ->  {"call": "f", ...}  ->  f(3)
                      9 == 9        <-  {"value": 9}        <-  9
    {"passed": 1, "total": 1}       ->

The program sees the arguments of a call, and nothing else of the tests: neither their text nor what they expect. What
it prints, how it exits and what it does to its interpreter cannot become a passed test.
"""

import json
import re
import time
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any, Final

from attrs import evolve, frozen

from whet_sandbox.gate import Gate
from whet_sandbox.interpreter import described
from whet_sandbox.limits import Limits
from whet_sandbox.sandbox import ProgramEnded, Sandbox, Session

_INSIDE: Final = {
    name: files("whet_env_code.inside").joinpath(f"{name}.py").read_text() for name in ("plain", "server", "tests")
}
_CHECK: Final = re.compile(r"^def check\(", re.MULTILINE)
_CALL: Final = b'{"call": '
"""How a call begins. It is passed on unread: its arguments may be the program's own values, such as an integer of more
digits than the driver's JSON takes, and an error here would look like a failure of the driver."""
_MOST_CALLS: Final = 100_000
_LAST_WORDS: Final = 300


@frozen
class Verdict:
    """What the tests say of a program."""

    passed: int
    """Tests that it passed."""
    total: int
    """Tests, as far as they are known: after an error outside of an assert, those that ran or are written."""
    reason: str
    """Why it is not right. Empty: it is. It may quote the program, which is hostile."""

    @property
    def correct(self) -> bool:
        """Return whether the program passed all tests, and there was at least one."""
        return not self.reason and self.passed == self.total > 0

    @property
    def share(self) -> float:
        """Return the share of tests that it passed."""
        return self.passed / self.total if self.total else 0.0


class Grader:
    """Grades programs, some at a time."""

    def __init__(self, sandbox: Sandbox, pairs: int, every: bool) -> None:
        """Grade in a sandbox. `pairs`: most gradings at a time, each of which takes two. `every`: run all tests."""
        self._sandbox, self._every = sandbox, every
        # a grading that has one sandbox and waits for a second could wait for another that does the same
        self._gate = Gate(pairs)

    async def by_tests(self, program: str, tests: str, *, name: str = "", before: str = "", setup: str = "") -> Verdict:
        """Grade functions of a program by code with asserts.

        :param tests: code. If it defines `check(candidate)`, this is called with the program's function.
        :param name: the program's function. Empty: all that the tests call and nobody defines.
        :param before: the beginning of the program, whose functions the tests may call, too.
        :param setup: code that runs before the tests.
        """
        order = {"before": before, "setup": setup, "tests": tests, "name": name, "every": self._every}
        order["check"] = _CHECK.search(tests) is not None
        helper = {"whet_env_code/inside/plain.py": _INSIDE["plain"]}
        async with (
            self._gate.place(),
            self._sandbox.session() as one,
            self._sandbox.session(_tests(self._sandbox)) as other,
        ):
            program_side = _ProgramSide(one, self._sandbox.limits.wall_seconds)
            try:
                await other.start(code=_INSIDE["tests"], files=helper)
                await program_side.load(program, helper)
                line = (await other.ask(json.dumps(order).encode())).line
                for _ in range(_MOST_CALLS):
                    if not line.startswith(_CALL):
                        return _verdict(json.loads(line), program_side.ended)
                    line = (await other.ask(await program_side.answer(line))).line
            except ProgramEnded as error:  # the tests
                return Verdict(0, 1, f"the tests ended early: {described(error.result)}; {program_side.ended}")
            return Verdict(0, 1, f"the tests called the program more than {_MOST_CALLS} times")

    async def by_cases(self, program: str, cases: Sequence[Mapping[str, str]]) -> Verdict:
        """Grade a program by what it writes to stdout for each input."""
        limits, passed, reason = self._sandbox.limits, 0, ""
        async with self._gate.place(), self._sandbox.session() as session:
            left = limits.wall_seconds
            for number, case in enumerate(cases):
                began = time.monotonic()
                result = await session.run(
                    code=program, stdin=case["input"], limits=evolve(limits, wall_seconds=max(left, 0.01))
                )
                left -= time.monotonic() - began
                if result.ok and _same_text(result.stdout, case["output"]):
                    passed += 1
                    continue
                wrong = f"case {number}: " + (
                    f"wrong output {result.stdout!r:.{_LAST_WORDS}}" if result.ok else described(result)
                )
                reason = reason or wrong
                if not self._every or left <= 0:
                    break
        return Verdict(passed, len(cases), reason)


class _ProgramSide:
    """The program, as the tests reach it. Once it has ended, every call says so."""

    def __init__(self, session: Session, seconds: float) -> None:
        self._session, self._left = session, seconds
        self.ended = ""
        """How the program ended or could not be loaded. Empty: it runs."""

    async def load(self, program: str, helper: Mapping[str, str]) -> None:
        """Start the program."""
        try:
            await self._session.start(code=_INSIDE["server"], files={**helper, "program.py": program})
        except ProgramEnded as error:
            self.ended = described(error.result)
            return
        answer = await self.answer(b"{}")
        if not self.ended and b'"value"' not in answer[:10]:
            self.ended = f"it cannot be loaded: {_words(answer)}"

    async def answer(self, question: bytes) -> bytes:
        """Return the answer to a call, one line. It is what the program wrote, and may be anything."""
        if not self.ended:
            began = time.monotonic()
            try:
                answer = (await self._session.ask(question, max(self._left, 0.01))).line
                self._left -= time.monotonic() - began
                return answer
            except ProgramEnded as error:
                self.ended = described(error.result)
        return json.dumps({"gone": self.ended}).encode()


def _tests(sandbox: Sandbox) -> Limits:
    """Return the limits of the tests: wide, because they are the data set's, and the program is to be limited."""
    given = sandbox.limits
    return evolve(
        given, cpu_seconds=10 + 4 * given.cpu_seconds, wall_seconds=60 + 2 * given.wall_seconds,
        memory_mib=max(1024, given.memory_mib), answer_kib=2 * given.answer_kib,
    )  # fmt: skip


def _verdict(answer: Mapping[str, Any], ended: str) -> Verdict:
    failed = str(answer["failed"])
    total = int(answer["total"])
    if not total:
        return Verdict(0, 0, ended or "no assert of the tests ran")
    return Verdict(int(answer["passed"]), total, ended or failed)


def _words(answer: bytes) -> str:
    try:
        held = json.loads(answer)
        return f"{held['error']}: {held['words']}"[:_LAST_WORDS]
    except (ValueError, KeyError, TypeError, RecursionError):
        return repr(answer[:_LAST_WORDS])


def _same_text(one: str, other: str) -> bool:
    return [line.rstrip() for line in one.strip().split("\n")] == [line.rstrip() for line in other.strip().split("\n")]
