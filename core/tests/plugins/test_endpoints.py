"""Endpoints are opened by the plugin that offers them; where none does, the error says what to install."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from attrs import fields

import whet.plugins.catalog
from whet.config.sections import EndpointSection
from whet.data.records import Sampling
from whet.errors import ConfigError, PluginError
from whet.plan.load import load_config
from whet.plugins.endpoints import InstalledEndpoints, missing_endpoints
from whet.plugins.registry import load_plugins
from whet_testing.fakes import ByteChat

PLUGIN = """
from whet import hookimpl

@hookimpl
def whet_endpoints():
    return [__name__ + ":Made"]

class Made:
    def __init__(self, section, extras):
        self.section, self.extras = section, extras

    def open(self, sequence, chat, sampling, ignore):
        return self, sequence, tuple(ignore)

    def serve(self, *arguments, **options):
        return self, arguments, options
"""


@pytest.fixture(autouse=True)
def small_catalog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    file = tmp_path / "catalog.json"
    empty: dict[str, Any] = {field.name: {} for field in fields(whet.plugins.catalog.Catalog)}
    file.write_text(json.dumps({**empty, "features": {"endpoint": "whet-door"}}))
    monkeypatch.setattr(whet.plugins.catalog, "FILE", file)
    whet.plugins.catalog.catalog.cache_clear()
    yield
    whet.plugins.catalog.catalog.cache_clear()


def opened(endpoints: InstalledEndpoints, sequence: Any = "sequence") -> Any:
    return endpoints.open(sequence, ByteChat(), Sampling(), ["seed"])


def test_without_a_plugin_the_error_names_the_package(site: Path) -> None:
    with pytest.raises(PluginError, match=r"^an endpoint of the model needs a plugin; pip install whet-door$"):
        opened(InstalledEndpoints())
    with pytest.raises(PluginError, match="pip install whet-door"):
        InstalledEndpoints().serve("generator")  # type: ignore[arg-type]


def test_a_config_that_serves_without_a_plugin_is_refused(offers: Any, tmp_path: Path) -> None:
    file = tmp_path / "it.yaml"
    file.write_text("""
run: {folder: there, steps: 1}
model: {path: here}
algorithm: loop
backend: trainer
endpoint: {serve: true}
""")
    with pytest.raises(ConfigError) as caught:
        load_config(file, registry=offers)
    assert str(caught.value) == f"{file}:6: endpoint.serve: is true; pip install whet-door"
    assert not load_config(file, ["endpoint.serve=false"], offers).config.endpoint.serve


def test_the_plugin_is_built_once_with_the_section_of_the_config(site: Path, install: Any) -> None:
    install("whet-door", {"door_hooks": PLUGIN})
    section = EndpointSection(port=8080)
    endpoints = InstalledEndpoints(section, extras=frozenset({"likeliest"}))
    (one, sequence, ignore), (other, *_) = opened(endpoints), opened(endpoints)
    assert (sequence, ignore) == ("sequence", ("seed",))
    assert one is other
    assert (one.section, one.extras) == (section, {"likeliest"})
    served: Any = endpoints.serve("generator", max_context=3)  # type: ignore[arg-type]
    assert served == (one, ("generator",), {"max_context": 3})


def test_two_plugins_that_offer_endpoints_are_both_named(site: Path, install: Any) -> None:
    install("whet-door", {"door_hooks": PLUGIN})
    install("whet-window", {"window_hooks": PLUGIN})
    wanted = "endpoints are offered by whet-door and whet-window; remove all but one of them"
    assert missing_endpoints(load_plugins()) == wanted
    with pytest.raises(PluginError, match=wanted):
        opened(InstalledEndpoints())


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("1 / 0", "ZeroDivisionError"),
        ("from whet import hookimpl\n@hookimpl\ndef whet_endpoints(): return 'a:b'", "wanted an iterable of str"),
        ("from whet import hookimpl\n@hookimpl\ndef whet_endpoints(): return [3]", "gave 3, wanted a str"),
    ],
)
def test_an_installed_plugin_that_is_broken_is_quoted_and_not_to_be_installed(
    site: Path, install: Any, source: str, reason: str
) -> None:
    install("whet-door", {"door_hooks": source})
    found = missing_endpoints(load_plugins())
    assert "whet-door (plugin 'door_hooks')" in found
    assert reason in found
    assert "pip install" not in found


def test_nothing_is_looked_for_before_an_endpoint_is_opened(site: Path, install: Any) -> None:
    install("whet-door", {"door_hooks": PLUGIN.replace('":Made"', '":Missing"')})
    endpoints = InstalledEndpoints()
    with pytest.raises(PluginError, match="Missing"):
        opened(endpoints)
