"""The contract of a launcher, through the entry point by which core finds it."""

import importlib.metadata
import inspect
import sys

import pytest

from whet.config.sections import ClusterSection
from whet.interfaces.launcher import Launching
from whet.plugins.launchers import address, launching, missing
from whet.plugins.registry import load_plugins
from whet_testing.contracts.component import ComponentContract


class TestPlugin(ComponentContract):
    hooks = "whet_ray.hooks"


def test_core_finds_it_by_its_name() -> None:
    assert missing("ray") == ""
    assert not load_plugins().broken


@pytest.mark.parametrize("method", ["address", "examine", "cluster"])
def test_its_methods_take_what_core_gives(method: str) -> None:
    wanted = list(inspect.signature(getattr(Launching, method)).parameters.values())[1:]
    found = inspect.signature(getattr(launching("ray"), method)).parameters.values()
    assert [(each.name, each.kind) for each in found] == [(each.name, each.kind) for each in wanted]


def test_it_knows_which_cluster_a_run_joins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    assert address(ClusterSection("ray")) == "head:6379"
    assert address(ClusterSection("ray", "local")) == ""
    assert address(ClusterSection("local")) == ""


@pytest.mark.parametrize("head_address", ["127.0.0.1:1", "a..b:6379"])
def test_a_doctor_is_told_which_ray_there_is_and_whether_the_head_answers(head_address: str) -> None:
    (version,) = launching("ray").examine(ClusterSection("ray", "local"))
    assert version.status == "ok"
    head, _ = launching("ray").examine(ClusterSection("ray", head_address))
    assert head.status == "fail"
    assert f"nobody answers at {head_address}" in head.found
    assert "correct cluster.address" in head.change


def test_a_doctor_names_what_names_a_head_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    head, _ = launching("ray").examine(ClusterSection("ray"))
    assert "correct RAY_ADDRESS or unset it; with cluster.address: local it is ignored" in head.change


@pytest.mark.parametrize("address", ["local", "auto"])
def test_a_doctor_is_told_that_ray_is_missing(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", missing)
    (found,) = launching("ray").examine(ClusterSection("ray", address))
    assert (found.status, found.change) == ("fail", "pip install ray")
    assert "ray, which whet-ray needs, is not installed" in found.found


def test_paths_of_before_still_lead_to_it() -> None:
    from whet_ray.cluster import RayCluster

    sys.modules.pop("whet.runtime.ray", None)  # another test may have imported it
    with pytest.warns(DeprecationWarning, match=r"whet\.runtime\.ray has moved to whet_ray\.cluster"):
        assert importlib.import_module("whet.runtime.ray").RayCluster is RayCluster
