"""The token is out of the environment but for a file's name, while Ray starts."""

import os
import sys
from pathlib import Path

import pytest

from whet_ray import token as ray_token
from whet_ray.token import FILE, MODE, TOKEN, hide_token, make_token, shown_token


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_token, "_kept", {})
    for name in (TOKEN, FILE, MODE):
        monkeypatch.delenv(name, raising=False)


def test_a_token_of_the_user_is_kept_for_every_ray_of_this_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TOKEN, "secret")
    hide_token()
    assert TOKEN not in os.environ
    for _ in range(2):
        with shown_token(tmp_path):
            file = Path(os.environ[FILE])
            assert (file.read_text(), file.stat().st_mode & 0o777) == ("secret", 0o600)
            assert not {TOKEN, MODE} & set(os.environ), "how Ray is reached is the user's choice"
        assert FILE not in os.environ
    hide_token()
    with shown_token(tmp_path):
        assert (tmp_path / "token").read_text() == "secret"


def test_what_the_user_has_chosen_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FILE, "/home/me/token")
    make_token()
    with shown_token(tmp_path):
        assert os.environ[FILE] == "/home/me/token"
    monkeypatch.setenv(TOKEN, "secret")
    hide_token()
    with shown_token(tmp_path):
        assert os.environ[FILE] == str(tmp_path / "token")
    assert os.environ[FILE] == "/home/me/token"


def test_a_token_of_ours_comes_with_the_mode_that_wants_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    make_token()
    with shown_token(tmp_path):
        assert os.environ[MODE] == "token"
        assert len((tmp_path / "token").read_text()) == 64
    assert not {TOKEN, FILE, MODE} & set(os.environ)
