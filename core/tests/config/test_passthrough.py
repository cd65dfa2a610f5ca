"""What is written for a foreign engine is refused where it is set elsewhere, forbidden or unknown."""

import pytest

from whet.config.passthrough import Passthrough

ENGINE = Passthrough(
    "Steam", "`steam --help`", ours={"dtype": "generator.dtype"}, fixed={"whistle": "somebody listens to it"}
)
KNOWN = {"dtype", "whistle", "block_size", "max_num_batched_tokens"}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("max_num_batch_tokens", "is no argument of the installed Steam (did you mean 'max_num_batched_tokens'?)"),
        ("qqq", "is no argument of the installed Steam (`steam --help` lists them)"),
        ("dtype", "is set by `generator.dtype`; write it there"),
        ("whistle", "cannot be changed: somebody listens to it"),
    ],
)
def test_an_argument_that_cannot_be_passed_on_is_named(name: str, message: str) -> None:
    assert list(ENGINE.wrong({name: 1, "block_size": 16}, KNOWN)) == [(name, message)]


def test_where_the_engine_is_not_here_any_other_argument_may_be_right() -> None:
    assert list(ENGINE.wrong({"qqq": 1}, frozenset())) == []
