"""A maze of which the model sees only where it can go next: it must explore, and remember where it has been.

    user       You can go: north, east.
    assistant  <action>east</action>
    user       You can go: south, west. You have been: west.

The doors are a spanning tree of the rooms, so there is exactly one way between two rooms.
"""

import random
from collections import deque
from collections.abc import Mapping

from attrs import evolve, field, frozen

from whet_env_games.config import MazeConfig
from whet_env_games.playing import GameEnvironment, IllegalMove

Cell = tuple[int, int]
"""Row and column, from the north and from the west."""
MOVES = {"north": (-1, 0), "east": (0, 1), "south": (1, 0), "west": (0, -1)}
RULES = """You are in a maze of {size} times {size} rooms. Find the exit. In each room you see only in which \
directions you can go.
Moves: north, east, south, west. Each of your messages makes one move. Think first if you like, and end with the move: \
<action>north</action>"""


@frozen
class Place:
    """A position: the maze, and the rooms that were visited, the present one last."""

    doors: frozenset[tuple[Cell, Cell]] = field(repr=False)
    """Pairs of rooms between which one can go, in both directions."""
    size: int
    exit: Cell
    visited: tuple[Cell, ...]

    @property
    def here(self) -> Cell:
        """Return the present room."""
        return self.visited[-1]

    def open(self) -> dict[str, Cell]:
        """Return the rooms to which one can go, by direction."""
        rooms = {move: (self.here[0] + row, self.here[1] + column) for move, (row, column) in MOVES.items()}
        return {move: room for move, room in rooms.items() if (self.here, room) in self.doors}


class Maze:
    """The rules of the maze."""

    name = "maze"

    def __init__(self, config: MazeConfig) -> None:
        self._compass = config.compass

    def rules(self, difficulty: int) -> str:
        """Return the rules as text."""
        return RULES.format(size=difficulty)

    def start(self, draw: random.Random, difficulty: int) -> Place:
        """Return a maze, with an entry and an exit that is as far away as any room.

        Between two rooms there is exactly one way: the doors are a spanning tree, drawn by depth-first search.
        """
        first = (draw.randrange(difficulty), draw.randrange(difficulty))
        doors, seen, path = set[tuple[Cell, Cell]](), {first}, [first]
        while path:
            row, column = here = path[-1]
            rooms = [(row + down, column + right) for down, right in MOVES.values()]
            fresh = [room for room in rooms if room not in seen and max(room) < difficulty and min(room) >= 0]
            if not fresh:
                path.pop()
                continue
            room = draw.choice(fresh)
            doors |= {(here, room), (room, here)}
            seen.add(room)
            path.append(room)
        found = frozenset(doors)
        steps = distances(found, first)
        return Place(found, difficulty, max(steps, key=lambda room: (steps[room], room)), (first,))

    def key(self, position: Place) -> str:
        """Return the map."""
        return self.revealed(position)

    def shown(self, position: Place) -> str:
        """Return where the model can go, and where it has been."""
        rooms = position.open()
        been = [move for move, room in rooms.items() if room in position.visited]
        words = [f"You can go: {', '.join(rooms)}."]
        words += [f"You have been: {', '.join(been)}."] if been else []
        return " ".join([*words, *self._direction(position)])

    def _direction(self, position: Place) -> list[str]:
        if not self._compass:
            return []
        down, right = (position.exit[i] - position.here[i] for i in range(2))
        parts = [f"{abs(down)} {'south' if down > 0 else 'north'}"] if down else []
        parts += [f"{abs(right)} {'east' if right > 0 else 'west'}"] if right else []
        return [f"The exit is {' and '.join(parts)}."] if parts else []

    def moved(self, position: Place, move: str) -> Place:
        """Return the position after a move."""
        if move not in MOVES:
            raise IllegalMove("The moves are north, east, south and west.")
        if move not in (rooms := position.open()):
            raise IllegalMove(f"There is a wall in the {move}.")
        return evolve(position, visited=(*position.visited, rooms[move]))

    def solved(self, position: Place) -> bool:
        """Return whether the exit is reached."""
        return position.here == position.exit

    def progress(self, position: Place) -> float:
        """Return the share of the way to the exit that is gone."""
        steps = distances(position.doors, position.exit)
        return max(0.0, 1 - steps[position.here] / steps[position.visited[0]])

    def measures(self, position: Place) -> Mapping[str, float]:
        """Return `revisited`: the share of moves into rooms where the model had been."""
        moves = len(position.visited) - 1
        return {"revisited": 1 - (len(set(position.visited)) - 1) / moves if moves else 0.0}

    def revealed(self, position: Place) -> str:
        """Return the map: `S` the entry, `E` the exit, `*` visited rooms, `#` walls."""
        size = 2 * position.size + 1
        rows = [["#"] * size for _ in range(size)]
        for (row, column), (other_row, other_column) in position.doors:
            rows[2 * row + 1][2 * column + 1] = " "
            rows[row + other_row + 1][column + other_column + 1] = " "
        marks = {**dict.fromkeys(position.visited, "*"), position.exit: "E", position.visited[0]: "S"}
        for (row, column), mark in marks.items():
            rows[2 * row + 1][2 * column + 1] = mark
        return "\n".join("".join(row) for row in rows)


def distances(doors: frozenset[tuple[Cell, Cell]], start: Cell) -> dict[Cell, int]:
    """Return the number of moves from a room to each room."""
    found, ahead = {start: 0}, deque([start])
    while ahead:
        here = ahead.popleft()
        for down, right in MOVES.values():
            room = (here[0] + down, here[1] + right)
            if room not in found and (here, room) in doors:
                found[room] = found[here] + 1
                ahead.append(room)
    return found


def way(place: Place) -> list[str]:
    """Return the shortest way to the exit."""
    steps, moves = distances(place.doors, place.exit), list[str]()
    while place.here != place.exit:
        move = min(rooms := place.open(), key=lambda one: steps[rooms[one]])
        moves, place = [*moves, move], evolve(place, visited=(*place.visited, rooms[move]))
    return moves


def environment(config: MazeConfig) -> GameEnvironment[Place]:
    """Return the environment `maze`."""
    return GameEnvironment(Maze(config), config)
