"""Functions that tests give to the environment as tools. Some of them are hostile."""

import asyncio
import os
import sys
import time
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Literal, TypedDict

import msgspec

from whet_env_tools.functions import Episode

_FIVE = asyncio.Barrier(5)


def weather(city: str, unit: Literal["C", "F"] = "C", days: int | None = None) -> dict[str, object]:
    """Return the weather of a city.

    It is always fine.

    Args:
        city: Name of the city,
            in English.
        unit (str): Unit of temperature.

    Returns:
        The weather.
    """
    return {"city": city, "temperature": 20 if unit == "C" else 68, "days": days}


async def slowly(number: Annotated[int, "Any number."]) -> int:
    """Double a number, and wait before it.

    :param number: not this one: the annotation wins.
    """
    await asyncio.sleep(0.05)
    return 2 * number


@dataclass
class Point:
    x: float
    y: float


class Options(TypedDict, total=False):
    squared: bool


def distance(points: list[Point], options: Options | None = None, scale: Annotated[float, msgspec.Meta(gt=0)] = 1.0):
    """Return the length of a path."""
    total = sum(((a.x - b.x) ** 2 + (a.y - b.y) ** 2) ** 0.5 for a, b in pairwise(points))
    return scale * (total**2 if (options or {}).get("squared") else total)


def remember(word: str, episode: Episode) -> str:
    """Remember a word, and return all so far."""
    episode.state["words"] = [*episode.state.get("words", []), word]
    return f"{episode.data['question']} {episode.split} {' '.join(episode.state['words'])}"


def raises(text: str) -> str:
    """Raise an error."""
    raise LookupError(f"nothing about {text}")


def leaves(code: int) -> str:
    """End the process."""
    os._exit(code)


def ends(name: str) -> int:
    """Find an age."""
    return next(age for one, age in (("ann", 5),) if one == name)


def exits(code: int) -> str:
    """Ask Python to exit."""
    sys.exit(code)


def hangs(seconds: float) -> str:
    """Sleep."""
    time.sleep(seconds)
    return "slept"


async def blocks(seconds: float) -> str:
    """Sleep, and block the event loop."""
    time.sleep(seconds)
    return "slept"


async def waits(seconds: float) -> str:
    """Sleep, and block nothing."""
    await asyncio.sleep(seconds)
    return "waited"


async def meets() -> str:
    """Wait until five calls wait."""
    await _FIVE.wait()
    return "met"


def eats(mib: int) -> int:
    """Fill memory."""
    return len(bytearray(mib << 20))


def floods(mib: int) -> str:
    """Return a long text, and write one to stderr."""
    sys.stderr.write("x" * (mib << 20))
    return "y" * (mib << 20)


def process_number() -> int:
    """Return the number of this process."""
    return os.getpid()


def no_words(number: int) -> int:
    return number


def no_type(number) -> int:
    """Lack a type."""
    return number


def rest(*numbers: int) -> int:
    """Take what nobody can pass by name."""
    return sum(numbers)


not_a_function = 3
