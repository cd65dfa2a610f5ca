"""Measure sandboxes: the start of a program, programs a second, and many at a time.

    python benchmarks/sandbox.py

Each number is beside that of the same program in a bare process, which is no sandbox.
"""

import argparse
import asyncio
import statistics
import subprocess
import sys
import time

from whet_env_code.grading import Grader
from whet_sandbox.config import NamespacesConfig
from whet_sandbox.namespaces import Namespaces
from whet_sandbox.sandbox import Sandbox

PROGRAM = "print(6 * 7)"
FUNCTION = "def square(n):\n    return n * n\n"
TESTS = "def check(candidate):\n    assert candidate(3) == 9\n    assert candidate(-4) == 16\n"


def milliseconds(times: list[float]) -> str:
    """Return the median and the 90th percentile."""
    return (
        f"{1000 * statistics.median(times):.1f} ms (90th percentile {1000 * sorted(times)[len(times) * 9 // 10]:.1f})"
    )


async def starts(warm: int, count: int) -> list[float]:
    """Return how long each program took from the call to its result, one after the other, with pauses."""
    sandbox, times = Sandbox(Namespaces(NamespacesConfig(warm=warm))), []
    for _ in range(count):
        await asyncio.sleep(0.05)  # as between programs of a run, so that the next sandbox is made
        began = time.perf_counter()
        assert (await sandbox.run(code=PROGRAM)).stdout == "42\n"
        times.append(time.perf_counter() - began)
    sandbox.close()
    return times[1:]  # the first starts the launcher


async def together(count: int) -> float:
    """Return the seconds for so many programs at a time, each of which sleeps for one second."""
    sandbox = Sandbox(Namespaces(NamespacesConfig(at_once=count, warm=0)))
    began = time.perf_counter()
    code = "import time; time.sleep(1); print(6 * 7)"
    results = await asyncio.gather(*[sandbox.run(code=code) for _ in range(count)])
    took = time.perf_counter() - began
    assert all(result.stdout == "42\n" for result in results)
    sandbox.close()
    return took


async def gradings(count: int) -> float:
    """Return gradings a second, each of a program by two tests in a sandbox of their own."""
    sandbox = Sandbox(Namespaces(NamespacesConfig(at_once=8, warm=4)))
    grader = Grader(sandbox, 4, every=False)
    await grader.by_tests(FUNCTION, TESTS, name="square")
    began = time.perf_counter()
    verdicts = await asyncio.gather(*[grader.by_tests(FUNCTION, TESTS, name="square") for _ in range(count)])
    took = time.perf_counter() - began
    assert all(verdict.correct for verdict in verdicts)
    sandbox.close()
    return count / took


def bare(count: int) -> list[float]:
    """Return how long the program takes in a bare process."""
    times = []
    for _ in range(count):
        began = time.perf_counter()
        subprocess.run([sys.executable, "-s", "-c", PROGRAM], capture_output=True, check=True)
        times.append(time.perf_counter() - began)
    return times


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=100, help="programs of each measurement")
    given = parser.parse_args()
    print(f"a bare process                      {milliseconds(bare(given.programs))}")
    print(f"a sandbox made on arrival           {milliseconds(asyncio.run(starts(0, given.programs)))}")
    print(f"a warm sandbox                      {milliseconds(asyncio.run(starts(2, given.programs)))}")
    print(f"gradings a second                   {asyncio.run(gradings(given.programs)):.0f}")
    print(f"100 at a time, of a second each     {asyncio.run(together(100)):.1f} s")
