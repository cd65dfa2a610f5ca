import asyncio
import random
from collections import deque
from collections.abc import Sequence
from typing import Any

import pytest
from attrs import evolve

from whet.data.records import Episode, Group
from whet.errors import DataError
from whet.interfaces.environment import Adaptive, EpisodeInfo
from whet_data.generated import held_out
from whet_env_games import code_breaker, maze, sliding_puzzle
from whet_env_games.actions import action_in
from whet_env_games.config import CodeBreakerConfig, MazeConfig, SlidingPuzzleConfig
from whet_env_games.playing import GameEnvironment, IllegalMove
from whet_env_games.sliding_puzzle import Board, SlidingPuzzle, demonstrations, solution
from whet_ops.curriculum import CurriculumConfig
from whet_testing.fakes import FakeModel
from whet_testing.hostile import HOSTILE_ANSWERS

GAMES = {
    "sliding-puzzle": lambda **changes: sliding_puzzle.environment(SlidingPuzzleConfig(**changes)),
    "code-breaker": lambda **changes: code_breaker.environment(CodeBreakerConfig(**changes)),
    "maze": lambda **changes: maze.environment(MazeConfig(**changes)),
}
every_game = pytest.mark.parametrize("game", GAMES)


def play(environment: GameEnvironment[Any], answers: Sequence[str], task: Any = None) -> tuple[Any, list[str], Any]:
    model = FakeModel(answers)
    rewards = asyncio.run(environment.run(task or environment.tasks("train")[0], model))
    return rewards, [message.text for message in model.messages if message.role == "user"], model.log


@every_game
def test_no_position_is_in_both_splits(game: str) -> None:
    environment = GAMES[game]()
    train, test = environment.tasks("train")[:200], environment.tasks("test")
    assert not any(held_out(task.id) for task in train)
    assert all(held_out(task.id) for task in test)
    assert len({task.id for task in test}) == len(test)


@every_game
def test_no_opening_is_solved_and_each_is_the_one_in_the_prompt(game: str) -> None:
    environment = GAMES[game](prompt="{position}")
    for task in environment.tasks("train")[:50]:
        opening = environment.opening(task)
        rules: Any = environment._game
        assert not rules.solved(opening)
        assert rules.shown(opening) == task.prompt[0].text
        assert rules.key(opening) == task.id


@every_game
def test_a_million_games_cost_nothing_until_they_are_played(game: str) -> None:
    tasks = GAMES[game]().tasks("train")
    assert len(tasks) == 1_000_000
    assert tasks[-1] == tasks[999_999] != tasks[0]
    assert GAMES[game](seed=1).tasks("train")[0] != tasks[0]


@every_game
def test_responses_without_a_legal_move_change_nothing_and_end_the_game_at_their_limit(game: str) -> None:
    environment = GAMES[game](illegal_moves=4, illegal_weight=-0.1)
    rewards, told, _ = play(environment, ["I do not know.", "<action>jump</action>", "<action></action>", "up"])
    assert (rewards["illegal"], rewards["moves"], rewards["solved"], rewards["progress"]) == (4, 0, 0, 0)
    assert [text.split(".")[0] for text in told[1:]] == ["Illegal move"] * 3
    assert environment.reward_weights["illegal"] == -0.1


@every_game
@pytest.mark.parametrize("what", HOSTILE_ANSWERS)
def test_no_word_of_a_hostile_move_is_repeated(game: str, what: str) -> None:
    environment = GAMES[game](illegal_moves=2)
    hostile = f"<action>{HOSTILE_ANSWERS[what]}</action>"
    rewards, told, _ = play(environment, [hostile, hostile])
    assert (rewards["illegal"], rewards["moves"]) == (2, 0)
    assert len(told[1]) < 100


@every_game
def test_turns_are_bounded(game: str) -> None:
    forever = {
        "sliding-puzzle": ["up", "down", "left", "right"], "code-breaker": ["0000", "1111"],
        "maze": ["north", "south", "east", "west"],
    }  # fmt: skip
    draw = random.Random(0)
    model = FakeModel(lambda messages: f"<action>{draw.choice(forever[game])}</action>")
    environment = GAMES[game](turns=5, illegal_moves=60)
    rewards = asyncio.run(environment.run(environment.tasks("train")[3], model))
    assert rewards["moves"] + rewards["illegal"] == 5
    assert len(model.messages) == 10


@every_game
def test_a_curriculum_begins_with_easy_games_and_follows_what_was_solved(game: str) -> None:
    environment = GAMES[game](curriculum=CurriculumConfig(easiest=2, window=3))
    assert isinstance(environment, Adaptive)
    assert not isinstance(GAMES[game](), Adaptive)
    task = environment.tasks("train")[5]
    assert task.data["difficulty"] == environment._config.hardest
    seen = []
    for _ in range(3):
        level = environment.difficulty()
        easier = environment.adapted(task, level)
        assert easier == environment.adapted(task, level)
        assert not held_out(easier.id)
        seen.append(easier.data["difficulty"])
        solved = Episode("it", 0, 0, (), {"solved": 1.0}, 1.0, 1, difficulty=level)
        environment.observe([Group(0, "it", 0, (solved,))] * 3)
    assert seen == [2, 3, 4]


@every_game
def test_a_curriculum_cannot_begin_beyond_the_full_difficulty(game: str) -> None:
    with pytest.raises(ValueError, match="has easiest 99, wanted from"):
        GAMES[game](curriculum=CurriculumConfig(easiest=99))


@every_game
def test_the_end_of_a_game_is_recorded(game: str) -> None:
    environment = GAMES[game](illegal_moves=1)
    task = environment.tasks("train")[0]
    _, _, log = play(environment, ["?"], task)
    rules: Any = environment._game
    assert log == {"end": rules.revealed(environment.opening(task))}


def test_a_game_for_which_there_are_no_held_out_positions_is_refused() -> None:
    with pytest.raises(DataError, match=r"sliding-puzzle: no position for test .* at difficulty 1"):
        GAMES["sliding-puzzle"](shuffle=1).tasks("test")


@pytest.mark.parametrize(
    ("text", "move"),
    [
        ("<action>up</action>", "up"),
        ("First <action>down</action>, no: <ACTION> Up </Action> Done.", "up"),
        ("<action>1 2\n3</action>", "1 2 3"),
        ("<action>up", None),
        ("up</action>", None),
        ("</action>up<action>", None),
        ("<action></action>", None),
        ("up", None),
        ("<action>" + "u" * 65 + "</action>", None),
    ],
)
def test_the_move_is_in_the_last_tag(text: str, move: str | None) -> None:
    assert action_in(text, "tag") == move


@pytest.mark.parametrize(("text", "move"), [("up", "up"), ("I think:\n UP \n\n", "up"), ("", None), ("\n \n", None)])
def test_the_move_is_the_last_line(text: str, move: str | None) -> None:
    assert action_in(text, "line") == move


# The sliding puzzle.


def distances_by_breadth(columns: int, tiles: int) -> dict[tuple[int, ...], int]:
    """Work out the distance of every solvable board from the solved one, by moves of the empty place."""
    start = (*range(1, tiles), 0)
    found, ahead = {start: 0}, deque([start])
    while ahead:
        board = ahead.popleft()
        empty = board.index(0)
        for step in (1, -1, columns, -columns):
            other = empty + step
            if not 0 <= other < tiles or (abs(step) == 1 and other // columns != empty // columns):
                continue
            swapped = list(board)
            swapped[empty], swapped[other] = swapped[other], swapped[empty]
            if (after := tuple(swapped)) not in found:
                found[after] = found[board] + 1
                ahead.append(after)
    return found


def test_solutions_are_as_short_as_breadth_first_search_finds_them() -> None:
    distances = distances_by_breadth(3, 6)
    assert len(distances) == 360  # half of 6! boards can be solved (Johnson and Story 1879)
    assert max(distances.values()) == 21
    for tiles, distance in list(distances.items())[::7]:
        board = Board(tiles, 3)
        assert board.distance <= distance
        moves = solution(board)
        assert len(moves) == distance
        for move in moves:
            board = board.slid(move)  # type: ignore[assignment] # a solution has legal moves only
        assert board.tiles == (1, 2, 3, 4, 5, 0)


def test_a_move_slides_the_tile_that_its_name_says() -> None:
    game, board = SlidingPuzzle(SlidingPuzzleConfig()), Board((1, 2, 3, 4, 0, 6, 7, 5, 8), 3)
    assert str(board) == "1 2 3\n4 _ 6\n7 5 8"
    shown = {move: game.shown(game.moved(board, move)) for move in ("up", "down", "left", "right")}
    assert shown == {
        "up": "1 2 3\n4 5 6\n7 _ 8",
        "down": "1 _ 3\n4 2 6\n7 5 8",
        "left": "1 2 3\n4 6 _\n7 5 8",
        "right": "1 2 3\n_ 4 6\n7 5 8",
    }
    with pytest.raises(IllegalMove, match=r"There is no tile to slide up\."):
        game.moved(Board((1, 2, 3, 4, 5, 6, 7, 8, 0), 3), "up")


def test_progress_is_the_share_of_the_distance_that_is_gone() -> None:
    game = SlidingPuzzle(SlidingPuzzleConfig())
    board = evolve(Board((1, 2, 3, 4, 0, 6, 7, 5, 8), 3), first=2)  # tiles 5 and 8 are one place away
    assert board.distance == 2
    assert (game.progress(board), game.measures(board)) == (0.0, {"distance": 2.0})
    assert game.progress(game.moved(board, "up")) == 0.5
    assert game.progress(game.moved(board, "down")) == 0.0  # farther than at first


@pytest.mark.parametrize("shuffle", [1, 5, 12, 24])
def test_a_shuffle_never_ends_at_the_solved_board(shuffle: int) -> None:
    # The moves of a board of two by two go round in a ring of twelve.
    game = SlidingPuzzle(SlidingPuzzleConfig(rows=2, columns=2, shuffle=shuffle))
    assert all(game.start(random.Random(seed), shuffle).distance for seed in range(20))


def test_demonstrations_are_games_as_the_environment_plays_them() -> None:
    records = list(demonstrations(60, seed=3, careless_share=0.5))
    assert list(demonstrations(60, seed=3)) == list(demonstrations(60, seed=3)) != list(demonstrations(60, seed=4))
    config = evolve(sliding_puzzle.DEMONSTRATED, prompt="{position}", move="line")
    environment, solved = sliding_puzzle.environment(config), 0
    for record in records:
        first, *_ = told = [m["content"] for m in record["messages"] if m["role"] == "user"]
        tiles = tuple(int(tile) for tile in first.replace("_", "0").split())
        assert not held_out(" ".join(map(str, tiles)))
        model = FakeModel([m["content"] for m in record["messages"] if m["role"] == "assistant"])
        environment.opening = lambda task, tiles=tiles: evolve(b := Board(tiles, 3), first=b.distance)  # type: ignore
        rewards = asyncio.run(environment.run(evolve(environment.tasks("train")[0], prompt=first), model))
        assert [m.text for m in model.messages if m.role == "user"] == told
        assert rewards["illegal"] == 0
        solved += int(rewards["solved"])
    assert 20 < solved < 45


# The code.


@pytest.mark.parametrize(
    ("secret", "guess", "told"),
    [
        ("0123", "0123", (4, 0)),
        ("0123", "3210", (0, 4)),
        ("0011", "0101", (2, 2)),
        ("0001", "1000", (2, 2)),
        ("1111", "0000", (0, 0)),
        ("0012", "2200", (0, 3)),
        ("1234", "1156", (1, 0)),
        ("3145", "1356", (0, 3)),  # Knuth 1977
    ],
)
def test_feedback_counts_each_digit_once(secret: str, guess: str, told: tuple[int, int]) -> None:
    assert code_breaker.feedback(secret, guess) == told


def test_a_guess_counts_as_consistent_if_it_could_have_been_the_code() -> None:
    environment = GAMES["code-breaker"](turns=4)
    task = next(task for task in environment.tasks("train")[:400] if environment.opening(task).secret[:2] == "01")
    secret = environment.opening(task).secret
    rewards, told, _ = play(environment, [f"<action>{guess}</action>" for guess in ("5555", "5 5 5 4", secret)], task)
    placed = secret.count("5")
    assert told[1] == f"5555: {placed} right, 0 in another place"
    could = code_breaker.feedback("5554", "5555")[0] == placed
    assert rewards["consistent"] == pytest.approx((2 + could) / 3)
    assert (rewards["solved"], rewards["progress"], rewards["moves"]) == (1, 1, 3)


# The maze.


def test_between_two_rooms_there_is_one_way() -> None:
    game = maze.Maze(MazeConfig())
    for seed in range(20):
        place = game.start(random.Random(seed), 6)
        assert len(place.doors) == 2 * (36 - 1)  # a spanning tree has one door less than rooms
        steps = maze.distances(place.doors, place.here)
        assert len(steps) == 36
        assert steps[place.exit] == max(steps.values()) == len(maze.way(place))


def test_the_model_sees_the_next_doors_and_where_it_has_been() -> None:
    doors = frozenset({((0, 0), (0, 1)), ((0, 1), (0, 0)), ((0, 1), (1, 1)), ((1, 1), (0, 1))})
    game, place = maze.Maze(MazeConfig()), maze.Place(doors, 2, (1, 1), ((0, 0),))
    assert game.shown(place) == "You can go: east. The exit is 1 south and 1 east."
    with pytest.raises(IllegalMove, match=r"There is a wall in the south\."):
        game.moved(place, "south")
    east = game.moved(place, "east")
    assert game.shown(east) == "You can go: south, west. You have been: west. The exit is 1 south."
    assert maze.Maze(MazeConfig(compass=False)).shown(east) == "You can go: south, west. You have been: west."
    assert (game.progress(place), game.progress(east)) == (0.0, 0.5)
    back = game.moved(east, "west")
    assert game.measures(back) == {"revisited": 0.5}
    assert game.solved(game.moved(east, "south"))
    assert game.revealed(east) == "#####\n#S *#\n### #\n###E#\n#####"


def test_an_episode_is_told_nothing_but_its_own_game() -> None:
    environment, model = GAMES["maze"](turns=3), FakeModel("<action>north</action>")
    model.episode = EpisodeInfo("train", True, 0, 0, 0, seed=9, group_seed=9)
    other = FakeModel("<action>north</action>")
    task = environment.tasks("train")[0]
    first, second = (asyncio.run(environment.run(task, one)) for one in (model, other))
    assert (first, model.messages) == (second, other.messages)
