"""Measure calls of a function in a process of its own, as rewards are graded, over those of Python's own pool.

    python benchmarks/grader_call.py

Both have one process, which is called again and again by an event loop, in rounds in turn. whet's keeps a deadline for
each call and unpickles nothing.
"""

import argparse
import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from whet_sandbox.pool import GraderPool


def same(given: str, wanted: str) -> bool:
    """What is called."""
    return given == wanted


async def seconds(call: Callable[[], Awaitable[bool]], calls: int) -> list[float]:
    """Return how long each of so many calls took, one after the other."""
    took = []
    for _ in range(calls):
        begin = time.perf_counter()
        assert await call()
        took.append(time.perf_counter() - begin)
    return took


async def measure(rounds: int, calls: int) -> None:
    """Print a line for each round, and then for all."""
    loop = asyncio.get_running_loop()
    with ProcessPoolExecutor(1) as peer:
        pool = GraderPool(f"file:{Path(__file__).absolute()}:same")

        async def of_python() -> bool:
            return await loop.run_in_executor(peer, same, "4", "4")

        async def of_whet() -> bool:
            return bool(await pool.call("4", "4"))

        try:
            ratios = []
            for _ in range(rounds):
                ours, theirs = [statistics.median(await seconds(call, calls)) for call in (of_whet, of_python)]
                ratios.append(ours / theirs)
                print(f"whet {ours * 1e6:6.0f} us   Python {theirs * 1e6:6.0f} us   ratio {ratios[-1]:.2f}", flush=True)
        finally:
            pool.close()
    print(f"median ratio {statistics.median(ratios):.2f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--calls", type=int, default=1000)
    arguments = parser.parse_args()
    asyncio.run(measure(arguments.rounds, arguments.calls))
