"""Broken plugins are recorded and quoted, and harm nothing that does without them."""

import textwrap
from pathlib import Path
from typing import Any

import pytest
from attrs import frozen

import whet
from whet.component import Selection, resolve
from whet.config.sections import selection
from whet.config.structure import structure, unstructure
from whet.errors import PluginError
from whet.plugins.registry import Registry, load_plugins, new_manager, register

LOGGER = """
    from attrs import frozen
    from whet import hookimpl
    from whet.component import Component

    @frozen
    class Config:
        pass

    @hookimpl
    def whet_loggers():
        return [Component("{name}", Config, "{target}")]
"""


@frozen
class Holder:
    """A section with a component."""

    one: Selection = selection("loggers")
    """The logger."""


def logger(name: str, target: str = "some.module:Logger") -> str:
    return LOGGER.format(name=name, target=target)


def only_broken(registry: Registry) -> Any:
    assert len(registry.broken) == 1, registry.broken
    return registry.broken[0]


def test_an_installed_plugin_offers_its_components(install: Any) -> None:
    install("whet-good", {"good_hooks": logger("good")})
    registry = load_plugins()
    assert registry.broken == []
    assert registry.find("loggers", "good").distribution == "whet-good"
    assert list(registry.offers("loggers")) == ["good"]
    assert registry.offers("losses") == {}


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import no_such_module_at_all", "ModuleNotFoundError: No module named 'no_such_module_at_all'"),
        ("import sys\nsys.exit(3)", "SystemExit: 3"),
        ("def broken(:", "SyntaxError"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("from whet import hookimpl\n@hookimpl\ndef whet_loggers(wrong): return []", "whet_loggers"),
        ("from whet import hookimpl\n@hookimpl\ndef whet_logers(): return []", "did you mean 'whet_loggers'?"),
        ("def whet_loggers(): return []", "not marked with @whet.hookimpl"),
        (
            "from whet import hookimpl\n@hookimpl\ndef whet_run(algorithm, parts): return True",
            "its whet_run would replace that of core; write @hookimpl(wrapper=True) and yield",
        ),
        (
            "from whet import hookimpl\n@hookimpl\ndef whet_worker_group(group): return group",
            "would replace that of core",
        ),
        ("from whet import hookimpl\n@hookimpl\ndef whet_loggers(): return 3", "it gave 3, wanted an iterable"),
        ("from whet import hookimpl\n@hookimpl\ndef whet_loggers(): pass", "it gave None, wanted an iterable"),
        ("from whet import hookimpl\n@hookimpl\ndef whet_loggers(): return [3]", "gave 3, wanted a Component"),
        ("from whet import hookimpl\n@hookimpl\ndef whet_loggers(): raise KeyError('x')", "KeyError: 'x'"),
        ("from whet import hookimpl\n@hookimpl\ndef whet_loggers():\n    yield 1 / 0", "ZeroDivisionError"),
        (logger("Bad Name"), "not in lower case with dashes"),
        (logger("bad", target="nothing"), "wanted 'package.module:name'"),
        (logger("bad").replace("@frozen", ""), "wanted an attrs class"),
        (logger("bad").replace("pass", "use: int = 1"), "named `use`"),
    ],
)
def test_a_broken_plugin_is_recorded_quoted_and_harmless(install: Any, source: str, reason: str) -> None:
    install("whet-bad", {"bad_hooks": source})
    install("whet-good", {"good_hooks": logger("good")})
    registry = load_plugins()
    broken = only_broken(registry)
    assert (broken.name, broken.distribution) == ("bad_hooks", "whet-bad")
    assert reason in broken.reason
    assert "\n" not in broken.reason
    assert registry.find("loggers", "good").component.name == "good"
    with pytest.raises(PluginError, match="whet-bad") as caught:
        registry.find("loggers", "goood")
    assert "did you mean 'good'?" in str(caught.value)
    assert reason in str(caught.value)


def test_a_hook_of_another_kind_is_not_quoted(install: Any) -> None:
    install("whet-bad", {"bad_hooks": "from whet import hookimpl\n@hookimpl\ndef whet_losses(): return 3"})
    with pytest.raises(PluginError) as caught:
        load_plugins().find("loggers", "good")
    assert "whet-bad" not in str(caught.value)


def test_the_reason_names_the_line_in_the_plugin(install: Any) -> None:
    install("whet-bad", {"bad_hooks": "x = 1\ny = 2\nraise RuntimeError('no\\nluck')\n"})
    assert only_broken(load_plugins()).reason == "RuntimeError: no luck (site/bad_hooks.py, line 3)"


def test_good_hooks_of_a_plugin_with_a_bad_one_still_count(install: Any) -> None:
    source = (
        logger("good") + "\n    @hookimpl\n    def whet_losses():\n        return [Component('x', 3, 'a:b'), None]\n"
    )
    install("whet-half", {"half_hooks": source})
    registry = load_plugins()
    assert len(registry.broken) == 2
    assert registry.find("loggers", "good")


def test_a_name_offered_twice_names_both_distributions_when_it_is_asked_for(install: Any) -> None:
    install("whet-one", {"one_hooks": logger("same")})
    install("whet-two", {"two_hooks": logger("same")})
    install("whet-three", {"three_hooks": logger("other")})
    registry = load_plugins()
    assert registry.find("loggers", "other")
    assert list(registry.offers("loggers")) == ["other", "whet-one/same", "whet-two/same"]
    assert list(registry.contested("loggers")) == ["same"]
    with pytest.raises(PluginError, match="whet-one and whet-two; choose one by `use: whet-one/same` or `use: whet-tw"):
        registry.find("loggers", "same")
    assert registry.find("loggers", "Whet_Two/same").distribution == "whet-two"
    assert registry.find("loggers", "whet-three/other").component.name == "other"
    with pytest.raises(PluginError, match=r"no logger 'whet-tow/same' \(did you mean 'whet-two/same'\?\)"):
        registry.find("loggers", "whet-tow/same")
    held = structure({"one": "whet-two/same"}, Holder, registry)
    assert (held.one.name, held.one.distribution) == ("same", "whet-two")
    assert unstructure(held) == {"one": {"use": "whet-two/same"}}


def test_a_single_file_is_named_by_its_file(install: Any, tmp_path: Path) -> None:
    install("whet-one", {"one_hooks": logger("same")})
    (tmp_path / "mine.py").write_text(textwrap.dedent(logger("same")))
    registry = load_plugins()
    registry.load_file(tmp_path / "mine.py")
    assert registry.find("loggers", "mine/same").distribution == str(tmp_path / "mine.py")
    assert registry.find("loggers", "whet-one/same").distribution == "whet-one"


@pytest.mark.parametrize("requires", ["whet>=99", "whet<0.0.1", "whet==3.*; python_version > '3'"])
def test_a_plugin_for_another_core_is_not_imported(install: Any, requires: str) -> None:
    install("whet-other", {"other_hooks": "raise RuntimeError('imported')"}, requires=requires)
    reason = only_broken(load_plugins()).reason
    assert "made for whet" in reason
    assert whet.__version__ in reason


@pytest.mark.parametrize("requires", ["whet", "whet>=0.0.1", "whet==99; python_version < '3'", "whetstone>=99"])
def test_a_plugin_for_this_core_is_loaded(install: Any, requires: str) -> None:
    install("whet-this", {"this_hooks": logger("this")}, requires=requires)
    assert load_plugins().broken == []


def test_metadata_that_cannot_be_read_harms_no_other_plugin(install: Any) -> None:
    install("whet-this", {"this_hooks": logger("this")})
    info = install("whet-mad", {"mad_hooks": logger("mad")})
    (info / "entry_points.txt").write_text("[whet]\nthis is no entry point\n")
    registry = load_plugins()
    assert only_broken(registry).distribution == "whet-mad"
    assert registry.find("loggers", "this")


def test_a_hook_that_nobody_would_await_is_refused(install: Any) -> None:
    step = "@hookimpl\nasync def whet_step_finished(step, metrics):\n    pass\n"
    install("whet-odd", {"odd_hooks": f"from whet import hookimpl\n{step}"})
    reason = only_broken(load_plugins()).reason
    assert "its hook whet_step_finished is `async def`, and nobody would await it; write `def`" in reason


def test_a_plugin_with_a_hook_that_is_not_known_is_called_by_no_other_hook(install: Any) -> None:
    step = "@hookimpl\ndef whet_step_finished(step, metrics):\n    raise RuntimeError('called')\n"
    install(
        "whet-odd",
        {"odd_hooks": f"from whet import hookimpl\n{step}@hookimpl\ndef whet_step_finishes(step):\n    pass"},
    )
    install("whet-good", {"good_hooks": logger("good")})
    registry = load_plugins()
    assert "whet has no hook 'whet_step_finishes' (did you mean 'whet_step_finished'?)" in only_broken(registry).reason
    assert registry.manager.hook.whet_step_finished(step=1, metrics={}) == []
    assert [source.name for source in registry.sources] == ["good_hooks"]


def test_a_config_check_that_fails_is_recorded_and_the_others_are_asked(install: Any) -> None:
    check = "from whet import hookimpl\nfrom whet.component import Problem\n@hookimpl\ndef whet_check_config(config):\n"
    install("whet-bad", {"bad_hooks": f"{check}    return config.nothing"})
    install("whet-mute", {"mute_hooks": f"{check}    pass"})
    install("whet-good", {"good_hooks": f"{check}    return [Problem('run.steps', 'too few')]"})
    registry = load_plugins()
    problems = registry.problems(object())  # type: ignore[arg-type]
    assert [str(problem) for problem in problems] == ["run.steps: too few"]
    assert "whet_check_config failed: AttributeError" in only_broken(registry).reason


def test_a_single_file_is_a_plugin_whose_targets_workers_can_import(site: Path, tmp_path: Path) -> None:
    file = tmp_path / "my-env.py"
    source = textwrap.dedent(logger("mine", target="my-env:Mine"))
    file.write_text(source + "\nclass Mine:\n    class Inner: pass\n")
    registry = load_plugins()
    registry.load_file(file)
    assert registry.broken == []
    offer = registry.find("loggers", "mine")
    assert offer.distribution == str(file)
    assert offer.component.target == f"file:{file}:Mine"
    assert resolve(offer.component.target).__name__ == "Mine"
    assert resolve(f"file:{file}:Mine.Inner").__name__ == "Inner"
    registry.load_file(file)
    assert registry.contested("loggers") == {}


@pytest.mark.parametrize(
    ("target", "facts", "fault"),
    [
        (":Mine", "", ""),
        (":build", "", "its logger 'mine' has the target 'build', which the file does not define"),
        (":Mine", ":facts", "its logger 'mine' has the facts 'facts', which the file does not define"),
        ("elsewhere:build", "", ""),
    ],
)
def test_a_single_file_must_define_what_its_components_name(
    site: Path, tmp_path: Path, target: str, facts: str, fault: str
) -> None:
    source = textwrap.dedent(logger("mine", target=f'{target}", "{facts}'))
    (tmp_path / "mine.py").write_text(f"{source}\nclass Mine: pass\n")
    registry = load_plugins()
    registry.load_file(tmp_path / "mine.py")
    assert [broken.reason for broken in registry.broken] == [fault] * bool(fault)


def test_a_broken_single_file_is_recorded(site: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("1 / 0")
    registry = load_plugins()
    for name in ("bad.py", "missing.py"):
        registry.load_file(tmp_path / name)
    assert [broken.reason.partition(":")[0] for broken in registry.broken] == ["ZeroDivisionError", "FileNotFoundError"]


def test_registries_share_nothing(install: Any) -> None:
    install("whet-good", {"good_hooks": logger("good")})
    one, two = load_plugins(), Registry()
    assert one.manager is not two.manager
    assert two.offers("loggers") == {}


def test_an_object_with_hooks_that_would_replace_training_is_refused_by_its_name() -> None:
    class Replacing:
        @whet.hookimpl
        def whet_run(self, algorithm: Any) -> bool:
            return True

    class Wrapping:
        @whet.hookimpl(wrapper=True)
        def whet_run(self) -> Any:
            return (yield)

    with pytest.raises(PluginError, match="the hook 'fast' of whet-fast: its whet_run would replace that of core"):
        register(new_manager(), Replacing(), whose="the hook 'fast' of whet-fast: its")
    register(new_manager(), Wrapping())


def test_an_object_with_a_hook_that_is_not_marked_is_refused_by_its_name() -> None:
    class Unmarked:
        def whet_step_finished(self, step: int, metrics: Any) -> None: ...

    words = "the hook 'fast' of whet-fast: its function whet_step_finished is not marked with @whet.hookimpl"
    with pytest.raises(PluginError, match=words):
        register(new_manager(), Unmarked(), whose="the hook 'fast' of whet-fast: its")


class Late:
    @whet.hookimpl
    def whet_check_config(self, config: Any) -> Any:
        return ()


class Mistaken:
    @whet.hookimpl
    def whet_step_finished(self, metric: Any) -> None: ...


class Static:
    @staticmethod
    def whet_step_finished(step: int) -> None: ...


class OfClass:
    @classmethod
    def whet_step_finished(cls, step: int) -> None: ...


class Idle:
    def step_finished(self, step: int) -> None: ...


@pytest.mark.parametrize(
    ("hooks", "words"),
    [(Static, "its function whet_step_finished is not marked with @whet.hookimpl"),
     (OfClass, "its function whet_step_finished is not marked with @whet.hookimpl"),
     (Idle, "its class Idle has no function marked with @whet.hookimpl"),
     (Late, "its whet_check_config is never called: plugins are asked before a run builds the object"),
     (Mistaken, r"its hook 'whet_step_finished': Argument\(s\) {'metric'} are declared")],
)  # fmt: skip
def test_an_object_whose_hook_cannot_be_called_is_refused_by_its_name(hooks: Any, words: str) -> None:
    manager = new_manager()
    with pytest.raises(PluginError, match=f"the hook 'fast' of whet-fast: {words}"):
        register(manager, hooks(), whose="the hook 'fast' of whet-fast: its")
    assert not any(isinstance(plugin, hooks) for plugin in manager.get_plugins())


def test_a_plugin_that_offers_a_name_twice_is_asked_to_rename_one(install: Any) -> None:
    install("whet-twice", {"twice_hooks": logger("same").replace("return [", "return 2 * [")})
    with pytest.raises(PluginError, match=r"^the logger 'same' is offered by whet-twice twice; rename one of the two$"):
        load_plugins().find("loggers", "same")


def test_of_two_files_with_one_name_and_one_component_one_must_be_renamed(tmp_path: Path) -> None:
    registry = Registry()
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "own.py").write_text(textwrap.dedent(logger("same")))
        registry.load_file(tmp_path / folder / "own.py")
    with pytest.raises(PluginError, match=r"a/own\.py and .*b/own\.py; rename one of these files"):
        registry.find("loggers", "same")
