"""Each algorithm takes two steps with each backend, layout of ranks, adapter and generator that fit it.

Runs are whole runs as `whet run` makes them, but for their processes: all runs with as many ranks share them, because
their imports take longer than a run. `docs/support.py` lists the cells, and makes a page of them and of these tests.
"""

import functools
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import yaml

from whet.plugins.registry import Registry, load_plugins
from whet.run import builder
from whet.run.compose import run
from whet.run.start_workers import WorkerGroups
from whet.runtime.inline import InlineWorkerGroup
from whet.runtime.local import LocalCluster
from whet_start.small_models import make_model
from whet_testing.contracts.algorithm import RECORDS
from whet_testing.forked_children import forked_children
from whet_testing.scripted_worker import TARGET

ROOT = Path(__file__).parents[1]
SMALL = {"prompts_per_step": 2, "group_size": 4, "batch_size": 4, "pairs_per_step": 4}
EVERY = "WHET_EVERY_CELL" in os.environ
ROLES = ("backend", "critic", "teacher", "held")


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


def cases(backend: str) -> list[Any]:
    """Return the cells of a backend, with the generator `hf` or none, marked as what they are."""
    found = []
    for cell in support().cells(registry(), generators=["hf"]):
        if cell.layout.backend == backend and not support().refusals(cell, registry()):
            always = support().always(cell, registry())
            marks = [pytest.mark.supports(cell.name, always=always)]
            if not always and not EVERY:
                marks.append(pytest.mark.skip(reason="`nox -s support` runs every cell"))
            found.append(pytest.param(cell, marks=marks, id=cell.name))
    return found


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
        found[experts] = make_model(folder, tiny_tokenizer, family=family, layers=layers, tied=False)
    return found


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """Start one, two and four processes for each backend, each group when a run needs it."""
    groups = [[f"{role}.{kind}.{ranks}" for role in ROLES] for kind in ("fsdp2", "megatron") for ranks in (1, 2, 4)]
    with LocalCluster(tmp_path_factory.mktemp("logs"), share=groups) as made:
        yield made


@pytest.fixture(scope="module")
def shared(cluster: LocalCluster) -> Callable[[str, int], Callable[..., WorkerGroups]]:
    """Return a function that returns what takes the place of `make_worker_groups` for a backend on so many ranks."""
    held = set[str]()

    def at(kind: str, ranks: int) -> Callable[..., WorkerGroups]:
        end = f"{kind}.{ranks}"
        if end not in held:
            held.add(end)
            made = {role: cluster.worker_group(f"{role}.{end}", ranks) for role in ROLES}
            made["held"].spawn(TARGET, {})  # processes end when nobody uses them

        def of(role: str) -> Any:
            return InlineWorkerGroup(role) if role == "generator" else cluster.worker_group(f"{role}.{end}", ranks)

        return lambda *arguments: WorkerGroups(of, cluster)

    return at


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
    known = RECORDS.get(support().facts_of(cell.algorithm, registry()).data_format, [])
    file.write_text("".join(json.dumps(record) + "\n" for record in known))
    fed = {"environments": [{"use": "even"}]} if cell.generator else {"data": {"train": [{"path": str(file)}]}}
    document = {
        **support().sections(cell, registry()), "run": {"folder": str(tmp_path / "run"), "steps": 2, "export": False},
        "model": {"path": str(folder)}, "algorithm": {"use": cell.algorithm, **keys}, "rollout": {"max_tokens": 4},
        "plugins": [str(Path(__file__).parent / "even_digits.py")], **fed,
    }  # fmt: skip
    (tmp_path / "it.yaml").write_text(yaml.safe_dump(document))
    monkeypatch.setattr(builder, "make_worker_groups", shared(cell.layout.backend, cell.layout.ranks))
    assert run(tmp_path / "it.yaml").finished
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if row["step"]]
    assert len(steps) == 2
    assert all("loss" in row and "nonfinite_steps" not in row for row in steps)


@pytest.mark.parametrize("cell", cases("fsdp2"))
def test_algorithms_take_two_steps_on_fsdp2(cell: Any, take_two_steps: Any) -> None:
    take_two_steps(cell)


@pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed here")
@pytest.mark.parametrize("cell", cases("megatron"))
def test_algorithms_take_two_steps_on_megatron(cell: Any, take_two_steps: Any) -> None:
    take_two_steps(cell)


def test_sessions_run_each_algorithm_with_each_layout_and_each_adapter_with_both() -> None:
    pairs = set()
    for backend in ("fsdp2", "megatron"):
        for one in cases(backend):
            cell = one.values[0]
            if any(mark.kwargs.get("always") for mark in one.marks):
                pairs |= {(cell.algorithm, cell.layout), (cell.algorithm, cell.lora), (cell.layout, cell.lora)}
    fitting = [one.values[0] for backend in ("fsdp2", "megatron") for one in cases(backend)]
    for cell in fitting:
        if cell.layout.ranks <= 2:
            wanted = {(cell.algorithm, cell.layout), (cell.algorithm, cell.lora), (cell.layout, cell.lora)}
            assert wanted <= pairs, cell.name


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
    assert "- a: `tests/a.py::test_a[CELL]`\n- b: `tests/a.py::test_b[other]`\n\n1. backend: cannot" in page
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
