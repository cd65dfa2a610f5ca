"""Components are built on the driver and, without any plugin loaded, in another process."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import attrs
import pytest

from whet.component import Spec
from whet.config.build import build, build_selection, to_spec
from whet.config.sections import Config, EnvironmentSection
from whet.config.structure import structure
from whet.errors import ConfigError, PluginError
from whet.plugins.registry import Registry

DOCUMENT = {
    "run": {"folder": "f", "steps": 1}, "model": {"path": "m"}, "backend": "trainer", "environments": ["sums"],
    "algorithm": {"use": "loop", "size": 3, "loss": {"low": 1}, "filters": ["not-flat"]},
}  # fmt: skip


def test_a_selection_is_built_with_its_config_first(offers: Registry) -> None:
    chosen = structure(DOCUMENT, Config, offers).backend
    assert build_selection(chosen, "site") == (chosen.config, "site")


def test_a_component_that_cannot_be_built_is_named(offers: Registry, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def made(config): raise OSError('no server')")
    chosen = structure(DOCUMENT, Config, offers).backend
    chosen = attrs.evolve(chosen, component=attrs.evolve(chosen.component, target=f"file:{tmp_path / 'own.py'}:made"))
    with pytest.raises(
        PluginError, match=r"backend 'trainer' cannot be built: OSError: no server \(.*own.py:1"
    ) as caught:
        build_selection(chosen)
    assert isinstance(caught.value.__cause__, OSError)
    with pytest.raises(PluginError, match="backend 'trainer' cannot be built: TypeError: made"):
        build_selection(chosen, "more")


def test_a_spec_is_builtins_and_builds_the_same(offers: Registry) -> None:
    chosen = structure(DOCUMENT, Config, offers).algorithm
    spec = to_spec(chosen)
    spec = Spec(**json.loads(json.dumps(attrs.asdict(spec))))
    config, extra = build(spec, 7)
    assert config == chosen.config
    assert config.loss.config.low == 1.0
    assert extra == 7


def test_a_spec_without_a_config_type_passes_its_config_on() -> None:
    assert build(Spec("builtins:dict", "", {"a": 1})) == {"a": 1}
    with pytest.raises(PluginError, match="builtins:print returned None; it must return what it builds"):
        build(Spec("builtins:print", "", {}))


def test_a_spec_that_does_not_fit_is_refused(offers: Registry) -> None:
    spec = to_spec(structure(DOCUMENT, Config, offers).backend)
    with pytest.raises(ConfigError, match="optimizer: wanted a mapping"):
        build(attrs.evolve(spec, config={"optimizer": 3}))
    with pytest.raises(PluginError, match="cannot be imported"):
        build(attrs.evolve(spec, target="no_such_module:x"))


FILE = """
from attrs import frozen
from whet import hookimpl
from whet.component import Component

@frozen
class Config:
    greeting: str = "hello"

class Mine:
    def __init__(self, config, name):
        self.words = f"{config.greeting} {name}"

@hookimpl
def whet_environments():
    return [Component("mine", Config, f"{__name__}:Mine")]
"""


def test_a_component_of_a_single_file_is_built_in_another_process(site: Path, tmp_path: Path) -> None:
    (tmp_path / "my_env.py").write_text(FILE)
    registry = Registry()
    registry.load_file(tmp_path / "my_env.py")
    section: Any = structure({"use": "mine", "greeting": "good day"}, EnvironmentSection, registry)
    spec = json.dumps(attrs.asdict(to_spec(section.component)))
    code = (
        "import json, sys; from whet.component import Spec; from whet.config.build import build;"
        "print(build(Spec(**json.loads(sys.argv[1])), 'you').words)"
    )
    done = subprocess.run([sys.executable, "-c", code, spec], capture_output=True, text=True, check=True)
    assert done.stdout == "good day you\n"
