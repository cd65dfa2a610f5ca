"""A launcher is found by its name, and one that is not there is told with what to install."""

import pytest
from attrs import evolve

from whet.config.sections import ClusterSection
from whet.errors import PluginError
from whet.plugins import launchers
from whet.plugins.catalog import catalog


@pytest.fixture
def none_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launchers, "found", dict)
    monkeypatch.setattr(launchers, "catalog", lambda: evolve(catalog(), features={"launcher-far": "a-plugin"}))
    launchers.launching.cache_clear()


def test_one_that_the_catalog_knows_is_told_with_what_to_install(none_installed: None) -> None:
    section = ClusterSection("far")
    (problem,) = launchers.missing_launcher(section)
    assert str(problem) == "cluster.launcher: is far; pip install a-plugin"
    with pytest.raises(PluginError, match=r"cluster\.launcher is far; pip install a-plugin"):
        launchers.launching("far")
    assert launchers.address(section) == ""


def test_one_that_nothing_would_use_need_not_be_there(none_installed: None) -> None:
    assert launchers.missing_launcher(ClusterSection("far", workers="inline")) == []
    assert launchers.missing_launcher(ClusterSection("local")) == []


@pytest.mark.parametrize("workers", ["process", "inline"])
def test_a_misspelt_one_is_refused_with_the_nearest(none_installed: None, workers: str) -> None:
    (problem,) = launchers.missing_launcher(ClusterSection("fra", workers=workers))  # type: ignore[arg-type]
    assert str(problem).startswith("cluster.launcher: is 'fra', and there is no such launcher")
    assert "far" in str(problem)
