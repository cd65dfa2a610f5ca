"""What is not installed and who offers it, by a small catalog."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import whet.plugins.catalog
from whet.errors import ConfigError, PluginError
from whet.plan.load import load_config
from whet.plugins.registry import load_plugins

CATALOG = {
    "distributions": {"whet-far": "Far away.", "whet-offers": "Installed.", "whet-bad": "Broken."},
    "components": {
        "losses": {"hinge": "whet-far", "clip": "whet-offers", "square": "whet-bad"},
        "algorithms": {"spiral": "whet-far", "loop": "whet-offers", "newer": "whet-offers"},
        "generators": {"fast": "whet-far"},
    },
    "recipes": {"spiral-small": "whet-far"},
    "commands": {"shine": "whet-far", "polish": "whet-tool"},
    "features": {},
    "bundles": {
        "one": ["whet-far", "whet-other"],
        "two": ["whet-far", "whet-other", "whet-third"],
        "more": ["a", "b", "c", "whet-tool"],
    },
}


@pytest.fixture(autouse=True)
def small_catalog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    file = tmp_path / "catalog.json"
    file.write_text(json.dumps(CATALOG))
    monkeypatch.setattr(whet.plugins.catalog, "FILE", file)
    whet.plugins.catalog.catalog.cache_clear()
    yield
    whet.plugins.catalog.catalog.cache_clear()


def refusal(find: Callable[[], object]) -> str:
    with pytest.raises(PluginError) as caught:
        find()
    return str(caught.value)


def test_a_name_that_is_not_installed_leads_to_the_distribution_that_offers_it(offers: Any) -> None:
    said = refusal(lambda: offers.find("algorithms", "spiral"))
    assert said == "there is no algorithm 'spiral'; it is offered by whet-far: pip install whet-far"


def test_a_name_almost_right_leads_there_where_nothing_installed_is_as_near(offers: Any) -> None:
    said = refusal(lambda: offers.find("algorithms", "spirall"))
    assert "(did you mean 'spiral'? it is offered by whet-far: pip install whet-far)" in said
    assert refusal(lambda: offers.find("losses", "clipp")) == "there is no loss 'clipp' (did you mean 'clip'?)"


def test_who_is_installed_is_not_to_be_installed(offers: Any, install: Any) -> None:
    install("whet-bad", {"bad_hooks": "1 / 0"})
    registry = load_plugins()
    for kind, name in (("losses", "square"), ("algorithms", "newer")):
        said = refusal(lambda kind=kind, name=name: registry.find(kind, name))  # type: ignore[misc]
        assert "pip install" not in said
        assert "not usable, and might offer it: whet-bad" in said


def test_where_nothing_of_a_kind_is_installed_the_distributions_that_offer_it_are_named(offers: Any) -> None:
    said = refusal(lambda: offers.find("generators", "unheard-of"))
    assert said.endswith("; no plugin that offers a generator is installed; there are: whet-far")


def test_a_config_that_lacks_several_ends_with_one_command_for_all(offers: Any, tmp_path: Path) -> None:
    document = {"run": {"folder": "r", "steps": 1}, "model": {"path": "m"}, "algorithm": "spiral", "backend": "trainer"}
    path = tmp_path / "it.yaml"
    path.write_text(yaml.safe_dump({**document, "generator": {"use": "fast"}}))
    with pytest.raises(ConfigError) as caught:
        load_config(path, registry=offers)
    assert len(caught.value.problems) == 2
    assert caught.value.remedy == "", "one distribution offers both, and each line names it"
    CATALOG["components"]["generators"]["fast"] = "whet-other"  # type: ignore[index]
    try:
        whet.plugins.catalog.FILE.write_text(json.dumps(CATALOG))
        whet.plugins.catalog.catalog.cache_clear()
        with pytest.raises(ConfigError) as caught:
            load_config(path, registry=load_plugins())
        assert caught.value.remedy == "all that is not installed: pip install 'whet[one]'"
    finally:
        CATALOG["components"]["generators"]["fast"] = "whet-far"  # type: ignore[index]


@pytest.mark.parametrize(
    ("wanted", "command"),
    [
        (["whet-far", "whet-other"], "pip install 'whet[one]'"),
        (["whet-far", "whet-third"], "pip install 'whet[two]'"),
        (["whet-far"], "pip install 'whet[one]'"),
        (["a", "b"], "pip install 'whet[more]'"),
        (["a"], "pip install a"),
        (["whet-far", "whet-absent"], "pip install whet-far whet-absent"),
    ],
)
def test_a_bundle_is_named_where_it_brings_at_most_one_more(wanted: list[str], command: str) -> None:
    assert whet.plugins.catalog.catalog().command(wanted) == command
