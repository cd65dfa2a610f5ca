"""Inside a sandbox: play games of one environment of Gymnasium, many at a time.

{"begin": KEY, "seed": 7}      ->  {"text": "...", "reward": 0, "ended": false}
{"act": KEY, "action": 2}      ->  the same
{"end": KEY}                   ->  {}
{"look": 7}                    ->  the same as `begin`, and then the game ends
"""

import importlib
import json
import math
import re
import warnings
from typing import Any

import gymnasium
from gymnasium import spaces

COLOURED = re.compile(r"((?:\x1b\[[0-9;]*m)+)([^\x1b]*)\x1b\[0?m")
CODES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
PLACES = ("at R", "at G", "at Y", "at B", "in the taxi")
KEPT = 64
LONGEST = 20_000


class Refused(Exception):  # noqa: N818 - it says what happened
    """The environment cannot be played as text."""


def main() -> None:
    """Answer questions, one per line, until there are no more."""
    warnings.simplefilter("ignore")
    with open(3) as questions, open(4, "w") as answers:
        player = None
        for line in questions:
            question = json.loads(line)
            try:
                if player is None:
                    player = Player(question)
                    answer = player.facts()
                else:
                    answer = player.answer(question)
            except Refused as error:
                answer = {"refused": str(error)}
            except Exception as error:
                answer = {"raised": f"{type(error).__name__}: {error!s:.1000}"}
            print(json.dumps(answer), file=answers, flush=True)


class Player:
    """Games of one environment. An instance whose game is over is used for another game."""

    def __init__(self, setup: dict[str, Any]) -> None:
        self._setup = setup
        self._games: dict[str, Any] = {}
        self._idle: list[Any] = []
        try:
            first = self._made()
        except Exception as error:
            raise Refused(f"gymnasium cannot make {setup['id']!r}: {type(error).__name__}: {error}") from error
        self._space = first.action_space
        self._kind = kind(self._space)
        self._idle.append(first)

    def facts(self) -> dict[str, Any]:
        """Return what the driver must know of the environment."""
        spec = self._idle[0].spec
        first, count = (int(self._space.start), int(self._space.n)) if self._kind == "choice" else (0, 0)
        threshold = None if spec is None else spec.reward_threshold
        return {"kind": self._kind, "first": first, "count": count, "threshold": threshold}

    def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        """Answer a question."""
        if "look" in question:
            game = self._idle.pop() if self._idle else self._made()
            shown = self._begun(game, question["look"])
            self._leave(game)
            return shown
        if "begin" in question:
            game = self._games[question["begin"]] = self._idle.pop() if self._idle else self._made()
            return self._begun(game, question["seed"])
        if "end" in question:
            if (game := self._games.pop(question["end"], None)) is not None:
                self._leave(game)
            return {}
        if question["act"] not in self._games:
            return {"lost": True}
        return self._stepped(self._games[question["act"]], question["action"])

    def _made(self) -> Any:
        module, _, _ = self._setup["id"].rpartition(":")
        if module:
            importlib.import_module(module)
        options = dict(self._setup["options"])
        if self._setup["render"] and "ansi" in modes(self._setup["id"]):
            options.setdefault("render_mode", "ansi")
        return gymnasium.make(self._setup["id"], **options)

    def _leave(self, game: Any) -> None:
        if len(self._idle) < KEPT:
            self._idle.append(game)
        else:
            game.close()

    def _begun(self, game: Any, seed: int) -> dict[str, Any]:
        observation, info = game.reset(seed=seed)
        game.action_space.seed(seed)
        return {**self._told(game, observation, info), "reward": 0.0, "ended": False}

    def _stepped(self, game: Any, words: Any) -> dict[str, Any]:
        try:
            action = self._action(words)
        except (OverflowError, ValueError):  # numbers that do not fit into its type
            return {"illegal": True}
        if not self._space.contains(action):
            return {"illegal": True}
        observation, reward, terminated, truncated, info = game.step(action)
        reward = float(reward)
        if not math.isfinite(reward):
            raise ValueError(f"a step gave the reward {reward}")
        told = self._told(game, observation, info)
        return {**told, "reward": reward, "ended": bool(terminated or truncated), "terminated": bool(terminated)}

    def _action(self, words: Any) -> Any:
        if self._kind != "numbers":
            return words
        return tuple(words) if isinstance(self._space, spaces.Tuple) else self._space.dtype.type(words)

    def _told(self, game: Any, observation: Any, info: dict[str, Any]) -> dict[str, Any]:
        told: dict[str, Any] = {"text": self._text(game, observation)[:LONGEST]}
        for name in ("is_success", "success"):
            if name in info:
                told["success"] = bool(info[name])
                break
        return told

    def _text(self, game: Any, observation: Any) -> str:
        template, parts = self._setup["template"], list[str]()
        if self._setup["render"] and getattr(game, "render_mode", None) == "ansi":
            parts.append(plain(str(game.render())))
        if template and self._setup["observation"]:
            parts.append(filled(template, numbers(game, observation)))
        elif self._setup["observation"] and not parts:
            parts.append(str(described(observation)))
        return "\n\n".join(part for part in parts if part)


def modes(name: str) -> list[str]:
    """Return the ways in which an environment can be rendered, without making it where that is possible."""
    spec = gymnasium.spec(name.rpartition(":")[2])
    entry = spec.entry_point
    if isinstance(entry, str):
        module, _, attribute = entry.partition(":")
        entry = getattr(importlib.import_module(module), attribute)
    return list(getattr(entry, "metadata", {}).get("render_modes", ()))


def kind(space: Any) -> str:
    """Return how actions are written: `choice`, one of some; `numbers`, several; `text`. Raises `Refused`."""
    if isinstance(space, spaces.Discrete):
        return "choice"
    if isinstance(space, spaces.Text):
        return "text"
    if isinstance(space, spaces.MultiDiscrete | spaces.MultiBinary) and len(space.shape) == 1:
        return "numbers"
    if isinstance(space, spaces.Tuple) and all(isinstance(part, spaces.Discrete) for part in space.spaces):
        return "numbers"
    raise Refused(
        f"its actions, {space}, cannot be written as words: wanted Discrete, MultiDiscrete, MultiBinary or Text"
    )


def plain(text: str) -> str:
    """Return rendered text without terminal codes. Coloured text gets brackets, because its colour is lost."""
    return CODES.sub("", COLOURED.sub(r"[\2]", text)).strip("\n")


def described(observation: Any) -> Any:
    """Return an observation as builtins."""
    if hasattr(observation, "tolist"):
        return observation.tolist()
    if isinstance(observation, dict):
        return {name: described(value) for name, value in observation.items()}
    return tuple(map(described, observation)) if isinstance(observation, tuple) else observation


def numbers(game: Any, observation: Any) -> list[Any]:
    """Return the parts of an observation. The environment Taxi has all parts in one number."""
    if (decode := getattr(game.unwrapped, "decode", None)) is not None and isinstance(described(observation), int):
        row, column, passenger, destination = decode(int(observation))
        return [row, column, PLACES[passenger], PLACES[destination].removeprefix("at ")]
    found = described(observation)
    return list(found) if isinstance(found, tuple | list) else [found]


def filled(template: str, values: list[Any]) -> str:
    """Return a template in which `{0}`, `{1}` ... are replaced."""

    def value(found: "re.Match[str]") -> str:
        at = int(found[1])
        if at >= len(values):
            raise Refused(f"the template has {found[0]}, but an observation has {len(values)} parts")
        return str(values[at])

    return re.sub(r"\{(\d+)\}", value, template)


main()
