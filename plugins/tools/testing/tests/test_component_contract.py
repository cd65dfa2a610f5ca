"""The contract of hook modules holds for a good plugin, and each rule catches one that breaks it."""

import sys
import textwrap
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from whet.errors import PluginError
from whet_testing.contracts.component import ComponentContract

GOOD = """
    from attrs import frozen
    from whet import hookimpl
    from whet.component import Component, Facts

    @frozen
    class Config:
        path: str
        '''Where.'''
        often: int = 3
        '''How often.'''

    class Thing:
        def __init__(self, config):
            self.config = config

    def facts(config, model):
        return Facts(notes=(f"{config.path} {model.vocab_size}",))

    @hookimpl
    def whet_loggers():
        return [Component("good-one", Config, "MODULE:Thing", "MODULE:facts")]
"""


@pytest.fixture
def contract(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ComponentContract]:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    made = ComponentContract()
    made.hooks = f"plugin_{tmp_path.name}"
    made.documents = {"good-one": {"path": "x"}}
    write(made, tmp_path, "", "")
    yield made
    sys.modules.pop(made.hooks, None)


def write(contract: ComponentContract, folder: Path, old: str, new: str) -> None:
    assert not old or old in GOOD
    source = textwrap.dedent(GOOD.replace(old, new) if old else GOOD).replace("MODULE", contract.hooks)
    (folder / f"{contract.hooks}.py").write_text(source)


RULES = [name for name in dir(ComponentContract) if name.startswith("test_")]


@pytest.mark.parametrize("rule", RULES)
def test_a_good_plugin_keeps(rule: str, contract: ComponentContract) -> None:
    getattr(contract, rule)()


MUTANTS = [
    ("from whet import hookimpl", "import torch; from whet import hookimpl",
     "test_the_hooks_and_facts_import_nothing_heavy"),
    ("    return Facts(", "    import torch; return Facts(", "test_the_hooks_and_facts_import_nothing_heavy"),
    ("return [Component(", "import torch; return [Component(", "test_the_hooks_and_facts_import_nothing_heavy"),
    ("def whet_loggers", "def whet_loggerz", "test_every_hook_is_one_that_whet_knows"),
    ("    @hookimpl\n", "", "test_every_hook_is_one_that_whet_knows"),
    ("return [Component(", "return ['x'] + [Component(", "test_what_it_offers_are_components"),
    ("good-one", "Good_One", "test_names_are_lower_case_with_dashes"),
    ("good-one", "good--one", "test_names_are_lower_case_with_dashes"),
    ("MODULE:facts\")]", "MODULE:facts\")] * 2", "test_no_name_is_offered_twice"),
    ("import frozen", "import define as frozen", "test_configs_are_frozen_attrs_classes"),
    ("        '''How often.'''\n", "", "test_every_field_of_a_config_is_documented_beneath_it"),
    ("often: int = 3", "often: object = object()", "test_configs_go_to_a_worker_and_arrive_as_they_were"),
    ("often", "use", "test_keys_of_a_config_are_free"),
    ("MODULE:Thing", "MODULE:Think", "test_targets_can_be_imported_and_called"),
    ("return Facts(", "return dict(", "test_facts_are_facts"),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "rule"), MUTANTS, ids=[new.strip() or "unmarked" for _, new, _ in MUTANTS])
def test_the_contract_catches(contract: ComponentContract, tmp_path: Path, old: str, new: str, rule: str) -> None:
    write(contract, tmp_path, old, new)
    with pytest.raises(Exception):  # noqa: B017  pluggy, whet and the assertions all have their own
        getattr(contract, rule)()


def test_the_contract_names_a_hook_that_is_async(contract: ComponentContract, tmp_path: Path) -> None:
    write(contract, tmp_path, "def whet_loggers", "async def whet_loggers")
    with pytest.raises(PluginError, match=r"hook whet_loggers is `async def`.*write `def`"):
        contract.test_every_hook_is_one_that_whet_knows()


@pytest.mark.parametrize(
    ("kind", "key", "section"),
    [
        *(
            ("environments", key, "EnvironmentSection")
            for key in ("name", "split", "weight", "samples", "limit", "pass_at")
        ),
        ("backends", "like", "RoleSection"),
        ("backends", "model", "RoleSection"),
        ("loggers", "weight", ""),
        ("environments", "component", ""),
    ],
)
def test_a_key_of_a_section_is_no_key_of_a_component(
    contract: ComponentContract, tmp_path: Path, kind: str, key: str, section: str
) -> None:
    contract.hooks += f"_{kind}_{key}"
    source = textwrap.dedent(GOOD).replace("MODULE", contract.hooks)
    (tmp_path / f"{contract.hooks}.py").write_text(source.replace("often", key).replace("loggers", kind))
    words = rf"Config\.{key} of the component good-one can never be set: .* `{key}` of {section} in whet; rename"
    with pytest.raises(AssertionError, match=words) if section else nullcontext():
        contract.test_keys_of_a_config_are_free()


LOSS = """
    from attrs import frozen
    from whet import hookimpl
    from whet.component import Component, LossFacts

    @frozen
    class Config:
        pass

    class Thing:
        outputs, columns = ("logprobs", "entropy"), ("advantages",)

        def __init__(self, config):
            pass

    def facts(config, model):
        return LossFacts(outputs_needed=frozenset({"logprobs", "entropy"}), columns_read=frozenset({"advantages"}))

    @hookimpl
    def whet_losses():
        return [Component("it", Config, "MODULE:Thing", "MODULE:facts")]
"""


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("", "", ""),
        (', "entropy"})', "})", r"outputs_needed \['logprobs'\], and the loss has outputs \['entropy', 'logprobs'\]"),
        ('("advantages",)', '("advantages", "reward")', r"columns_read \['advantages'\], and the loss has columns"),
        (', "MODULE:facts"', "", r"outputs_needed \[\], and the loss has outputs"),
    ],
)
def test_facts_of_a_loss_must_be_those_of_its_class(
    contract: ComponentContract, tmp_path: Path, old: str, new: str, message: str
) -> None:
    contract.hooks += "_loss"
    source = textwrap.dedent(LOSS.replace(old, new) if old else LOSS).replace("MODULE", contract.hooks)
    (tmp_path / f"{contract.hooks}.py").write_text(source)
    with pytest.raises(AssertionError, match=message) if message else nullcontext():
        contract.test_facts_of_a_loss_are_those_of_its_class()
