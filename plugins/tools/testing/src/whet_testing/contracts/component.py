"""The rules that the hook module of every plugin must keep.

    class TestPlugin(ComponentContract):
        hooks = "my_plugin.hooks"
        documents = {"needs-a-path": {"path": "x"}}

`documents` holds the settings of components that cannot be built from defaults, as a recipe would set them.
"""

import functools
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest

from whet.component import FACTS, KINDS, Component, Kind, LossFacts, Selection, WorkerFacts, resolve
from whet.config.build import to_spec
from whet.config.sections import EnvironmentSection, RoleSection
from whet.config.structure import structure
from whet.data.model_info import ModelInfo
from whet.plugins.registry import Registry, load_plugins, new_manager, register
from whet_testing.field_docs import undocumented_fields

HEAVY = (
    "torch", "ray", "transformers", "vllm", "sglang", "megatron", "datasets", "matplotlib", "math_verify", "sympy",
    "pandas", "wandb", "mlflow", "tensorboard", "deepspeed", "accelerate", "peft",
)  # fmt: skip
MODEL = ModelInfo(
    "made-up",
    {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 384,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 192,
        "max_position_embeddings": 256,
    },
)
"""The `config.json` of a small model, as an argument of facts."""
SECTIONS: Mapping[Kind, Sequence[type]] = {"environments": (EnvironmentSection,), "backends": (RoleSection,)}
"""Sections of a config in which the keys of a component stand beside keys of whet."""
LIGHT = """
import importlib, json, sys
from whet.component import KINDS, resolve
from whet.config.structure import structure
from whet.plugins.registry import load_plugins
from whet_testing.contracts.component import HEAVY, MODEL
def check(when):
    found = sorted(set(HEAVY) & set(sys.modules))
    assert not found, f"{when} imported {', '.join(found)}"
check("whet itself")
hooks = importlib.import_module(sys.argv[1])
check(f"importing {sys.argv[1]}")
components = [c for kind in KINDS for c in getattr(hooks, f"whet_{kind}", lambda: [])()]
check("asking for components")
documents, registry = json.loads(sys.argv[2]), load_plugins()
check("loading the other plugins")
for component in components:
    if component.facts:
        facts = resolve(component.facts)
        check(f"importing the facts of {component.name}")
        facts(structure(documents.get(component.name, {}), component.config, registry), MODEL)
        check(f"asking for the facts of {component.name}")
"""
FORKED = """
import os, sys
from whet.runtime.worker_process import import_ahead
import_ahead(sys.argv[1:])
lost = [module for module in sys.argv[1:] if module not in sys.modules]
assert not lost, f"{', '.join(lost)} cannot be imported"
found = len(os.listdir("/proc/self/task"))
assert found == 1, f"importing {', '.join(sys.argv[1:])} started {found - 1} threads, which a fork would not copy"
torch = sys.modules.get("torch")
assert torch is None or not torch.cuda.is_initialized(), "importing them opened a device, which a fork cannot use"
"""


class ComponentContract:
    """Inherit this class and set `hooks`."""

    hooks: str = ""
    """Import path of the hook module, as in the entry point of the plugin."""
    documents: Mapping[str, Mapping[str, object]] = {}
    """Settings, by the name of the component, of components that cannot be built from defaults."""

    def module(self) -> Any:
        """Import the hook module, and return it."""
        return importlib.import_module(self.hooks)

    def components(self) -> list[tuple[Kind, Component]]:
        """Return (kind, component) of every component that the plugin offers."""
        hooks = [(kind, getattr(self.module(), f"whet_{kind}", None)) for kind in KINDS]
        return [(kind, component) for kind, hook in hooks if hook for component in hook()]

    def config(self, component: Component) -> Any:
        """Return a config of a component."""
        return structure(self.documents.get(component.name, {}), component.config, self._registry())

    @classmethod
    @functools.cache
    def _registry(cls) -> Registry:
        return load_plugins()

    def test_the_hooks_and_facts_import_nothing_heavy(self) -> None:
        command = [sys.executable, "-c", LIGHT, self.hooks, json.dumps(self.documents)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr.strip().rpartition("\n")[2]

    @pytest.mark.skipif(not sys.platform.startswith("linux"), reason="nothing is forked elsewhere")
    def test_what_is_forkable_imports_without_threads_and_devices(self) -> None:
        known = [(component, self.config(component)) for _, component in self.components() if component.facts]
        facts = [resolve(component.facts)(config, MODEL) for component, config in known]
        for found in [found for found in facts if isinstance(found, WorkerFacts) and found.forkable]:
            variables = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "2"}
            command = [sys.executable, "-c", FORKED, *found.imports]
            done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=variables)
            assert done.returncode == 0, done.stderr.strip().rpartition("\n")[2]

    def test_every_hook_is_one_that_whet_knows(self) -> None:
        register(new_manager(), self.module())

    def test_what_it_offers_are_components(self) -> None:
        for kind, component in self.components():
            assert isinstance(component, Component), f"whet_{kind} gave {component!r:.120}"

    def test_names_are_lower_case_with_dashes(self) -> None:
        for _, component in self.components():
            words = component.name.split("-")
            assert all(word.isalnum() and word == word.lower() for word in words), component.name

    def test_no_name_is_offered_twice(self) -> None:
        names = [(kind, component.name) for kind, component in self.components()]
        assert len(set(names)) == len(names)

    def test_configs_are_frozen_attrs_classes(self) -> None:
        for _, component in self.components():
            assert attrs.has(component.config), f"{component.config!r} is no attrs class"
            frozen = component.config.__setattr__ is not object.__setattr__
            assert frozen, f"{component.config.__name__} can be changed; write @frozen"

    def test_every_field_of_a_config_is_documented_beneath_it(self) -> None:
        for _, component in self.components():
            missing = undocumented_fields(component.config)
            assert not missing, f"{component.config.__name__} says nothing of {', '.join(missing)}"

    def test_keys_of_a_config_are_free(self) -> None:
        for kind, component in self.components():
            taken = {"use": "the key `use`"} | {
                field.alias: f"the key `{field.alias}` of {section.__name__}"
                for section in SECTIONS.get(kind, ())
                for field in attrs.fields(section)
                if not field.metadata.get("inline")
            }
            for field in attrs.fields(component.config):
                assert not field.init or field.alias not in taken, (
                    f"{component.config.__name__}.{field.name} of the component {component.name} can never be set: "
                    f"`{field.alias}:` in a recipe is {taken[field.alias]} in whet; rename the field"
                )

    def test_configs_go_to_a_worker_and_arrive_as_they_were(self) -> None:
        for kind, component in self.components():
            config = self.config(component)
            spec = to_spec(Selection(kind, component, config))
            there = structure(json.loads(json.dumps(spec.config)), resolve(spec.config_type), None)
            assert there == config, "builtins are all that travels"

    def test_targets_can_be_imported_and_called(self) -> None:
        for _, component in self.components():
            assert callable(resolve(component.target)), component.target

    def test_facts_are_facts(self) -> None:
        for kind, component in self.components():
            if component.facts:
                found, wanted = resolve(component.facts)(self.config(component), MODEL), FACTS[kind]
                assert isinstance(found, wanted), f"{component.facts} gave {found!r:.120}, wanted {wanted.__name__}"

    def test_facts_of_a_loss_are_those_of_its_class(self) -> None:
        for component in [component for kind, component in self.components() if kind == "losses"]:
            config = self.config(component)
            facts = resolve(component.facts)(config, MODEL) if component.facts else LossFacts()
            made = resolve(component.target)(config)
            for name, stated, has in (
                ("outputs_needed", facts.outputs_needed, made.outputs),
                ("columns_read", facts.columns_read, made.columns),
            ):
                attribute = {"outputs_needed": "outputs", "columns_read": "columns"}[name]
                assert set(stated) == set(has), (
                    f"the facts of {component.name} have {name} {sorted(stated)}, and the loss has {attribute} "
                    f"{sorted(has)}: planning believes the facts, and workers read the class"
                )

    def test_the_readme_shows_every_component(self) -> None:
        file = self.module().__file__
        assert file is not None
        readme = next((p / "README.md" for p in Path(file).parents[1:4] if (p / "README.md").exists()), None)
        if readme is None:  # an installed wheel has no README file
            return
        text = readme.read_text(encoding="utf-8")
        missing = [component.name for _, component in self.components() if component.name not in text]
        assert not missing, f"{readme} does not mention {', '.join(missing)}"
