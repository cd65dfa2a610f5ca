"""What every plugin must keep whose generator runs a foreign engine, whether that is installed or not.

class TestPlugin(EngineContract):
    hooks = "my_plugin.hooks"
    engine = ENGINE
    arguments = staticmethod(engine_arguments)
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
import pytest

from whet.component import Facts, resolve
from whet.foreign import CPU_CACHE_GIB, ForeignEngine
from whet.testing.contracts.component import MODEL, ComponentContract
from whet.testing.site import make_site


class EngineContract(ComponentContract):
    """Inherit and name the hooks, the engine, and what makes its arguments."""

    engine: ForeignEngine
    arguments: Callable[..., Mapping[str, Any]]
    """Called with config, site and device."""

    def generator(self, **settings: Any) -> Any:
        """Give a config of the plugin's generator."""
        ((_, component),) = self.components()
        return component.config(**settings)

    def facts(self, **settings: Any) -> Facts:
        """Ask for the facts of its generator, with a model of `float32`."""
        ((_, component),) = self.components()
        found = resolve(component.facts)(self.generator(**settings), MODEL)
        assert isinstance(found, Facts)
        return found

    @pytest.mark.parametrize(
        "wrong",
        [{"max_batch": 0}, {"cache_gib": 0.0}, {"memory_fraction": 1.5}, {"tensor_parallel": 0}, {"max_context": -1}],
        ids=lambda wrong: next(iter(wrong)),
    )
    def test_settings_that_leave_no_room_are_refused(self, wrong: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match=next(iter(wrong))):
            self.generator(**wrong)

    def test_memory_is_that_of_weights_and_cache(self) -> None:
        cache = int(CPU_CACHE_GIB * 2**30)
        assert self.facts().memory_bytes == 4 * MODEL.parameters + cache
        assert self.facts(dtype="bfloat16", cache_gib=0.5).memory_bytes == 2 * MODEL.parameters + 2**29

    def test_the_engine_is_among_what_its_workers_stand_on(self) -> None:
        assert self.engine.package in self.facts().packages
        assert self.engine.package.install

    def test_where_an_argument_is_set_there_is_such_a_key(self) -> None:
        keys = {field.name for field in attrs.fields(type(self.generator()))}
        named = {where.partition(".")[2] for where in self.engine.ours.values() if where.startswith("generator.")}
        assert named <= keys

    def test_all_that_it_sets_or_forbids_are_arguments_of_the_installed_engine(
        self, tmp_path: Path, tiny_model_folder: Path
    ) -> None:
        if not self.engine.is_here:
            pytest.skip(f"{self.engine.package.name} is not installed")
        site = make_site(tmp_path, "generator", tiny_model_folder)
        ours = {name for device in ("cpu", "cuda") for name in self.arguments(self.generator(), site, device)}
        assert ours | set(self.engine.ours) | set(self.engine.fixed) <= self.engine.known()
