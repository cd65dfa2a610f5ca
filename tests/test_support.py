"""Each algorithm takes two steps with each backend, layout of ranks, adapter and generator that fit it.

Runs are whole runs as `whet run` makes them, but for their processes: all runs with as many ranks share them, because
their imports take longer than a run. `docs/support.py` lists the cells, and makes a page of them and of these tests.
"""

import functools
import importlib.util
import json
import os
from collections.abc import Callable, Iterator
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
from whet_testing.scripted_worker import TARGET

ROOT = Path(__file__).parents[1]
SMALL = {"prompts_per_step": 2, "group_size": 4, "batch_size": 4, "pairs_per_step": 4}
EVERY = "WHET_EVERY_CELL" in os.environ
NO_MEGATRON = importlib.util.find_spec("megatron") is None
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


def cases() -> Iterator[Any]:
    """Yield the cells of the generator `hf` and of none, marked as what they are."""
    for cell in support().cells(registry(), generators=["hf"]):
        if not support().refusals(cell, registry()):
            always = support().always(cell, registry())
            marks = [pytest.mark.supports(cell.name, always=always)]
            if not always:
                marks.append(pytest.mark.skipif(not EVERY, reason="`nox -s support` runs every cell"))
            if cell.layout.backend == "megatron":
                marks.append(pytest.mark.skipif(NO_MEGATRON, reason="megatron-core is not installed here"))
            yield pytest.param(cell, marks=marks, id=cell.name)


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
    """Start one, two and four processes for each backend, once each is asked for."""
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


@pytest.mark.parametrize("cell", list(cases()))
def test_it_takes_two_steps(cell, models, shared, tmp_path, monkeypatch) -> None:
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
