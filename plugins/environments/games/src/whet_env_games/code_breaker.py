"""A code to break, as in Mastermind: each guess is told how many digits are right. What is hidden must be inferred.

    user       ...
    assistant  <action>0011</action>
    user       0011: 1 right, 1 in another place
    assistant  <action>0203</action>

Each digit of the code counts once: if a guess has a digit twice and the code has it once, one of the two counts.
"""

import random
from collections import Counter
from collections.abc import Mapping

from attrs import evolve, frozen

from whet_env_games.config import CodeBreakerConfig
from whet_env_games.playing import GameEnvironment, IllegalMove

RULES = """I have a secret code of {length} digits. Each digit is from 0 to {highest}, and digits may repeat. Guess \
it. After each guess I tell you how many digits are right and in their place, and how many more occur in another place.
Each of your messages makes one guess. Think first if you like, and end with the guess: <action>{example}</action>"""
Feedback = tuple[int, int]


def feedback(secret: str, guess: str) -> Feedback:
    """Return how many digits are in their place, and how many more occur elsewhere (Knuth 1977, section 1)."""
    placed = sum(a == b for a, b in zip(secret, guess, strict=True))
    return placed, (Counter(secret) & Counter(guess)).total() - placed


@frozen
class Guesses:
    """A position: the secret, and the guesses with what was told about each."""

    secret: str
    told: tuple[tuple[str, Feedback], ...] = ()
    consistent: int = 0
    """Number of guesses that agreed with all that had been told before."""


class CodeBreaker:
    """The rules of the code."""

    name = "code-breaker"

    def __init__(self, config: CodeBreakerConfig) -> None:
        self._digits = "0123456789"[: config.digits]

    def rules(self, difficulty: int) -> str:
        """Return the rules as text."""
        example = "".join(self._digits[i % len(self._digits)] for i in range(difficulty))
        return RULES.format(length=difficulty, highest=self._digits[-1], example=example)

    def start(self, draw: random.Random, difficulty: int) -> Guesses:
        """Return a secret code."""
        return Guesses("".join(draw.choice(self._digits) for _ in range(difficulty)))

    def key(self, position: Guesses) -> str:
        """Return the secret."""
        return position.secret

    def shown(self, position: Guesses) -> str:
        """Return what was told about the last guess."""
        if not position.told:
            return "Your first guess?"
        guess, (placed, elsewhere) = position.told[-1]
        return f"{guess}: {placed} right, {elsewhere} in another place"

    def moved(self, position: Guesses, move: str) -> Guesses:
        """Return the position after a guess: digits, with or without spaces."""
        guess = move.replace(" ", "")
        if len(guess) != len(position.secret) or not set(guess) <= set(self._digits):
            raise IllegalMove(f"A guess has {len(position.secret)} digits from 0 to {self._digits[-1]}.")
        agrees = all(feedback(guess, before) == told for before, told in position.told)
        told = (*position.told, (guess, feedback(position.secret, guess)))
        return evolve(position, told=told, consistent=position.consistent + agrees)

    def solved(self, position: Guesses) -> bool:
        """Return whether the last guess was the secret."""
        return bool(position.told) and position.told[-1][0] == position.secret

    def progress(self, position: Guesses) -> float:
        """Return the largest share of digits in their place of any guess."""
        return max((placed for _, (placed, _) in position.told), default=0) / len(position.secret)

    def measures(self, position: Guesses) -> Mapping[str, float]:
        """Return `consistent`: the share of guesses that could have been the secret, as far as the model was told."""
        return {"consistent": position.consistent / len(position.told) if position.told else 0.0}

    def revealed(self, position: Guesses) -> str:
        """Return the secret."""
        return position.secret


def environment(config: CodeBreakerConfig) -> GameEnvironment[Guesses]:
    """Return the environment `code-breaker`."""
    return GameEnvironment(CodeBreaker(config), config)
