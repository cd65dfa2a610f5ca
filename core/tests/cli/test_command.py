"""What all commands share: how they report errors."""

from whet.cli.command import message
from whet.errors import ConfigError, WhetError


def test_an_error_that_quotes_a_model_does_not_steer_the_terminal():
    shown = message(WhetError("one\n\ttwo né 東 \x1b]0;owned\x07\x9b2J\u202e\ud800"))
    assert shown == r"one{}two né 東 \x1b]0;owned\x07\x9b2J\u202e\ud800".format("\n\t")


def test_several_problems_get_a_line_each():
    assert message(ConfigError(["a: wrong", "b: wrong"])) == "2 problems in the config\n  a: wrong\n  b: wrong"
    assert message(ConfigError("a: wrong")) == "a: wrong"
