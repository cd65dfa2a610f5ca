"""Fixtures of several test folders, and how tests are spread over processes, `pytest -n 2`: slow files first."""

import gc
import importlib.metadata
import os
import sys
import tempfile
import textwrap
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import settings

import whet.plugins.registry

OFFERS = (Path(__file__).parent / "core" / "tests" / "offers.py").read_text(encoding="utf-8")
WITH_RAY = frozenset(
    ("test_cluster.py", "test_nodes.py", "test_ranks.py", "test_session.py", "test_shared_gpus.py", "test_sleep.py",
     "test_under_ray.py", "test_where_it_runs.py")
)  # fmt: skip
"""These run one after another: clusters that start beside each other on one machine are slow beyond their deadlines."""

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
"""OpenMP reads this once, when torch is imported. Worker processes have it, and those that are forked from a process of
the tests get what that process has: without it their threads spin while they wait, on cores that other tests need.
"""


CLEARED = pytest.StashKey[Path]()
"""The file after whose first test the garbage collector ran."""

settings.register_profile("patient", deadline=None)  # by default an example that takes 0.2 s on a busy machine fails
settings.load_profile("patient")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect without the garbage collector: thousands of tests, and torch, are no garbage, and it would look at them
    again and again.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(10_000)
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    """Collect after the first and the last test of a file, and leave alone what is left: mostly modules that its tests
    imported. Without this, each later collection would look at them again: half of the time of some files.
    """
    try:
        return (yield)
    finally:
        if nextitem is None or nextitem.path != item.path or item.config.stash.get(CLEARED, None) != item.path:
            item.config.stash[CLEARED] = item.path
            gc.collect()
            gc.freeze()


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The only folder in which plugins are looked for."""
    folder = tmp_path / "site"
    folder.mkdir()
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(
        whet.plugins.registry, "distributions", lambda: importlib.metadata.distributions(path=[str(folder)])
    )
    yield folder
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture
def install(site: Path) -> Callable[..., Path]:
    """Install a distribution whose entry points are modules of the same names with the given sources."""

    def install_distribution(
        distribution: str, modules: Mapping[str, str], *, version: str = "1.0", requires: str = ""
    ) -> Path:
        info = site / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        wanted = f"Requires-Dist: {requires}\n" if requires else ""
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n{wanted}")
        entries = "".join(f"{module} = {module}\n" for module in modules)
        (info / "entry_points.txt").write_text(f"[whet]\n{entries}")
        for module, source in modules.items():
            (site / f"{module}.py").write_text(textwrap.dedent(source))
        return info

    return install_distribution


@pytest.fixture
def offers(install: Callable[..., Path]) -> whet.plugins.registry.Registry:
    """A registry of one plugin that offers almost everything: `core/tests/offers.py`."""
    install("whet-offers", {"offers_hooks": OFFERS})
    return whet.plugins.registry.load_plugins()


@pytest.fixture
def config(offers: whet.plugins.registry.Registry, tmp_path: Path) -> Path:
    """A config that can be planned: components of `offers`, and a model folder without weights."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"max_position_embeddings": 64}')
    (tmp_path / "data.jsonl").write_text('{"text": "a"}\n')
    document = {
        "run": {"folder": "runs/it", "steps": 1}, "model": {"path": str(tmp_path / "model")}, "algorithm": "loop",
        "backend": "trainer", "loggers": ["screen"], "data": {"train": [{"path": "data.jsonl"}]},
    }  # fmt: skip
    path = tmp_path / "it.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


@pytest.fixture(scope="session")
def fork_server_for_ray() -> Iterator[Any]:
    """A process that has imported torch and transformers, and forks itself for node agents of Ray."""
    from whet_testing.forks_under_ray import ForksUnderRay

    with tempfile.TemporaryDirectory(prefix="w") as folder:
        forks = ForksUnderRay(Path(folder), ("whet_fsdp2.worker", "whet_hf.worker", "transformers.modeling_utils"))
        yield forks
        forks.close()


@pytest.fixture(scope="module")
def forks_under_ray(fork_server_for_ray: Any) -> Iterator[None]:
    """A Ray that starts meanwhile forks its worker processes from a process that has imported torch: these tests do
    not look at how processes start, and an import takes seconds.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name, value in fork_server_for_ray.variables.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="module")
def own_ray() -> Iterator[None]:
    """Start Ray as whet does, once for the tests of a module. Runs that these tests start join this Ray."""
    from whet_ray.session import RaySession

    session = RaySession()
    session.wait(120.0)
    yield
    session.close()


def unit(nodeid: str) -> str:
    """Return what tests share that one process runs one after another: their file, or that they start a Ray."""
    file = nodeid.partition("::")[0]
    return "ray" if file.rpartition("/")[2] in WITH_RAY else file


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with the units that have most slow tests where several processes run: none must be left alone with one."""
    if hasattr(config, "workerinput"):
        slow = Counter(unit(item.nodeid) for item in items if item.get_closest_marker("slow"))
        items.sort(key=lambda item: -slow[unit(item.nodeid)])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keep the tests of a unit together, and the units in their order."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):  # type: ignore[misc]  # untyped for who has no xdist
        def _split_scope(self, nodeid: str) -> str:
            return unit(nodeid)

    config.option.loadscopereorder = False  # it would begin with the units that have most tests
    return Scheduling(config, log)
