"""Models, and two or four worker processes that many cases share."""

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from whet.data.batch import Batch
from whet.interfaces.weights import TransferSpec
from whet.interfaces.workers import WorkerGroup
from whet.runtime.local import LocalCluster
from whet.runtime.worker_process import import_ahead
from whet_megatron.backend import MegatronBackend
from whet_megatron.config import MegatronConfig, OptimizerConfig
from whet_megatron.parallel import ParallelConfig
from whet_testing.held import held_processes
from whet_testing.role_context import make_context
from whet_testing.three_steps import grouped_batch, stirred_model
from whet_training.lora_config import LoraConfig, adapter_info

IMPORTS = ("whet_megatron.worker", "whet_megatron.ahead")
OPTIMIZER = OptimizerConfig(lr=1e-3, weight_decay=0.1)
Build = Callable[..., MegatronBackend]
WITHOUT = ("test_config.py", "test_generator_config.py", "TestPlugin", "test_fp8.py::test_")
"""Tests that need no Megatron."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs Megatron where it is not installed: `nox -s "backends(megatron)"` installs it."""
    if importlib.util.find_spec("megatron") is not None:
        return
    here = str(Path(__file__).parent)
    for item in items:
        runs = any(word in item.nodeid for word in WITHOUT) and "forkable_imports" not in item.nodeid
        if str(item.path).startswith(here) and not runs:
            item.add_marker(pytest.mark.skip(reason="megatron-core is not installed here"))


@pytest.fixture(scope="session")
def _imported() -> None:
    """Import Megatron as a worker does. Each backend that starts collects garbage, and what is imported here is not
    searched.
    """
    import_ahead(list(IMPORTS))


@pytest.fixture(scope="session")
def folders(_imported: None, tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Any) -> Callable[..., Path]:
    """Return a function that returns the folder of a random model: of a family, with changes of its arguments."""
    made: dict[tuple[Any, ...], Path] = {}

    def folder(name: str = "qwen3", **changes: Any) -> Path:
        key = (name, *sorted(changes.items()))
        if key not in made:
            made[key] = stirred_model(tmp_path_factory.mktemp("model"), tiny_tokenizer, name, **changes)
        return made[key]

    return folder


@pytest.fixture
def sent(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Return a function that returns the tensors that a backend sends to a generator, by name."""

    def sent(
        backend: MegatronBackend, senders: int = 1, lora: LoraConfig | None = None, weights: str = "policy"
    ) -> dict[str, Any]:
        """Return all weights from each of the senders, or the adapter alone from one."""
        from whet_weights.transfer import receive

        way = tmp_path / f"way-{len(list(tmp_path.iterdir()))}"
        adapter = None if lora is None else adapter_info(lora)
        spec = TransferSpec("disk", str(way), "1", 1, "", senders, adapter=adapter, weights=weights)
        pending = backend.send_weights(spec)
        found = {name: tensor.clone() for name, tensor in receive(spec)}
        pending.result()
        return found

    return sent


@pytest.fixture(name="make_batch", scope="session")
def _make_batch() -> Callable[..., Batch]:
    return grouped_batch


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    groups = {("backend2",): 2, ("backend4",): 4}
    with held_processes(tmp_path_factory.mktemp("logs"), groups, IMPORTS) as made:
        yield made


@pytest.fixture
def place(cluster: LocalCluster) -> Callable[[int], WorkerGroup]:
    """Return a function that returns a place on so many processes."""
    return lambda ranks: cluster.worker_group(f"backend{ranks}", ranks)


@pytest.fixture
def build(place: Callable[[int], WorkerGroup], folders: Callable[..., Path], tmp_path: Path) -> Iterator[Build]:
    """Return a function that builds a backend with sizes of parallel axes on so many ranks; 1 is in this process."""
    built: list[MegatronBackend] = []

    def make(
        model: str | Path = "qwen3", ranks: int = 1, sizes: dict[str, Any] | None = None, dtype: str = "float32",
        *, trained: bool = True, **config: Any,
    ) -> MegatronBackend:  # fmt: skip
        made = MegatronConfig(**{"optimizer": OPTIMIZER, "parallel": ParallelConfig(**(sizes or {})), **config})
        folder, there = model if isinstance(model, Path) else folders(model), place(ranks) if ranks > 1 else None
        context = make_context(tmp_path / f"role-{len(built)}", "backend", folder, there, dtype=dtype)
        context = evolve(context, trained=trained)
        built.append(MegatronBackend(made, context))
        return built[-1]

    yield make
    for backend in built:
        backend.close()
