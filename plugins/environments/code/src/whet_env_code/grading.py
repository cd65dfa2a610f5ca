"""Grade a program by hidden tests: program and tests run in separate sandboxes, which exchange only plain data.

    sandbox of the tests                driver                  sandbox of the program
    check(candidate): candidate(3)  ->  {"call": "f", ...}  ->  f(3)
                      9 == 9        <-  {"value": 9}        <-  9
    {"passed": 1, "total": 1}       ->

The program sees the arguments of a call, but neither the text of the tests nor the results that they expect. So its
output, its exit code and its changes to its interpreter cannot pass a test.
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
"""How a call begins. The driver does not parse a call: its arguments may be the program's own values, such as an
integer with more digits than the driver's JSON accepts, and an error would look like a failure of the driver."""
_MOST_CALLS: Final = 100_000
_LAST_WORDS: Final = 300


@frozen
class Verdict:
    """The result of a program's tests."""

    passed: int
    """Tests that it passed."""
    total: int
    """Known tests. After an error outside of an assert, these are the tests that ran or are written in the text."""
    reason: str
    """Why the program is wrong. Empty: it is right. The reason may quote the program, which is hostile."""

    @property
    def correct(self) -> bool:
        """Return whether the program passed all tests, and there was at least one."""
        return not self.reason and self.passed == self.total > 0

    @property
    def share(self) -> float:
        """Return the share of tests that it passed."""
        return self.passed / self.total if self.total else 0.0


class Grader:
    """Grades programs, several at the same time."""

    def __init__(self, sandbox: Sandbox, pairs: int, every: bool) -> None:
        """Grade in a sandbox. `pairs`: most gradings at a time, each of which takes two. `every`: run all tests."""
        self._sandbox, self._every = sandbox, every
        # Without this gate, two gradings that have one sandbox each could wait for each other's second sandbox.
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
    """The program, as the tests call it. After the program has ended, every call returns how it ended."""

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
    """Return the limits of the tests. They are wide: the tests belong to the data set and are not hostile."""
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
