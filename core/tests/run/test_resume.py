"""What decides a run's numbers is part of its fingerprint, and nothing else is."""

import shutil
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from attrs import evolve, field, frozen

from whet.component import Component, Selection
from whet.config.renamed import renewed
from whet.config.sections import Config, DataFile, DataSection, ModelSection, RunSection
from whet.data.model_info import read_model
from whet.data.records import Task
from whet.errors import CheckpointError, PluginError
from whet.interfaces.environment import SingleTurn
from whet.plugins.features import chats, reader
from whet.rollout.routing import Route
from whet.run.checkpoint import differences
from whet.run.resume import _tasks, refuse_another, run_fingerprint


@frozen
class Plain:
    """A component without settings."""


def chosen(kind: Any) -> Selection:
    return Selection(kind, Component("x", Plain, "x:Y"), Plain())


@pytest.fixture
def fingerprint(tiny_model_folder: Path) -> Any:
    def identify(*files: Path, max_length: int = 0, folder: str = "runs/x") -> dict[str, Any]:
        section = DataSection([DataFile(str(file)) for file in files], max_length=max_length)
        config = Config(
            RunSection(folder, 10), ModelSection(str(tiny_model_folder)), algorithm=chosen("algorithms"),
            backend=chosen("backends"), data=section,
        )  # fmt: skip
        tokenizer = chats().ChatTokenizer(tiny_model_folder)
        data = reader().open(
            section, tokenizer, 0, 0, lambda text: None, encode=None, names={}, epochs=None, timed=nullcontext
        )
        return run_fingerprint(config, read_model(tiny_model_folder), data, [], {})

    return identify


def test_files_may_move_but_not_change(fingerprint: Any, tmp_path: Path) -> None:
    here, there, other = tmp_path / "a.jsonl", tmp_path / "b.jsonl", tmp_path / "c.jsonl"
    here.write_text('{"text": "one"}\n')
    there.write_text('{"text": "one"}\n')
    other.write_text('{"text": "two"}\n')
    assert fingerprint(here, folder="runs/y") == fingerprint(there)
    assert fingerprint(here) != fingerprint(other)
    assert fingerprint(here, there) != fingerprint(here)
    assert fingerprint(here, max_length=8) != fingerprint(here)


def test_a_run_of_a_version_that_did_not_know_a_key_goes_on_with_its_default(
    fingerprint: Any, tiny_model_folder: Path
) -> None:
    now = fingerprint()
    before = {**now, "rollout": {k: v for k, v in now["rollout"].items() if k != "max_staleness"}}
    config = Config(
        RunSection("runs/x", 10), ModelSection(str(tiny_model_folder)), algorithm=chosen("algorithms"),
        backend=chosen("backends"),
    )  # fmt: skip
    refuse_another("x", before, now, config)
    later = {**now, "rollout": {**now["rollout"], "max_staleness": 1}}
    for rollout, saved in ((evolve(config.rollout, max_staleness=1), before), (config.rollout, later)):
        current = {**now, "rollout": {**now["rollout"], "max_staleness": rollout.max_staleness}}
        with pytest.raises(CheckpointError, match=r"rollout\.max_staleness: the run has "):
            refuse_another("x", saved, current, evolve(config, rollout=rollout))


def test_how_ranks_share_the_work_may_change() -> None:
    config: Any = SimpleNamespace(roles={"critic": None}, run=SimpleNamespace(allow_changed=[]))
    critic = {"lr": 1, "parallel": {"tensor": 2}}
    before = {"backend": {"lr": 1, "parallel": {"tensor": 1}}, "roles": {"critic": critic}}
    refuse_another("x", before, {"backend": {"lr": 1, "parallel": {}}, "roles": {"critic": {"lr": 1}}}, config)
    with pytest.raises(CheckpointError, match=r"backend\.lr"):
        refuse_another("x", before, {"backend": {"lr": 2}, "roles": {"critic": {"lr": 1}}}, config)


@frozen
class WithTeacher:
    """A component that reads a further model."""

    teacher: str = field(metadata={"path": True})


def test_a_model_that_a_component_reads_may_move_but_not_change(tmp_path: Path, tiny_model_folder: Path) -> None:
    def identify(teacher: str) -> dict[str, Any]:
        backend = Selection("backends", Component("x", WithTeacher, "x:Y"), WithTeacher(teacher))
        config = Config(
            RunSection("runs/x", 10), ModelSection(str(tiny_model_folder)), algorithm=chosen("algorithms"),
            backend=backend,
        )  # fmt: skip
        return run_fingerprint(config, read_model(tiny_model_folder), None, [], {})

    moved, other = (shutil.copytree(tiny_model_folder, tmp_path / name) for name in ("moved", "other"))
    with (other / "config.json").open("a") as file:
        file.write(" ")
    assert identify(str(moved)) == identify(str(tiny_model_folder))
    assert identify(str(other)) != identify(str(moved))
    assert identify("owner/one") != identify("owner/other")


def test_a_run_of_an_earlier_version_is_the_same_under_its_old_keys(fingerprint: Any, tiny_model_folder: Path) -> None:
    now = fingerprint()
    before = {**now, "rollout": {**now["rollout"], "order": "admission", "running": "keep"}}
    del before["rollout"]["on_weight_update"]
    config = Config(
        RunSection("runs/x", 10), ModelSection(str(tiny_model_folder)), algorithm=chosen("algorithms"),
        backend=chosen("backends"),
    )  # fmt: skip
    assert differences(renewed(before, config), now, []) == [
        "rollout.on_weight_update: the run has 'continue', the config gives 'drain'"
    ]


def of_tasks(*tasks: Any) -> Route:
    return Route("sums", SingleTurn({"train": list(tasks)}, {}), "train")


class Grader:
    """An object without a `repr` of its own."""


def test_the_address_of_an_object_in_the_data_of_tasks_does_not_matter() -> None:
    kept = Grader()
    assert _tasks(of_tasks(Task("?", {"grader": kept}))) == _tasks(of_tasks(Task("?", {"grader": Grader()})))
    assert _tasks(of_tasks(Task("?", {"grader": kept}))) != _tasks(of_tasks(Task("!", {"grader": kept})))


def test_the_order_of_sets_and_of_keys_in_the_data_of_tasks_does_not_matter() -> None:
    words = [f"word {i}" for i in range(9)]
    one, other = (of_tasks(Task("?", {"in": {"all": set(w)}, 1: [frozenset(w)]})) for w in (words, words[::-1]))
    assert _tasks(one) == _tasks(other)
    assert _tasks(one) != _tasks(of_tasks(Task("?", {"in": {"all": set(words[1:])}, 1: [frozenset(words)]})))


@pytest.mark.parametrize("odd", ["text", Task("?", None), Task("?", id=7)], ids=["text", "data", "id"])  # type: ignore[arg-type]
def test_a_later_task_that_is_none_is_named(odd: Any) -> None:
    with pytest.raises(PluginError, match=r"task 2 of environment 'sums' is .*, wanted Task\(prompt\)"):
        _tasks(of_tasks(Task("a"), Task("b"), odd))
