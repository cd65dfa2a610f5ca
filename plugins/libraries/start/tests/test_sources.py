"""Every value of a loaded config knows where it comes from."""

import importlib
from collections.abc import Callable
from pathlib import Path

import pytest

from whet.config.structure import unstructure
from whet.errors import ConfigError
from whet.plan.load import load_config
from whet.plugins.registry import Registry
from whet_start.sources import Setting, explain, settings

BASE = """\
run: {folder: runs/x, steps: 200, seed: 3}
algorithm:
  use: loop
  size: 4
  loss: clip
loggers: [paper, screen]
"""
IT = """\
extends: base.yaml
model: {path: m}
algorithm:
  size: 6

  loss:
    low: 1
backend: {use: trainer, optimizer: {lr: 1e-5}}
environments:
  - sums
  - use: sums
    name: more
    terms: 3
loggers:
  - screen
"""
Explain = Callable[..., Setting]


@pytest.fixture
def one(tmp_path: Path, offers: Registry, monkeypatch: pytest.MonkeyPatch) -> Explain:
    """Explain one key of the config above with overrides."""
    monkeypatch.chdir(tmp_path)
    Path("base.yaml").write_text(BASE)
    Path("it.yaml").write_text(IT)

    def explained(key: str, *overrides: str) -> Setting:
        (setting,) = explain(load_config("it.yaml", overrides, offers), key)
        return setting

    return explained


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("environments.more.terms", "environments.1.terms"),
        ("environments.more.use", "environments.1.use"),
        ("environments.0.use", "environments.0.use"),
        ("loggers.screen.use", "loggers.0.use"),
    ],
)
def test_an_item_of_a_list_is_meant_by_its_name_too(one: Explain, key: str, meant: str) -> None:
    assert one(key).key == meant


def test_a_name_that_two_items_have_means_neither(one: Explain) -> None:
    with pytest.raises(
        ConfigError, match=r"there is no key 'environments\.sums\.terms' \(did you mean 'environments\.0"
    ):
        one("environments.sums.terms")


@pytest.mark.parametrize(
    ("key", "overrides", "value", "origins"),
    [
        ("run.seed", (), 3, ["base.yaml:1", "default"]),
        ("run.steps", (), 200, ["base.yaml:1", "default"]),
        ("run.keep", (), 2, ["default"]),
        ("algorithm.size", (), 6, ["it.yaml:4", "base.yaml:4", "default"]),
        (
            "algorithm.size",
            ("algorithm.size=7", "algorithm.size=9"),
            9,
            ["the override 'algorithm.size=9'", "the override 'algorithm.size=7'", "it.yaml:4",
             "base.yaml:4", "default"],
        ),
        ("algorithm.loss.use", (), "clip", ["base.yaml:5", "default"]),
        ("algorithm.loss.low", (), 1.0, ["it.yaml:7", "default"]),
        ("algorithm.loss.low", ("algorithm.loss=clip",), 0.2, ["default"]),
        (
            "algorithm.loss.low", ("algorithm.loss={low: 2}",), 2.0,
            ["the override 'algorithm.loss={low: 2}'", "it.yaml:7", "default"],
        ),
        ("backend.optimizer.lr", (), 1e-5, ["it.yaml:8", "default"]),
        ("environments.0.use", (), "sums", ["it.yaml:10"]),
        ("environments.1.terms", (), 3, ["it.yaml:13", "default"]),
        ("environments.0.terms", ("environments.0.terms=5",), 5, ["the override 'environments.0.terms=5'", "default"]),
        ("loggers.0.use", (), "screen", ["it.yaml:15", "base.yaml:6"]),
        ("data", (), None, ["default"]),
    ],
)  # fmt: skip
def test_a_value_names_who_set_it_and_what_that_replaced(one, key, overrides, value, origins) -> None:
    found = one(key, *overrides)
    assert found.value == value
    assert [str(origin) for origin in found.origins] == origins


def test_a_key_says_what_it_means_and_may_be(one: Explain) -> None:
    found = one("algorithm.loss.low")
    assert (found.type, found.allowed, found.doc) == ("a number", "at least 0", "How far down.")
    assert found.owner == "`clip` of whet-offers"
    assert one("cluster.deadlines.train").allowed == "more than 0, at most 1000000.0"
    assert one("run.steps").owner == "the section `run`"
    assert one("rollout.stop").allowed == "each item not empty"


def test_a_component_that_was_replaced_says_nothing_of_the_keys_of_its_successor(one, tmp_path: Path) -> None:
    Path("it.yaml").write_text(IT.replace("extends: base", "extends: mid").replace("    low: 1\n", "    use: clip\n"))
    Path("mid.yaml").write_text("extends: base.yaml\nalgorithm: {loss: {use: other, low: 0.5}}\n")
    assert [str(origin) for origin in one("algorithm.loss.low").origins] == ["default"]


def test_every_value_of_the_config_is_listed_once(one: Explain, offers: Registry) -> None:
    loaded = load_config("it.yaml", ["cluster.ranks={backend: 2}"], offers)
    found = {setting.key: setting.value for setting in settings(loaded)}
    assert len(found) == len(settings(loaded))
    assert found["cluster.ranks"] == {"backend": 2}
    for key, value in found.items():
        whole = unstructure(loaded.config)
        for part in key.split("."):
            whole = whole[int(part)] if isinstance(whole, list) else whole[part]
        assert whole == value, key


def test_keys_merged_in_by_an_anchor_have_the_line_of_the_anchor(one: Explain) -> None:
    Path("it.yaml").write_text("x: &x\n  seed: 5\n  keep: 1\nrun:\n  <<: *x\n  keep: 4\n")
    from whet.config.document import read_file

    document = read_file(Path("it.yaml"))
    assert [document.line(("run", key)) for key in ("seed", "keep", "gone")] == [2, 6, 4]


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("size", "there is no key 'size' (did you mean 'algorithm.size'?)"),
        ("algorithm.loss.lo", "there is no key 'algorithm.loss.lo' (did you mean 'algorithm.loss.low'?)"),
        ("rollot.max_tokens", "there is no key 'rollot.max_tokens' (did you mean 'rollout.max_tokens' or "),
        ("xyz", "there is no key 'xyz'; known: run, model, algorithm, "),
        ("data.train", "data is null in this config; `whet schema data` says what it can hold"),
        ("evaluation.environments.0.samples", "evaluation.environments is empty in this config"),
        ("run.steps.x", "run.steps is a plain value in this config"),
    ],
)
def test_an_unknown_key_gives_the_nearest(one: Explain, key: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        one(key)
    assert message in str(caught.value)


def test_the_path_that_it_had_in_core_leads_here_with_a_warning() -> None:
    with pytest.warns(DeprecationWarning, match=r"whet\.plan\.sources has moved to whet_start\.sources"):
        old = importlib.import_module("whet.plan.sources")
    assert old.explain is explain
