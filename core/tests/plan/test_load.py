"""A config is class default < extends < file < override, and all that is wrong with it is said at once."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from whet.errors import ConfigError
from whet.plan.load import Loaded, load_config
from whet.plugins.registry import Registry

GOOD: dict[str, Any] = {
    "run": {"folder": "f", "steps": 1},
    "model": {"path": "m"},
    "algorithm": {"use": "loop", "size": 3},
    "backend": "trainer",
}


def write(path: Path, document: object) -> Path:
    path.write_text(document if isinstance(document, str) else yaml.safe_dump(document, sort_keys=False))
    return path


@pytest.fixture
def load(tmp_path: Path, offers: Registry) -> Any:
    def load_document(document: object, *overrides: str) -> Loaded:
        return load_config(write(tmp_path / "it.yaml", document), overrides, offers)

    return load_document


@pytest.fixture
def problems(load: Any) -> Any:
    def problems_of(document: object, *overrides: str) -> list[str]:
        with pytest.raises(ConfigError) as caught:
            load(document, *overrides)
        return caught.value.problems

    return problems_of


def merged(*changes: Mapping[str, Any]) -> dict[str, Any]:
    document = dict(GOOD)
    for change in changes:
        document.update(change)
    return document


def test_a_good_file_is_loaded(load: Any, tmp_path: Path) -> None:
    loaded = load(GOOD)
    assert loaded.config.run.steps == 1
    assert loaded.config.algorithm.config.size == 3
    assert loaded.document == GOOD


def test_installed_plugins_are_loaded_where_none_are_given(offers: Registry, tmp_path: Path) -> None:
    assert load_config(write(tmp_path / "it.yaml", GOOD)).config.backend.distribution == "whet-offers"


def test_a_mapping_is_a_config_whose_problems_have_no_line(offers: Registry, tmp_path: Path) -> None:
    given = {**merged(), "extends": str(write(tmp_path / "base.yaml", {"run": {"seed": 7}}))}
    given["run"] = {**given["run"], "folder": tmp_path / "run", "steps": np.int64(5)}
    loaded = load_config(given, ["run.keep=3"], offers)
    assert type(loaded.config.run.steps) is int
    assert (loaded.config.run.folder, loaded.config.run.keep, loaded.config.run.seed) == (str(tmp_path / "run"), 3, 7)
    assert "extends" in given
    with pytest.raises(ConfigError, match=r"^<config>: run\.stepps: unknown key"):
        load_config({**merged(), "run": {"folder": "runs/it", "stepps": 3}}, [], offers)
    with pytest.raises(ConfigError, match=r"^<config>: run\.keep: wanted a mapping, .* found \{1\}"):
        load_config({**merged(), "run": {"keep": {1}}}, [], offers)
    with pytest.raises(ConfigError, match=r"^<config>: extends: there is no file 'gone.yaml'"):
        load_config({"extends": "gone.yaml"}, [], offers)


@pytest.mark.parametrize("source", [None, 5])
def test_a_source_that_is_no_config_is_refused(offers: Registry, source: Any) -> None:
    with pytest.raises(ConfigError, match=r"^wanted the path of a config file or a mapping of its sections, found "):
        load_config(source, (), offers)


def test_precedence_is_default_extends_file_override(load: Any, tmp_path: Path) -> None:
    write(tmp_path / "oldest.yaml", {"run": {"seed": 1, "keep": 1, "save_every": 1, "steps": 9}})
    write(tmp_path / "base.yaml", {"extends": "oldest.yaml", "run": {"keep": 3, "save_every": 3}})
    run = load({**GOOD, "extends": "base.yaml"}, "run.save_every=4").config.run
    assert (run.export, run.seed, run.keep, run.steps, run.save_every) == (True, 1, 3, 1, 4)


def test_extends_is_relative_to_the_file_that_says_it(load: Any, tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    write(tmp_path / "a" / "b" / "one.yaml", {"run": {"seed": 5}})
    write(tmp_path / "a" / "two.yaml", {"extends": "b/one.yaml"})
    assert load({**GOOD, "extends": "a/two.yaml"}).config.run.seed == 5


def test_another_component_starts_afresh_and_the_same_one_is_extended(load: Any, tmp_path: Path) -> None:
    write(tmp_path / "base.yaml", merged({"loggers": ["paper"], "backend": {"use": "trainer", "optimizer": {"lr": 1}}}))
    document = {"extends": "base.yaml", "algorithm": {"loss": {"low": 1}}, "loggers": ["screen"]}
    config = load(document).config
    assert (config.algorithm.config.size, config.algorithm.config.loss.config.low) == (3, 1.0)
    assert [logger.name for logger in config.loggers] == ["screen"]
    with pytest.raises(ConfigError) as caught:
        load({"extends": "base.yaml", "backend": {"use": "traner"}})
    assert len(caught.value.problems) == 1


@pytest.mark.parametrize(
    ("document", "problem"),
    [
        ({"extends": "none.yaml"}, "extends: there is no file"),
        ({"extends": 3}, "extends: wanted the path of a config file, found the number 3"),
        ({"extends": "it.yaml"}, "extends: the files extend each other in a circle: "),
        ({"extends": "circle.yaml"}, "extends: the files extend each other in a circle: "),
        ({"extends": "list.yaml"}, "wanted a mapping of sections"),
        ({"extends": "bad.yaml"}, "bad.yaml:1:"),
        ({"extends": "a\0b"}, "extends: "),
        ([1], "wanted a mapping of sections such as `run:`, found a list"),
        ("a: [", "it.yaml:1:5"),
    ],
)
def test_a_file_that_cannot_be_used_is_one_problem(problems: Any, tmp_path: Path, document: Any, problem: str) -> None:
    write(tmp_path / "circle.yaml", {"extends": "it.yaml"})
    write(tmp_path / "list.yaml", [1])
    write(tmp_path / "bad.yaml", "a: {")
    found = problems(document)
    assert len(found) == 1
    assert problem in found[0]


def test_an_empty_file_lacks_four_sections(problems: Any) -> None:
    named = [line.split(": ")[:2] for line in problems("")]
    assert [(Path(file).name, key) for file, key in named] == [
        ("it.yaml", key) for key in ("run", "model", "algorithm", "backend")
    ]


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no file '.*none.yaml'"):
        load_config(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path)


def test_overrides_are_yaml_at_a_path(load: Any) -> None:
    config = load(
        merged({"environments": [{"use": "sums"}, "sums"], "loggers": ["paper"]}),
        "algorithm.loss.low=1e-3", "algorithm.loss=clip", "algorithm.loss.high=.5", "backend.optimizer={lr: 2}",
        "environments.1.terms=7", "environments.0.weight=2", "loggers=[screen, paper]", "run.folder=a=b", "data=",
        "rollout.stop=[x]",
    ).config  # fmt: skip
    assert (config.algorithm.config.loss.config.low, config.algorithm.config.loss.config.high) == (0.2, 0.5)
    assert config.backend.config.optimizer.lr == 2.0
    assert (config.environments[1].component.config.terms, config.environments[0].weight) == (7, 2.0)
    assert [logger.name for logger in config.loggers] == ["screen", "paper"]
    assert (config.run.folder, config.data, config.rollout.stop) == ("a=b", None, ["x"])


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("run.stesp=3", "run.stesp: unknown key (did you mean 'steps'?)"),
        ("algorithm.loss.lo=3", "algorithm.loss.lo: unknown key (did you mean 'low'?)"),
        ("rum.steps=3", "rum: unknown key (did you mean 'run'?)"),
        ("run.steps=x", "run.steps: wanted an integer, found the text 'x'"),
        ("run.epochs=3", "run.epochs: is 3, and run.steps is 1; state one of the two"),
        ("run.steps.x=3", "run.steps.x: run.steps is the number 1 and has no keys"),
        ("run.steps", "the override 'run.steps' is not of the form key.path=value"),
        ("=3", "the override '=3' is not of the form key.path=value"),
        (["run.steps=3"], "an override is a text key.path=value, found a list; unpack a list by *"),
        ({"run": {"steps": 3}}, "an override is a text key.path=value, found a mapping"),
        ("run..steps=3", "the override 'run..steps=3' is not of the form key.path=value"),
        ("run.steps=[", "the override 'run.steps=[':1:2: "),
        ("run.steps={a: 1, a: 2}", "the override 'run.steps={a: 1, a: 2}':1: the key 'a' is given twice"),
        ("loggers.1.use=3", "loggers.1: loggers is a list; wanted an index from 0 to 0 (0: screen), found '1'"),
        ("loggers.x=3", "loggers.x: loggers is a list; wanted an index from 0 to 0 (0: screen), found 'x'"),
        ("plugins.0=3", "plugins.0: plugins is a list; wanted none, for it is empty, found '0'"),
        ("environments.0.weight=3", "environments.0: the file has no list at environments; give it whole"),
        ("a.b.0=3", "a.b.0: the file has no list at a.b; give it whole, a.b=[...], or a.b={0: ...} if it is a mapping"),
    ],
)
def test_a_wrong_override_is_named_like_a_wrong_key(problems: Any, override: Any, problem: str) -> None:
    found = problems(merged({"loggers": ["screen"], "plugins": []}), override)
    assert len(found) == 1
    assert found[0].startswith(problem if problem.startswith(("the ov", "an ov")) else f"command line: {problem}")


TEN = """
run: {folder: runs/x, stesp: 200, seed: "8", resume: atuo}
model: {path: 3}
algorithm: {use: loop, loss: {low: -1}}
backend: {use: traner}
rollout: {temperature: hot}
loggers: [{use: screen}, {use: paper, colour: red}]
evaluation: {every: 1, every: 2}
extra: 1
"""


def test_a_file_with_ten_mistakes_gives_ten_lines(problems: Any) -> None:
    found = problems(TEN, "rollout.max_tokens=1.5")
    assert len(found) == 11  # ten in the file and one in the override
    assert not any("\n" in line for line in found)
    for part in ("'every' is given twice", "extra: unknown key", "run.stesp: unknown key (did you mean 'steps'?)",
                 "run.seed: wanted an integer", "run.resume: wanted one of", "rollout.max_tokens: wanted an integer",
                 "model.path: wanted text", "algorithm.loss.low: must be >= 0", "(did you mean 'trainer'?)",
                 "rollout.temperature: wanted a number", "loggers.1.colour: unknown key"):  # fmt: skip
        assert sum(part in line for line in found) == 1, part


PLUGIN = """
from attrs import frozen
from whet import hookimpl
from whet.component import Component, Problem

@frozen
class Config:
    depth: int = 1

@hookimpl
def whet_environments():
    return [Component("mine", Config, f"{__name__}:Config")]

@hookimpl
def whet_check_config(config):
    if config.run.steps > 5:
        yield Problem("run.steps", "must be at most 5 with mine")
"""


def test_a_single_file_is_a_plugin_relative_to_the_file_that_names_it(load: Any, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "mine.py").write_text(PLUGIN)
    write(tmp_path / "sub" / "base.yaml", {"plugins": ["./mine.py"]})
    loaded = load({**GOOD, "extends": "sub/base.yaml", "environments": [{"use": "mine", "depth": 2}]})
    chosen = loaded.config.environments[0].component
    assert chosen.config.depth == 2
    assert chosen.component.target == f"file:{tmp_path}/sub/mine.py:Config"
    assert loaded.config.plugins == [f"{tmp_path}/sub/mine.py"]


def test_problems_that_only_a_plugin_sees_come_last(problems: Any, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(PLUGIN)
    document = merged({"plugins": ["mine.py"]})
    assert problems(document, "run.steps=9") == ["command line: run.steps: must be at most 5 with mine"]
    assert len(problems(document, "run.steps=9", "run.seed=x")) == 1


def test_a_file_that_is_no_working_plugin_is_a_problem(problems: Any, tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("1 / 0")
    found = problems(merged({"plugins": ["bad.py", "none.py", 3]}))
    assert len(found) == 3
    assert "ZeroDivisionError" in found[0]
    assert "it.yaml:12: plugins.1: there is no file" in found[1]
    assert found[2].endswith("it.yaml:13: plugins.2: wanted text, found the number 3")


WORDS = ["run", "steps", "use", "loop", "loss", "algorithm", "0", "extends", "plugins", "x", "environments", "loggers"]
keys = st.sampled_from(WORDS) | st.text(max_size=3)
values = st.recursive(
    keys | st.none() | st.booleans() | st.integers() | st.floats(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=4),
    max_leaves=15,
)
paths = st.lists(keys, min_size=1, max_size=4).map(".".join)
assignments = st.tuples(paths, st.sampled_from(WORDS) | st.text(max_size=6)).map("=".join) | st.text(max_size=8)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(keys, values, max_size=4) | values, st.lists(assignments, max_size=3))
def test_garbage_raises_nothing_but_config_errors(load: Any, document: Any, overrides: list[str]) -> None:
    with pytest.raises(ConfigError):
        load(document, *overrides)


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("run.steps=0", "run.steps: must be >= 1: 0"),
        ("run.folder=''", "run.folder: "),
        ('run.folder="a\\nb"', "run.folder: is 'a\\nb', wanted the path of a folder without line breaks"),
        (f"run.folder={'x' * 300}", "run.folder: wanted a path whose names have at most 255 bytes"),
        (f"run.folder={'x/' * 3000}", "run.folder: wanted a path of at most 4000 bytes"),
        ("run.folder=~nobody-here/x", "run.folder: wanted a path whose first part is the home of a user"),
        ("rollout.max_staleness=-1", "rollout.max_staleness: must be >= 0: -1"),
        ("rollout.temperature=0", "rollout.temperature: must be > 0: 0"),
        ("rollout.stop=['']", "rollout.stop.0: "),
        ("rollout.retries=-1", "rollout.retries: must be >= 0: -1"),
        ("cluster.deadlines.train=1.0e+30", "cluster.deadlines.train: must be <= 1000000.0: 1e+30"),
        ("rollout.temperature=.nan", "rollout.temperature: wanted a finite number, found nan"),
        ("run.seed=-1", "run.seed: must be >= 0: -1"),
        ("run.steps=1000000000000000000000", "run.steps: wanted an integer of at most 64 bits, found one of 70"),
        ('run.folder="a\\ud800"', "run.folder: wanted text without half of a character (a surrogate), found the text"),
        ('run.folder="a\\0b"', "run.folder: wanted text without a NUL character, found the text 'a\\x00b'"),
        ("cluster.threads={backend: 0}", "cluster.threads.backend: must be >= 1: 0"),
        ("evaluation.pass_at=[1, 0]", "evaluation.pass_at.1: must be >= 1: 0"),
        ("evaluation.top_p=0", "evaluation.top_p: must be > 0: 0"),
        ("evaluation.environments.0.samples=0", "evaluation.environments.0.samples: must be >= 1: 0"),
        ("evaluation.environments.0.limit=-1", "evaluation.environments.0.limit: must be >= 0: -1"),
        ("evaluation.environments.0.name=../x", "evaluation.environments.0.name: is '../x', wanted a word"),
        ("cluster.deadlines.train=0", "cluster.deadlines.train: must be > 0: 0"),
        ("cluster.deadlines.train=.inf", "cluster.deadlines.train: wanted a finite number, found inf"),
    ],
)
def test_values_that_no_run_can_have_are_refused(problems: Any, override: str, problem: str) -> None:
    (found,) = problems(merged({"evaluation": {"environments": [{"use": "sums"}]}}), override)
    assert found.startswith(f"command line: {problem}")


BASE = """\
run: {folder: f, steps: 1}
model:
  path: m
  dtype: float16
shared: &shared
  low: -1
"""
PLACES = """\
extends: base.yaml
algorithm:
  use: loop
  size: x
  loss:
    <<: {low: -1}
backend:
  use: trainer
  optimizer:
    lr: fast
loggers:
  - screen
  - use: paper

    colour: red
environments: [{use: sums,
  terms: many}]
"a.b": 1
"""


def test_a_problem_has_the_file_and_line_of_its_key(problems: Any, tmp_path: Path) -> None:
    write(tmp_path / "base.yaml", BASE)
    found = problems(PLACES, "run.seed=x", "algorithm.filters=[no]")
    found = [problem.replace(f"{tmp_path}/", "") for problem in found]
    wanted = [
        "base.yaml:5: shared: unknown key",
        "it.yaml:18: 'a.b': unknown key",
        "command line: run.seed: wanted an integer, found the text 'x'",
        "base.yaml:4: model.dtype: wanted one of",
        "it.yaml:4: algorithm.size: wanted an integer, found the text 'x'",
        "command line: algorithm.filters.0.use: there is no filter 'no'",
        "it.yaml:6: algorithm.loss.low: must be >= 0: -1.0",
        "it.yaml:10: backend.optimizer.lr: wanted a number, found the text 'fast'",
        "it.yaml:15: loggers.1.colour: unknown key",
        "it.yaml:17: environments.0.terms: wanted an integer, found the text 'many'",
    ]
    assert len(found) == len(wanted)
    assert all(any(line.startswith(begin) for line in found) for begin in wanted), found


@pytest.mark.parametrize(
    ("change", "overrides", "problem"),
    [
        ({"data": {}}, (), "it.yaml:10: data.train: missing"),
        ({"rollout": {"stop": ["a"]}}, ("rollout.stop.0=3",), "command line: rollout.stop.0: wanted text"),
        ({"run": {"folder": "f"}}, (), "it.yaml:1: run: states neither `steps` nor `epochs`"),
        ({}, ("rollout={max_token: 3}",), "command line: rollout.max_token: unknown key"),
        ({"rollout": {"max_token": 3}}, ("rollout.order=fifo",), "it.yaml:11: rollout.max_token: unknown key"),
        ({"algorithm": {"use": "loop", "loss": {"low": -1}}}, ("algorithm.loss=clap",), "command line: algorithm.loss"),
        ({"roles": {"critic": {"like": "backend", "optimiser": 1}}}, (), "it.yaml:13: roles.critic.optimiser: unknown"),
        ({"run": {"folder": "f", "epochs": 1, "steps": 1}}, (), "it.yaml:3: run.epochs: is 1, and run.steps is 1"),
    ],
)
def test_a_problem_of_a_key_that_nobody_wrote_has_the_line_of_its_section(
    problems: Any, change: dict[str, Any], overrides: tuple[str, ...], problem: str
) -> None:
    (found,) = problems(merged(change), *overrides)
    assert found.rpartition("/")[2].startswith(problem) or found.startswith(problem)


def test_old_keys_are_read_in_the_config_that_a_run_wrote_and_refused_in_any_other(
    offers: Registry, tmp_path: Path
) -> None:
    file = write(tmp_path / "config.yaml", merged({"refit": {}, "cluster": {"share": [], "transport": "tcp"}}))
    with pytest.raises(ConfigError, match="refit: was renamed; write weight_sync"):
        load_config(file, (), offers)
    (tmp_path / "identity.json").write_text("{}")
    cluster = load_config(file, (), offers).config.cluster
    assert (cluster.colocate, cluster.transport) == ([], "shared-memory")
    assert load_config(file, ["cluster.colocate=[[backend, generator]]"], offers).config.cluster.colocate
    with pytest.raises(ConfigError, match=r"command line: cluster\.share: was renamed; write colocate"):
        load_config(file, ["cluster.share=[[backend, generator]]"], offers)
    with pytest.raises(ConfigError, match="refit: was renamed; write weight_sync"):
        load_config(write(tmp_path / "other.yaml", file.read_text()), (), offers)
