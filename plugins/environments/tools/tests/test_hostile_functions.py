"""Functions that hang, crash, flood or eat memory: named, called again, counted, and nothing outlives the run."""

import asyncio
import os
import time

import pytest
from tool_episodes import call, episode, made, result

from whet_env_tools import processes
from whet_env_tools.processes import ToolsBroken


def alive(number):
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.fixture
def short_grace(monkeypatch):
    monkeypatch.setattr(processes, "_GRACE_SECONDS", 1.0)


FAULTS = {
    "leaves": (call("leaves", code=7), "its process ended"),
    "hangs": (call("hangs", seconds=600), "did not answer within 0.5 s, and then it does not answer"),
    "blocks": (call("blocks", seconds=600), "did not answer within 0.5 s, and blocks"),
    "waits": (call("waits", seconds=600), "did not answer within 0.5 s"),
    "eats": (call("eats", mib=600), "its process ended"),
}


def test_a_function_that_fails_is_named_and_called_again_and_the_episode_goes_on(tmp_path, short_grace, no_orphans):
    names = ("leaves", "hangs", "blocks", "waits", "eats", "slowly")
    impatient = made(tmp_path, *names, call_seconds=0.5, memory_mib=400, turns=10)
    patient = made(tmp_path, *names, call_seconds=60, memory_mib=400, turns=10)

    async def all_faults():
        for name, (text, words) in FAULTS.items():
            environment, begin = patient if name == "eats" else impatient, time.monotonic()
            rewards, results = await episode(environment, text, call("slowly", number=21), r"\boxed{42}")
            assert f"The call of {name} failed: it" in results[0]
            assert words in results[0]
            assert results[1] == result("42")  # the tools work again
            assert rewards == {"correct": 1.0, "calls": 2.0, "wrong_calls": 0.0, "failed_calls": 1.0}
            assert time.monotonic() - begin < 30

    try:
        asyncio.run(all_faults())
    finally:
        impatient.close()
        patient.close()


def test_calls_beside_a_crash_are_called_again_elsewhere(tmp_path):
    environment = made(tmp_path, "leaves", "waits", "slowly")

    async def together():
        # async functions share a process: the one that blocks it takes the others with it, once
        return await asyncio.gather(
            episode(environment, call("leaves", code=1), "no"),
            *[episode(environment, call("waits", seconds=0.3), "no") for _ in range(6)],
        )

    try:
        (crashed, _), *others = asyncio.run(together())
    finally:
        environment.close()
    assert crashed["failed_calls"] == 1.0
    assert all(results == [result("waited")] for _, results in others)


def test_tools_that_fail_in_episode_after_episode_are_broken_and_no_score(tmp_path):
    environment = made(tmp_path, "leaves", "slowly", turns=20)
    try:
        for seed in range(3):
            rewards, _ = asyncio.run(episode(environment, call("leaves", code=1), "no", seed=seed))
            assert rewards["failed_calls"] == 1.0
        words = r"functions failed in calls of 4 episodes in a row, each tried twice; last, in a call of 'leaves'"
        with pytest.raises(ToolsBroken, match=words):
            asyncio.run(episode(environment, call("leaves", code=1), seed=3))
        rewards, _ = asyncio.run(episode(environment, call("slowly", number=1), "no", seed=4))
        assert rewards["failed_calls"] == 0.0
    finally:
        environment.close()


def test_the_calls_of_one_episode_do_not_break_the_tools_for_all(tmp_path):
    environment = made(tmp_path, "leaves", turns=20)
    try:
        rewards, _ = asyncio.run(episode(environment, *[call("leaves", code=1)] * 5, "no"))
        assert rewards["failed_calls"] == 5.0
    finally:
        environment.close()


def test_a_cancelled_episode_leaves_no_call_behind(tmp_path, no_orphans):
    environment = made(tmp_path, "hangs", "waits", "process_number", processes=1, call_seconds=2.0)

    async def cancelled():
        for name in ("waits", "hangs"):
            task = asyncio.create_task(episode(environment, call(name, seconds=600), "no"))
            await asyncio.sleep(0.3)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        # the thread still hangs: the call waits for it, and is then made in another process
        return await episode(environment, call("process_number"), "no")

    try:
        rewards, results = asyncio.run(cancelled())
        assert rewards["failed_calls"] == 0.0
        number = int(results[0].split("\n")[1])
        assert alive(number)
    finally:
        environment.close()
    assert not alive(number)


def test_a_killed_process_is_replaced(tmp_path):
    environment = made(tmp_path, "process_number", processes=1)

    async def killed():
        found = []
        for _ in range(3):
            _, results = await episode(environment, call("process_number"), "no")
            found.append(int(results[0].split("\n")[1]))
            os.kill(found[-1], 9)
        return found

    try:
        assert len(set(asyncio.run(killed()))) == 3
    finally:
        environment.close()


def test_a_closed_environment_calls_nothing(tmp_path):
    environment = made(tmp_path, "slowly")
    environment.tasks("test")
    environment.close()
    environment.close()
    with pytest.raises(ToolsBroken, match="closed"):
        asyncio.run(episode(environment, call("slowly", number=1), "no"))


def test_the_processes_end_with_a_driver_that_is_killed(tmp_path):
    import signal
    import subprocess
    import sys

    program = (
        "import asyncio, sys, time; from pathlib import Path; sys.path.append(sys.argv[1])\n"
        "from tool_episodes import call, episode, made\n"
        "environment = made(Path(sys.argv[2]), 'process_number')\n"
        "print(asyncio.run(episode(environment, call('process_number'), 'no'))[1][0].split()[1], flush=True)\n"
        "time.sleep(600)\n"
    )
    command = [sys.executable, "-c", program, os.path.dirname(__file__), str(tmp_path)]
    driver = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    number = int(driver.stdout.readline())
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    deadline = time.monotonic() + 30
    while alive(number) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(number)
