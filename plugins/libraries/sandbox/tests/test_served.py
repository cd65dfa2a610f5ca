"""Libraries that answer questions from inside sandboxes: which errors reach whom, and what is started again."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from whet.errors import WhetError
from whet_sandbox.config import NamespacesConfig
from whet_sandbox.limits import Limits
from whet_sandbox.namespaces import Namespaces
from whet_sandbox.provider import SandboxBroken
from whet_sandbox.sandbox import ProgramEnded, Sandbox
from whet_sandbox.served import Served

LIBRARY = """
import json, os, time
import beside
with open(3) as questions, open(4, "w") as answers:
    said = []
    for line in questions:
        question = json.loads(line)
        if question.get("exit"):
            os._exit(7)
        if question.get("sleep"):
            time.sleep(3600)
        said.append(question)
        print("no JSON" if question.get("garbage") else json.dumps([beside.NAME, said]), file=answers, flush=True)
"""
Made = Callable[..., Served]


@pytest.fixture
def served() -> Iterator[Made]:
    made: list[Served] = []

    def make(code: str = LIBRARY, processes: int = 1, **setup: Any) -> Served:
        limits = Limits(cpu_seconds=1000.0, wall_seconds=60.0)
        sandbox = Sandbox(Namespaces(NamespacesConfig()), limits, at_once=processes)
        made.append(Served(sandbox, code, setup, {"beside.py": "NAME = 'library'"}, processes=processes))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_a_process_keeps_its_state_and_answers_from_any_loop_and_thread(served):
    one = served(seed=1)
    assert one.greeting() == ["library", [{"seed": 1}]]
    assert asyncio.run(one.ask({"a": 1}, 60)) == ["library", [{"seed": 1}, {"a": 1}]]
    assert asyncio.run(one.ask({"a": 2}, 60))[1][-1] == {"a": 2}
    assert len(one.ask_now({"a": 3}, 60)[1]) == 4


@pytest.mark.parametrize(("question", "why"), [({"exit": 1}, "exit"), ({"sleep": 1}, "wall")])
def test_a_process_that_ends_or_hangs_is_named_and_started_again(served, question, why):
    one = served()
    one.ask_now({"a": 1}, 60)
    with pytest.raises(ProgramEnded) as error:
        one.ask_now(question, 5)
    assert error.value.result.why == why
    assert one.ask_now({"a": 2}, 60) == ["library", [{}, {"a": 2}]]


def test_what_is_no_JSON_and_what_does_not_start_is_infrastructure(served):
    one = served()
    with pytest.raises(SandboxBroken, match="no JSON"):
        one.ask_now({"garbage": 1}, 60)
    assert one.ask_now({"a": 2}, 60) == ["library", [{}, {"a": 2}]]
    with pytest.raises(SandboxBroken, match="no library here"):
        served("raise SystemExit('no library here')").greeting()


def test_an_answer_that_nobody_waits_for_is_not_taken_for_the_next_one(served):
    one = served()
    one.greeting()

    async def give_up() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await one.ask({"sleep": 1}, 60)
        assert await one.ask({"a": 2}, 60) == ["library", [{}, {"a": 2}]]

    asyncio.run(give_up())


def test_questions_to_one_process_keep_its_state_and_others_are_shared_out(served):
    one = served(processes=2)

    async def ask() -> list[Any]:
        return await asyncio.gather(*(one.ask({"n": n}, 60, process=n % 2) for n in range(6)))

    said = asyncio.run(ask())
    assert [answer[1] for answer in said[4:]] == [[{}, *({"n": n} for n in range(k, 6, 2))] for k in (0, 1)]


def test_a_closed_library_answers_nothing_and_leaves_no_process(served, no_orphans):
    one = served()
    one.greeting()
    one.close()
    one.close()
    with pytest.raises(WhetError, match="closed"):
        one.greeting()
