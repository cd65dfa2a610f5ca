"""The sliding puzzle, as in NeMo RL: tiles are slid into the empty place until they are in order.

    1 2 3        up moves the tile below the empty place up        1 2 3
    4 _ 6        ------------------------------------------>       4 5 6
    7 5 8                                                          7 _ 8

The first position comes from the solved board by random moves, so every game can be solved.
"""

import random
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from attrs import evolve, frozen

from whet.data.randomness import derive_seed
from whet.errors import DataError
from whet_data.generated import held_out
from whet_env_games.config import SlidingPuzzleConfig
from whet_env_games.playing import GameEnvironment, IllegalMove

MOVES = {"up": (1, 0), "down": (-1, 0), "left": (0, 1), "right": (0, -1)}
"""Where the tile is that a move slides, as rows and columns from the empty place."""
BACK = {"up": "down", "down": "up", "left": "right", "right": "left"}
RULES = """Put the tiles in order by sliding them into the empty place, which is shown as _. At the end the numbers \
rise from left to right and from the top down, and the empty place is the last one.
Moves: up, down, left, right. `up` slides the tile below the empty place up, `left` the tile to its right to the left, \
and so on. Each of your messages makes one move. Think first if you like, and end with the move: <action>up</action>"""


@frozen
class Board:
    """A position: the tiles by row, 0 for the empty place."""

    tiles: tuple[int, ...]
    columns: int
    first: int = 0
    """The distance of the first position; see `distance`."""

    @property
    def distance(self) -> int:
        """Return the sum over tiles of rows and columns to their places: a lower bound of the moves to the end."""
        return sum(
            abs(at // self.columns - (tile - 1) // self.columns) + abs(at % self.columns - (tile - 1) % self.columns)
            for at, tile in enumerate(self.tiles) if tile
        )  # fmt: skip

    def slid(self, move: str) -> "Board | None":
        """Return the board after a move. None: there is no tile to slide."""
        empty = self.tiles.index(0)
        row, column = empty // self.columns + MOVES[move][0], empty % self.columns + MOVES[move][1]
        if not (0 <= row < len(self.tiles) // self.columns and 0 <= column < self.columns):
            return None
        tiles, tile = list(self.tiles), row * self.columns + column
        tiles[empty], tiles[tile] = tiles[tile], 0
        return evolve(self, tiles=tuple(tiles))

    def __str__(self) -> str:
        rows = [self.tiles[i : i + self.columns] for i in range(0, len(self.tiles), self.columns)]
        width = len(str(len(self.tiles) - 1))
        return "\n".join(" ".join(f"{tile or '_':>{width}}" for tile in row) for row in rows)


class SlidingPuzzle:
    """The rules of the sliding puzzle."""

    name = "sliding-puzzle"

    def __init__(self, config: SlidingPuzzleConfig) -> None:
        self._rows, self._columns = config.rows, config.columns

    def rules(self, difficulty: int) -> str:
        """Return the rules as text."""
        return RULES

    def start(self, draw: random.Random, difficulty: int) -> Board:
        """Return a board that random moves lead to. No move takes the one before it back."""
        board = solved = Board((*range(1, self._rows * self._columns), 0), self._columns)
        last, moves = "", 0
        while moves < difficulty or board == solved:
            choices = [(move, after) for move in MOVES if move != BACK.get(last) and (after := board.slid(move))]
            (last, board), moves = draw.choice(choices), moves + 1
        return evolve(board, first=board.distance)

    def key(self, position: Board) -> str:
        """Return the tiles."""
        return " ".join(map(str, position.tiles))

    def shown(self, position: Board) -> str:
        """Return the board."""
        return str(position)

    def moved(self, position: Board, move: str) -> Board:
        """Return the board after a move."""
        if move not in MOVES:
            raise IllegalMove("The moves are up, down, left and right.")
        if (after := position.slid(move)) is None:
            raise IllegalMove(f"There is no tile to slide {move}.")
        return after

    def solved(self, position: Board) -> bool:
        """Return whether all tiles are in their places."""
        return position.distance == 0

    def progress(self, position: Board) -> float:
        """Return the share of the first distance that is gone."""
        return max(0.0, 1 - position.distance / position.first)

    def measures(self, position: Board) -> Mapping[str, float]:
        """Return `distance`: what is left of it."""
        return {"distance": float(position.distance)}

    def revealed(self, position: Board) -> str:
        """Return the board."""
        return str(position)


def environment(config: SlidingPuzzleConfig) -> GameEnvironment[Board]:
    """Return the environment `sliding-puzzle`."""
    return GameEnvironment(SlidingPuzzle(config), config)


def solution(board: Board, most: int = 40) -> list[str]:
    """Return a shortest solution. Raises `DataError` if it has more than `most` moves.

    Iterative deepening A*: Korf 1985, "Depth-first iterative-deepening", section 6.
    """
    for limit in range(board.distance, most + 1):
        if (moves := _within(board, limit, "")) is not None:
            return moves
    raise DataError(f"no solution of the sliding puzzle has at most {most} moves:\n{board}")


def _within(board: Board, limit: int, last: str) -> list[str] | None:
    if board.distance > limit:
        return None
    if not limit or not board.distance:
        return []
    for move in MOVES:
        after = board.slid(move) if move != BACK.get(last) else None
        if after and (rest := _within(after, limit - 1, move)) is not None:
            return [move, *rest]
    return None


DEMONSTRATED = SlidingPuzzleConfig(shuffle=6, turns=8)


def demonstrations(
    count: int, seed: int = 0, careless_share: float = 0.3, config: SlidingPuzzleConfig | None = None
) -> Iterator[dict[str, Any]]:
    """Yield records for supervised fine-tuning: games without rules, whose moves are whole lines.

    A share of the games is careless: its moves are random legal ones, until the turns are used up. No game begins at a
    position of the split `test`.
    """
    config = config or DEMONSTRATED
    game, draw = SlidingPuzzle(config), random.Random(derive_seed(seed, "sliding-puzzle-demonstrations"))
    solved = cache(solution)
    for _ in range(count):
        while held_out(game.key(board := game.start(draw, config.shuffle))):
            pass
        plan = None if draw.random() < careless_share else iter(solved(board))
        messages: list[dict[str, Any]] = []
        while board.distance and len(messages) < 2 * config.turns:
            move = next(plan) if plan else draw.choice([move for move in MOVES if board.slid(move)])
            messages += [{"role": "user", "content": str(board)}, {"role": "assistant", "content": move}]
            board = game.moved(board, move)
        yield {"messages": messages}
