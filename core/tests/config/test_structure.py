"""Structuring is strict, names every problem with its path, and is undone by unstructuring."""

import enum
import json
import math
import re
from pathlib import Path
from typing import Any, Literal

import attrs
import pytest
from attrs import field, frozen, validators
from hypothesis import given
from hypothesis import strategies as st

from whet.component import Selection
from whet.config.sections import (
    Config,
    DataFile,
    DataSection,
    EnvironmentSection,
    EvaluationSection,
    ModelSection,
    RecordSection,
    RecoverySection,
    selection,
)
from whet.config.structure import absolute, structure, unstructure
from whet.errors import ConfigError
from whet.plugins.registry import Registry


@pytest.mark.parametrize(
    ("section", "value", "off"),
    [
        (RecordSection, False, "{every: 0}"),
        (RecoverySection, "off", "{enabled: false}"),
        (EvaluationSection, None, "{environments: []}"),
    ],
)
def test_switching_a_section_off_is_answered_with_how(section: type, value: object, off: str) -> None:
    with pytest.raises(ConfigError, match=f"wanted a mapping, found .*; to switch it off: {re.escape(off)}$"):
        structure(value, section, None)
    with pytest.raises(ConfigError, match=r"wanted a mapping, found true$"):
        structure(True, section, None)


def test_a_text_in_the_place_of_a_section_with_a_path_is_answered_with_how() -> None:
    with pytest.raises(ConfigError, match=r"wanted a mapping, found the text 'a\.json'; write \{path: a\.json\}$"):
        structure("a.json", DataFile, None)


def test_paths_are_made_absolute_where_something_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model").mkdir()
    found = [unstructure(ModelSection(path), path=absolute)["path"] for path in ("model", "./model", "owner/model")]
    assert found == [f"{tmp_path}/model", f"{tmp_path}/model", "owner/model"]
    assert unstructure(ModelSection("model"))["path"] == "model"
    assert absolute("") == ""
    assert absolute({"train": "model", "test": "b"}) == {"train": f"{tmp_path}/model", "test": "b"}


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


@frozen
class Inner:
    weight: float = field(default=1.0, validator=validators.ge(0))
    label: str = "x"


@frozen
class Outer:
    number: int = 1
    share: float = 0.5
    word: str = "w"
    flag: bool = False
    mode: Literal["auto", "never", 3] = "auto"
    maybe: int | None = None
    either: int | str = 1
    words: list[str] = field(factory=list)
    fixed: tuple[int, str] = (1, "a")
    many: tuple[int, ...] = ()
    named: dict[str, int] = field(factory=dict)
    free: dict[str, Any] = field(factory=dict)
    anything: object = None
    inner: Inner = field(factory=Inner)
    inners: list[Inner] = field(factory=list)
    by_name: dict[str, Inner] = field(factory=dict)
    maybe_inner: Inner | None = None
    colour: Colour = Colour.RED
    place: Path = Path("here")
    unique: frozenset[str] = frozenset()


def problems(document: object, cls: type = Outer, registry: Registry | None = None) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        structure(document, cls, registry)
    return caught.value.problems


def problems_if_any(document: object, cls: type, registry: Registry) -> list[str]:
    try:
        structure(document, cls, registry)
    except ConfigError as error:
        return error.problems
    return []


def test_a_good_document_is_taken_as_it_is() -> None:
    document = {
        "number": 3, "share": 2, "word": "v", "flag": True, "mode": 3, "maybe": None, "either": "e", "words": ["a"],
        "fixed": [1, "b"], "many": [1, 2], "named": {"a": 1}, "free": {"a": [1, {"b": None}]}, "anything": [1],
        "inner": {"weight": 2}, "inners": [{}, {"label": "y"}], "by_name": {"n": {}}, "maybe_inner": {},
        "colour": "blue", "place": "there", "unique": ["a", "a"],
    }  # fmt: skip
    made = structure(document, Outer, None)
    assert made == Outer(
        3, 2.0, "v", True, 3, None, "e", ["a"], (1, "b"), (1, 2), {"a": 1}, {"a": [1, {"b": None}]}, [1], Inner(2.0),
        [Inner(), Inner(label="y")], {"n": Inner()}, Inner(), Colour.BLUE, Path("there"), frozenset({"a"}),
    )  # fmt: skip
    assert isinstance(made.share, float)
    assert isinstance(made.inner.weight, float)
    assert structure({}, Outer, None) == Outer()


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("number", True, "wanted an integer, found true"),
        ("number", "8", "wanted an integer, found the text '8'"),
        ("number", 1.0, "wanted an integer, found the number 1.0"),
        ("number", None, "wanted an integer, found null"),
        ("share", "0.5", "wanted a number, found the text '0.5'"),
        ("share", False, "wanted a number, found false"),
        ("share", math.nan, "wanted a finite number, found nan"),
        ("share", 10**400, "wanted a number, found an integer that is too large"),
        ("word", 8, "wanted text, found the number 8"),
        ("word", ["a"], "wanted text, found a list"),
        ("flag", 1, "wanted true or false, found the number 1"),
        ("flag", "yes", "wanted true or false, found the text 'yes'"),
        ("mode", "atuo", "wanted one of 'auto', 'never', 3, found the text 'atuo' (did you mean 'auto'?)"),
        ("mode", 3.0, "wanted one of 'auto', 'never', 3, found the number 3.0"),
        ("mode", [], "wanted one of 'auto', 'never', 3, found a list"),
        ("maybe", "3", "wanted an integer, found the text '3'"),
        ("either", 1.5, "wanted an integer or text, found the number 1.5"),
        ("words", "abc", "wanted a list of text, found the text 'abc'"),
        ("words", {"a": 1}, "wanted a list of text, found a mapping"),
        ("fixed", [1], "wanted 2 items, found 1"),
        ("named", [1], "wanted a mapping of text to an integer, found a list"),
        ("inner", 3, "wanted a mapping, found the number 3"),
        ("maybe_inner", 3, "wanted a mapping, found the number 3"),
        ("colour", "rad", "wanted one of 'red', 'blue', found the text 'rad' (did you mean 'red'?)"),
        ("place", 3, "wanted a path, found the number 3"),
        ("unique", "a", "wanted a list of text, found the text 'a'"),
    ],
)
def test_a_wrong_value_is_named_with_its_path(key: str, value: object, problem: str) -> None:
    found = problems({key: value})
    assert len(found) == 1
    assert found[0].startswith(f"{key}: ")
    assert found[0].endswith(problem)


@pytest.mark.parametrize(
    ("document", "problem"),
    [
        ({"nubmer": 3}, "nubmer: unknown key (did you mean 'number'?)"),
        ({"inner": {"wieght": 3}}, "inner.wieght: unknown key (did you mean 'weight'?)"),
        ({"inner": {"zzz": 3}}, "inner.zzz: unknown key; known: label, weight"),
        ({"inners": [{}, {"weight": "3"}]}, "inners.1.weight: wanted a number, found the text '3'"),
        ({"by_name": {"a": {"weight": -1}}}, "by_name.a.weight: must be >= 0: -1.0"),
        ({"maybe_inner": {"lable": 3}}, "maybe_inner.lable: unknown key (did you mean 'label'?)"),
        ({"named": {"a": 1, "b": "2"}}, "named.b: wanted an integer, found the text '2'"),
        ({"named": {3: 1}}, "named.3: wanted text, found the number 3"),
        ({"fixed": [1, 2]}, "fixed.1: wanted text, found the number 2"),
        ({7: 1}, "7: unknown key; known: "),
        ({"a\nb": 1}, "'a\\nb': unknown key; known: "),
        ({"inner": {"a.b": 1}}, "inner.'a.b': unknown key; known: label, weight"),
        (3, "wanted a mapping, found the number 3"),
    ],
)
def test_a_problem_inside_is_named_with_its_whole_path(document: object, problem: str) -> None:
    found = problems(document)
    assert len(found) == 1
    assert found[0].startswith(problem)


def test_missing_keys_are_named_and_a_misspelt_one_is_one_problem() -> None:
    assert problems({}, DataSection) == ["train: missing; wanted a list of mappings"]
    assert problems({"trian": []}, DataSection) == ["trian: unknown key (did you mean 'train'?)"]


def test_all_problems_are_found_at_once() -> None:
    document = {
        "number": "1", "share": "1", "word": 1, "flag": 1, "mode": "x", "words": [1, 2], "zzz": 1,
        "inner": {"weight": -1, "a": 1}, "named": {"a": None}, "inners": [{"weight": -1, "label": 2}],
    }  # fmt: skip
    paths = {problem.partition(":")[0] for problem in problems(document)}
    assert paths == {
        "number", "share", "word", "flag", "mode", "words.0", "words.1", "zzz", "inner.weight", "inner.a", "named.a",
        "inners.0.weight", "inners.0.label",
    }  # fmt: skip


@frozen
class Range:
    low: int = field(default=0, validator=validators.ge(0))
    high: int = field(default=1, validator=[validators.ge(0), validators.le(9)])
    step: int = 1

    def __attrs_post_init__(self) -> None:
        if self.low > self.high:
            raise ValueError(f"low is {self.low},\nwhich is more than high, {self.high}")


def test_every_validator_that_objects_is_reported() -> None:
    assert problems({"low": -1, "high": 10}, Range) == ["low: must be >= 0: -1", "high: must be <= 9: 10"]


def test_what_a_class_says_of_its_fields_together_is_reported() -> None:
    assert problems({"low": 5, "high": 3}, Range) == ["low is 5, which is more than high, 3"]


def known(name: str) -> int:
    return {"a": 1}[name]


@frozen
class Looked:
    converted: str = field(default="a", converter=known)
    checked: str = field(default="a", validator=lambda made, field, value: known(value))


def test_a_converter_or_validator_that_raises_something_else_is_reported() -> None:
    assert problems({"checked": "q"}, Looked) == ["checked: KeyError: q"]
    assert problems({"converted": "q"}, Looked) == ["KeyError: q"]


@frozen
class Unresolvable:
    value: "NoSuchType" = 1  # type: ignore[name-defined]  # noqa: F821


@frozen
class Unsupported:
    value: "type[int] | complex" = 1
    call: object = field(default=None)


@frozen
class Holder:
    unresolvable: Unresolvable = field(factory=lambda: Unresolvable())


def test_a_class_whose_types_make_no_sense_is_named() -> None:
    assert "Unresolvable cannot be resolved" in problems({"unresolvable": {}}, Holder)[0]
    assert problems({"unresolvable": {}}, Unresolvable) != []
    assert problems({"value": "x"}, Unsupported) != []


def test_a_component_is_chosen_by_use_with_its_keys_beside_it(offers: Registry) -> None:
    document = {
        "run": {"folder": "f", "steps": 1}, "model": {"path": "m"}, "backend": "trainer",
        "algorithm": {"use": "loop", "size": 3, "loss": {"use": "clip", "low": 1}, "filters": ["not-flat"]},
        "loggers": ["screen", {"use": "paper"}],
        "environments": [{"use": "sums", "terms": 3, "weight": 2, "name": "n"}, "sums"],
    }  # fmt: skip
    config = structure(document, Config, offers)
    algorithm: Any = config.algorithm.config
    assert (config.algorithm.name, config.algorithm.kind, config.algorithm.distribution) == (
        "loop", "algorithms", "whet-offers",
    )  # fmt: skip
    assert (algorithm.size, algorithm.loss.config.low, algorithm.loss.config.high) == (3, 1.0, 0.2)
    assert [chosen.name for chosen in algorithm.filters] == ["not-flat"]
    assert [chosen.name for chosen in config.loggers] == ["screen", "paper"]
    assert config.generator is None
    one, two = config.environments
    assert (one.name, one.weight, one.component.config.terms) == ("n", 2.0, 3)  # type: ignore[attr-defined]
    assert two.component.config.terms == 2  # type: ignore[attr-defined]


def test_the_default_component_stands_where_the_key_is_left_out(offers: Registry) -> None:
    loop: Any = offers.find("algorithms", "loop").component.config
    assert structure({}, loop, offers).loss.name == "clip"
    assert structure({"loss": {"low": 1}}, loop, offers).loss.config.low == 1.0


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("algorithm", "lop", "algorithm.use: there is no algorithm 'lop' (did you mean 'loop'?)"),
        ("algorithm", {"use": 3}, "algorithm.use: wanted text, found the number 3"),
        ("algorithm", {"size": 3}, "algorithm: missing `use:`, the name of the algorithm; known: loop"),
        ("algorithm", 3, "algorithm: wanted the name of an algorithm or `use:` and its keys, found the number 3"),
        ("algorithm", None, "algorithm: wanted the name of an algorithm or `use:` and its keys, found null"),
        ("algorithm", {"use": "loop", "sise": 3}, "algorithm.sise: unknown key (did you mean 'size'?)"),
        ("algorithm", {"use": "loop", "loss": "clap"}, "algorithm.loss.use: there is no loss 'clap'"),
        ("algorithm", {"use": "loop", "loss": {"low": -1}}, "algorithm.loss.low: must be >= 0: -1.0"),
        ("algorithm", {"use": "loop", "loss": {"lo": 1}}, "algorithm.loss.lo: unknown key (did you mean 'low'?)"),
        ("algorithm", {"use": "loop", "filters": "x"}, "algorithm.filters: wanted a list of filters, found the text"),
        ("generator", "hg", "generator.use: there is no generator 'hg'; no plugin that offers a generator is"),
        ("loggers", ["screen", "scren"], "loggers.1.use: there is no logger 'scren' (did you mean 'screen'?)"),
        ("loggers", {"use": "screen"}, "loggers: wanted a list of loggers, found a mapping"),
        ("environments", [{"name": "x"}], "environments.0: missing `use:`, the name of the environment; known: sums"),
        ("environments", [{"use": "sums", "trems": 3}], "environments.0.trems: unknown key (did you mean 'terms'?)"),
        ("environments", [{"use": "sums", "wieght": 3}], "environments.0.wieght: unknown key (did you mean 'weight'?)"),
        (
            "environments",
            [{"use": "sums", "terms": "3"}],
            "environments.0.terms: wanted an integer, found the text '3'",
        ),
        ("environments", [3], "environments.0: wanted a mapping, found the number 3"),
    ],
)
def test_a_wrong_component_is_named_with_its_path(offers: Registry, key: str, value: object, problem: str) -> None:
    good = {"run": {"folder": "f", "steps": 1}, "model": {"path": "m"}, "backend": "trainer", "algorithm": "loop"}
    found = problems({**good, key: value}, Config, offers)
    assert len(found) == 1
    assert found[0].startswith(problem)


@frozen
class Weighted:
    weight: float = 1.0


def test_a_component_whose_key_belongs_to_the_section_around_it_is_refused(offers: Registry) -> None:
    offer = offers.offers("environments")["sums"]
    component = attrs.evolve(offer.component, name="weighted", config=Weighted)
    offers._offers["environments"]["weighted"] = [attrs.evolve(offer, component=component)]
    found = problems({"use": "weighted"}, EnvironmentSection, offers)
    assert len(found) == 1
    assert "has its own key 'weight'" in found[0]


@frozen
class Several:
    named: dict[str, Selection] = field(factory=dict, metadata={"kind": "losses", "default": None})
    one: Selection = selection("losses", default="clip")


def test_components_may_stand_in_a_mapping(offers: Registry) -> None:
    made = structure({"named": {"a": "clip", "b": {"use": "clip", "low": 1}}}, Several, offers)
    assert [made.named["a"].name, made.named["b"].config.low] == ["clip", 1.0]  # type: ignore[attr-defined]
    assert problems({"named": {"a": "clop"}}, Several, offers)[0].startswith("named.a.use: there is no loss 'clop'")


TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))
INTEGERS = st.integers(-(2**63), 2**63 - 1)
outers = st.builds(
    Outer,
    number=INTEGERS, share=st.floats(allow_nan=False, allow_infinity=False), word=TEXT, flag=st.booleans(),
    mode=st.sampled_from(["auto", "never", 3]), maybe=st.none() | INTEGERS, either=INTEGERS | TEXT,
    words=st.lists(TEXT), many=st.lists(INTEGERS).map(tuple), named=st.dictionaries(TEXT, INTEGERS),
    inners=st.lists(st.builds(Inner, weight=st.floats(0, 9), label=TEXT)), colour=st.sampled_from(Colour),
    by_name=st.dictionaries(TEXT, st.builds(Inner)), unique=st.frozensets(TEXT),
)  # fmt: skip


@given(outers)
def test_unstructuring_is_undone_by_structuring(outer: Outer) -> None:
    plain = unstructure(outer)
    json.dumps(plain)
    assert structure(plain, Outer, None) == outer


def test_unstructuring_a_whole_config_is_undone_by_structuring(offers: Registry) -> None:
    document = {
        "run": {"folder": "f", "steps": 1}, "model": {"path": "m"}, "backend": "trainer",
        "algorithm": {"use": "loop", "loss": {"low": 1}, "filters": ["not-flat"]}, "loggers": ["screen"],
        "environments": [{"use": "sums", "terms": 3, "weight": 2}], "evaluation": {"environments": ["sums"]},
    }  # fmt: skip
    config = structure(document, Config, offers)
    plain = unstructure(config)
    json.dumps(plain)
    assert structure(plain, Config, offers) == config
    assert plain["environments"][0] == {
        "use": "sums", "terms": 3, "name": "", "split": "", "weight": 2.0, "weight_schedule": {},
        "samples": 1, "limit": 0,
        "pass_at": None, "majority_at": None, "passing": None, "worker": None, "group_size": 0,
        "sampling": {"max_tokens": 0, "stop": [], "temperature": None},
    }  # fmt: skip
    assert plain["algorithm"]["loss"] == {"use": "clip", "low": 1.0, "high": 0.2}


keys = st.sampled_from(
    ["use", "run", "steps", "folder", "model", "path", "algorithm", "loop", "loss", "clip", "low", "backend", "trainer",
     "optimizer", "lr", "loggers", "environments", "sums", "terms", "weight", "data", "train", "plugins", "generator"]
) | st.text(max_size=3) | st.integers() | st.none() | st.booleans()  # fmt: skip
garbage = st.recursive(
    keys | st.floats() | st.binary(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=4),
    max_leaves=20,
)
REGISTRY = Registry()


@given(st.dictionaries(keys, garbage, max_size=6) | garbage)
def test_garbage_raises_nothing_but_a_config_error_of_single_lines(document: object) -> None:
    for cls in (Config, Outer, EnvironmentSection):
        found = problems_if_any(document, cls, REGISTRY)
        assert not any("\n" in problem or not problem for problem in found)
