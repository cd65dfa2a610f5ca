"""Each algorithm takes two steps with each backend, layout of ranks, adapter and generator that fit it.

Runs are whole runs as `whet run` makes them, but for their processes: all runs with as many ranks share them, because
their imports take longer than a run, and runs one after the other share an engine if they would start an equal one.
`docs/support.py` lists the cells, and makes a page of them and of these tests.
"""

import functools
import importlib.util
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, nullcontext
from pathlib import Path
from typing import Any

import pytest
import yaml

from whet.interfaces.workers import WorkerGroup, Workers
from whet.plugins.registry import Registry, load_plugins
from whet.run import builder
from whet.run.compose import run
from whet.run.start_workers import WorkerGroups
from whet.runtime.inline import InlineWorkerGroup
from whet.runtime.local import LocalCluster
from whet_start.small_models import make_model
from whet_testing.combinations import Combination, facts_of
from whet_testing.contracts.algorithm import RECORDS
from whet_testing.forked_children import forked_children
from whet_testing.scripted_worker import TARGET

ROOT = Path(__file__).parents[1]
SMALL = {"prompts_per_step": 2, "group_size": 4, "batch_size": 4, "pairs_per_step": 4}
TRAINER = os.environ.get("WHET_TRAINER_PYTHON", "")
"""The interpreter of backends that cannot live in the environment of an engine."""
EVERY = "WHET_EVERY_CELL" in os.environ
ROLES = ("backend", "generator", "critic", "teacher", "held")


@functools.cache
def support() -> Any:
    """Load what lists the cells and writes their page."""
    spec = importlib.util.spec_from_file_location("support", ROOT / "docs" / "support.py")
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


@functools.cache
def registry() -> Registry:
    return load_plugins()


def fitting(needs: str) -> list[Any]:
    """Return the cells with some needs that the plan does not refuse, those that use one engine together."""
    found = [c for c in support().cells(registry()) if c.needs == needs and not support().refusals(c, registry())]
    return sorted(found, key=lambda cell: (cell.layout.experts, cell.lora)) if needs in support().ENGINES else found


def cases(cells: Iterable[Any]) -> list[Any]:
    """Return cells as parameters, marked as what they are."""
    found = []
    for cell in cells:
        always = cell in support().always(registry())
        marks = [pytest.mark.supports(cell.name, always=always)]
        if not always and not EVERY:
            marks.append(pytest.mark.skip(reason="`nox -s support` runs every cell"))
        if needs_trainer(cell) and not TRAINER:
            marks.append(
                pytest.mark.skip(reason=f"transformers of {cell.needs} is too old; WHET_TRAINER_PYTHON is not set")
            )
        if missing := [name for name in (cell.needs, cell.layout.backend) if not is_here(name)]:
            marks.append(pytest.mark.skip(reason=f"{missing[0]} is not installed here"))
        if cell.needs in support().ENGINES:
            # An engine starts in half a minute, on a busy machine in several.
            group = f"{cell.needs}, {cell.layout.experts}, {cell.lora}"
            marks += [pytest.mark.timeout(900), pytest.mark.xdist_group(group)]
        found.append(pytest.param(cell, marks=marks, id=cell.name))
    return found


def needs_trainer(cell: Any) -> bool:
    """Return whether the backend of a cell needs a newer transformers than its engine allows."""
    sizes = cell.layout.sizes if cell.layout.backend == "fsdp2" else {}
    return cell.needs in support().ENGINES and not {"replicate", "expert"}.isdisjoint(sizes)


@functools.cache
def is_here(name: str) -> bool:
    """Return whether what a cell needs is installed."""
    return name in ("", "fsdp2") or importlib.util.find_spec(name) is not None


class Kept:
    """A worker group that keeps its workers, with their engine, for the next run that would start equal ones."""

    def __init__(self, group: WorkerGroup) -> None:
        self.role, self.size, self.host_groups = group.role, group.size, group.host_groups
        self._group, self._workers, self._equal = group, None, ""

    def spawn(self, target: str, arguments: Mapping[str, Any]) -> Any:
        equal = json.dumps([target, {**arguments, "scratch": ""}], sort_keys=True)
        if equal != self._equal:
            self.close()
            self._workers, self._equal = self._group.spawn(target, arguments), equal
        return Open(self._workers)

    def close(self) -> None:
        if self._workers is not None:
            self._workers.close()
        self._workers, self._equal = None, ""


class Open:
    """Workers that stay when a run closes them."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers

    def __getattr__(self, name: str) -> Any:
        return getattr(self._workers, name)

    def close(self) -> None:
        """Do nothing."""


@pytest.fixture(autouse=True)
def _forked(_threads: int) -> Iterator[None]:
    """Fork worker processes from this one, unless Megatron has run in it: the forks would fail."""
    with nullcontext() if "megatron.core" in sys.modules else forked_children():
        yield


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Any) -> dict[bool, Path]:
    """Return the folders of a dense model and of a mixture of experts, in the shapes that the plan was asked about."""
    found = {}
    for experts, family, layers in ((False, "qwen3", 4), (True, "qwen3_moe", 2)):
        folder = tmp_path_factory.mktemp("model")
        found[experts] = make_model(folder, tiny_tokenizer, family=family, hidden=128, layers=layers, tied=False)
    return found


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., LocalCluster]]:
    """Return a function that starts processes for a backend or a generator, or returns them if they are there."""
    with ExitStack() as held:

        @functools.cache
        def start(name: str, ranks: int, python: str = "") -> LocalCluster:
            pythons = dict.fromkeys(ROLES, python) if python else {}
            made = held.enter_context(LocalCluster(tmp_path_factory.mktemp("logs"), share=[ROLES], python=pythons))
            made.worker_group("held", ranks).spawn(TARGET, {})  # processes end when nobody uses them
            return made

        yield start


@pytest.fixture(scope="module")
def shared(processes: Callable[..., LocalCluster]) -> Iterator[Callable[[Any], Callable[..., WorkerGroups]]]:
    """Return a function that returns what takes the place of `make_worker_groups` for a cell."""
    with ExitStack() as held:

        @functools.cache
        def engine(name: str) -> Kept:
            return held.enter_context(closing(Kept(processes(name, 1).worker_group("generator"))))

        def at(cell: Any) -> Callable[..., WorkerGroups]:
            ranks = cell.layout.ranks
            cluster = processes(cell.layout.backend, ranks, TRAINER if needs_trainer(cell) else "")

            def of(role: str) -> Any:
                if role != "generator" or cell.in_place:
                    return cluster.worker_group(role, ranks)
                if cell.generator in support().ENGINES:
                    return engine(cell.generator)
                own = cell.generator == "megatron"
                return processes("own", 1).worker_group(role) if own else InlineWorkerGroup(role)

            return lambda *arguments: WorkerGroups(of, cluster)

        yield at


@pytest.fixture
def take_two_steps(
    models: dict[bool, Path], shared: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Any], None]:
    """Return a function that runs a cell."""
    return functools.partial(_take_two_steps, models, shared, tmp_path, monkeypatch)


def _take_two_steps(models: dict[bool, Path], shared: Any, tmp_path: Path, monkeypatch: Any, cell: Any) -> None:
    folder = models[cell.layout.experts]
    component = registry().find("algorithms", cell.algorithm).component
    keys = {key: value for key, value in SMALL.items() if key in component.config.__annotations__}
    file = tmp_path / "data.jsonl"
    known = RECORDS.get(facts_of(Combination(cell.algorithm), registry()).data_format, [])
    file.write_text("".join(json.dumps(record) + "\n" for record in known))
    fed = {"environments": [{"use": "even"}]} if cell.generator else {"data": {"train": [{"path": str(file)}]}}
    document = {
        **support().sections(cell, registry()), "run": {"folder": str(tmp_path / "run"), "steps": 2, "export": False},
        "model": {"path": str(folder)}, "algorithm": {"use": cell.algorithm, **keys}, "rollout": {"max_tokens": 4},
        "plugins": [str(Path(__file__).parent / "even_digits.py")], **fed,
    }  # fmt: skip
    (tmp_path / "it.yaml").write_text(yaml.safe_dump(document))
    monkeypatch.setattr(builder, "make_worker_groups", shared(cell))
    assert run(tmp_path / "it.yaml").finished
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if row["step"]]
    assert len(steps) == 2
    assert all("loss" in row and "nonfinite_steps" not in row for row in steps)
    if cell.generator:
        assert all(row["probe/logprob_gap"] < 1e-4 for row in steps[:1])


@pytest.mark.parametrize("cell", cases(fitting("")))
def test_algorithms_take_two_steps(cell: Any, take_two_steps: Any) -> None:
    take_two_steps(cell)


@pytest.mark.parametrize("cell", cases(fitting("megatron")))
def test_algorithms_take_two_steps_with_megatron(cell: Any, take_two_steps: Any) -> None:
    take_two_steps(cell)


@pytest.mark.parametrize("cell", cases(fitting("vllm")))
def test_algorithms_take_two_steps_with_vllm(cell: Any, take_two_steps: Any) -> None:
    take_two_steps(cell)


@pytest.mark.parametrize("cell", cases(fitting("sglang")))
def test_algorithms_take_two_steps_with_sglang(cell: Any, take_two_steps: Any) -> None:
    take_two_steps(cell)


def test_sessions_run_each_pair_of_choices() -> None:
    known = [cell for cell in support().cells(registry()) if not support().refusals(cell, registry())]
    for needs in ("", "megatron", *support().ENGINES):
        small = [cell for cell in known if cell.needs == needs and cell.layout.ranks <= 2]
        chosen = [cell for cell in support().always(registry()) if cell.needs == needs]
        assert set().union(*(cell.pairs() for cell in chosen)) == set().union(*(cell.pairs() for cell in small))
        assert len(chosen) < len(small)


def test_the_page_names_what_a_test_runs_what_the_plan_refuses_and_what_has_no_test(monkeypatch) -> None:
    module = support()
    made = module.Collected
    known = {
        "sft, fsdp2, data 2": made("tests/a.py::test_a", "sft, fsdp2, data 2", True),
        "sft, fsdp2, data 2, lora": made("tests/a.py::test_b", "other", False),
    }
    monkeypatch.setattr(module, "collected", lambda: known)
    refused = {"sft, fsdp2, tensor 2": ("backend: cannot",)}
    monkeypatch.setattr(module, "refusals", lambda cell, registry: refused.get(cell.name, ()))
    page = module.page(registry(), ["sft"], ["hf"])
    table = [row.strip("| ").split(" | ") for row in page.splitlines() if row.startswith("| `fsdp2`")]
    rows = {(layout, adapter): cell for _, layout, adapter, cell in table}
    assert rows["data 2", "full"] == "a"
    assert rows["data 2", "LoRA"] == "(b)"
    assert rows["tensor 2", "full"] == "1"
    assert rows["tensor 2", "LoRA"] == "*no test*"
    below = page[page.index("- a: ") :]
    assert below == (
        "- a: `tests/a.py::test_a[CELL]`, in `tests` and `support(megatron)`\n"
        "- b: `tests/a.py::test_b[other]`, in `tests` and `support(megatron)`\n\n"
        "1. backend: cannot"
    )
    assert f"Of {2 * len(module.LAYOUTS)} cells tests run 2, the plan refuses 1, and" in page


def test_each_cell_of_the_page_runs_a_test_that_is_there_or_is_refused_or_says_so() -> None:
    text = (ROOT / "docs" / "reference" / "support.md").read_text()
    table = [row.strip("| ").split(" | ") for row in text.splitlines() if row.startswith("| `")]
    cells = [cell for row in table for cell in row[3:]]
    letters = {line.partition(":")[0].removeprefix("- ") for line in text.splitlines() if "`tests/" in line}
    numbers = {line.partition(".")[0] for line in text.splitlines() if line[:1].isdigit()}
    for cell in cells:
        assert cell == "*no test*" or cell.strip("()") in letters or set(cell.split(", ")) <= numbers, cell
    assert len(cells) == sum(1 for _ in support().cells(registry()))
    sessions = {session for cell in support().cells(registry()) for session in cell.sessions}
    below = " ".join(line for line in text.splitlines() if "`tests/" in line)
    noxfile = (ROOT / "noxfile.py").read_text()
    assert set(re.findall(r"`([a-z]+(?:\([a-z]+\))?)`", below)) == sessions
    assert all(f"\ndef {name.partition('(')[0]}(session" in noxfile for name in sessions)
