"""Methods of a test's classes are called in a process in which hashes of texts are others."""

import os
from typing import Any

import pytest

from whet_testing.another_interpreter import SEED, AnotherInterpreter, NotThereError


class Found:
    """What a method finds in its process."""

    name = ""

    def looked(self) -> dict[str, Any]:
        return {"hash": hash("a"), "process": os.getpid(), "name": self.name}

    def raises(self) -> None:
        raise RuntimeError("there is nothing")

    def unsendable(self) -> object:
        return lambda: None


class Outer:
    class Inner(Found):
        pass


@pytest.mark.parametrize("cls", [Found, Outer.Inner])
def test_a_method_is_called_there_with_the_attributes_of_here(
    cls: type[Found], another_interpreter: AnotherInterpreter
) -> None:
    here = cls()
    here.name = "mine"
    there = another_interpreter.call(here, "looked")
    assert there["name"] == "mine"
    assert there["hash"] != hash("a")
    assert there["process"] != os.getpid()
    assert another_interpreter.call(cls(), "looked")["name"] == "", "one call changed another"


@pytest.mark.parametrize("seed", ["0", "1", "2"])
def test_its_seed_is_never_that_of_here(seed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SEED, seed)
    with AnotherInterpreter() as one, AnotherInterpreter() as again:
        found = one.call(Found(), "looked")["hash"]
        assert found == again.call(Found(), "looked")["hash"]
    monkeypatch.setenv(SEED, "2" if seed == "1" else "1")
    with AnotherInterpreter() as other:
        assert other.call(Found(), "looked")["hash"] != found


def test_what_cannot_be_called_there_says_why(another_interpreter: AnotherInterpreter) -> None:
    class Local(Found):
        pass

    with pytest.raises(NotThereError, match=r"Local is made inside of a function; move the class out"):
        another_interpreter.call(Local(), "looked")
    with pytest.raises(NotThereError, match="RuntimeError: there is nothing"):
        another_interpreter.call(Found(), "raises")
    with pytest.raises(NotThereError, match="pickle"):
        another_interpreter.call(Found(), "unsendable")
