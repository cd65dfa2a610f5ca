"""What a model must know to play the games of Gymnasium's toy text. Gymnasium has no such texts."""

from attrs import frozen


@frozen
class Known:
    """Texts of a game."""

    rules: str
    actions: tuple[str, ...]
    observation: str = ""
    ends_well: bool = False
    """Whether the game only comes to its end by success."""


_CLIFF = Known(
    "Walk from the start S, at the bottom left, to the goal T, at the bottom right, without stepping on the cliff C. "
    "You are x. Each step costs 1. A step on the cliff costs 100 and takes you back to the start.",
    ("up", "right", "down", "left"),
    ends_well=True,
)
_LAKE = Known(
    "Cross the frozen lake from the start S to the goal G. F is frozen and safe. H is a hole: the game is lost there. "
    "You are at the place in brackets.",
    ("left", "down", "right", "up"),
)
_TAXI = Known(
    "You drive a taxi. Fetch the passenger and bring them to their destination. The places R, G, Y and B are at row 0 "
    "column 0, row 0 column 4, row 4 column 0 and row 4 column 3. South is down. You can pass : but not |. Each step "
    "costs 1, a wrong pickup or dropoff 10. The destination reached gives 20.",
    ("south", "north", "east", "west", "pickup", "dropoff"),
    "You are at row {0} column {1}. The passenger is {2}. The destination is {3}.",
    ends_well=True,
)
_BLACKJACK = Known(
    "Play Blackjack. Get nearer to 21 than the dealer, and not above. Cards 2 to 10 count their number, face cards 10, "
    "an ace 1, or 11 while that keeps you at 21 or below: it is then usable.",
    ("stick", "hit"),
    "Your cards sum to {0}. The dealer shows {1}. You hold {2} usable aces.",
)
KNOWN = {
    "Blackjack": _BLACKJACK, "CliffWalking": _CLIFF, "CliffWalkingSlippery": _CLIFF, "FrozenLake": _LAKE,
    "FrozenLake8x8": _LAKE, "Taxi": _TAXI,
}  # fmt: skip
"""By the name of the environment, without its version."""


def known(environment: str) -> Known | None:
    """Return the texts of an environment by its id. None: there are none."""
    return KNOWN.get(environment.rpartition(":")[2].rpartition("-v")[0])
