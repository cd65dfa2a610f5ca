"""The pytest plugin of `whet-testing`: fixtures for models, real data, Ray and left processes; the marker `gpu`.

pytest loads this module in every session where `whet-testing` is installed, so the module imports nothing heavy.
"""

import gc
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from whet_testing.another_interpreter import AnotherInterpreter

pytest.register_assert_rewrite("whet_testing.contracts")


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker `gpu`."""
    config.addinivalue_line("markers", "gpu: needs a GPU; skipped with a reason where there is none")


def pytest_unconfigure() -> None:
    """Keep the interpreter's end from searching all memory for cycles, which takes a second where torch is imported."""
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test marked `gpu` where there is no GPU."""
    if item.get_closest_marker("gpu") is None:
        return
    import torch

    if not torch.cuda.is_available():
        pytest.skip("needs a GPU, and torch sees none on this machine")


@pytest.fixture(scope="session")
def tiny_tokenizer() -> Any:
    """Return a `transformers` tokenizer of 384 tokens with a chat template, trained for this session."""
    from whet_start.small_models import make_tokenizer

    return make_tokenizer(["Compute 7+8-3. What is the answer?", "7+8=15, 15-3=12. \\boxed{12}"] * 20)


@pytest.fixture(scope="session")
def tiny_model_folder(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Any) -> Path:
    """Return a folder with a random two-layer model and its tokenizer. Tests share the folder and only read it."""
    from whet_start.small_models import make_model

    return make_model(tmp_path_factory.mktemp("tiny-model"), tiny_tokenizer)


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Any) -> Callable[..., Path]:
    """Return a function that returns the folder of a random model. Each model is made once in a session.

    The function takes the family, whether embeddings are tied, the seed of the weights, the hidden size, and the
    positions of a context.
    """
    from whet_start.small_models import make_model

    made: dict[tuple[str, bool, int, int, int], Path] = {}

    def folder(
        family: str = "qwen3", *, tied: bool = True, seed: int = 0, hidden: int = 64, max_positions: int = 256
    ) -> Path:
        key = (family, tied, seed, hidden, max_positions)
        if key not in made:
            where = tmp_path_factory.mktemp("model")
            options: Any = {"family": family, "tied": tied, "seed": seed, "hidden": hidden}
            made[key] = make_model(where, tiny_tokenizer, max_positions=max_positions, **options)
        return made[key]

    return folder


@pytest.fixture(scope="session")
def shared_data(pytestconfig: pytest.Config) -> Path:
    """Return the folder of real data: `WHET_SHARED_DATA`, else `shared/data` beside the repository."""
    folder = Path(os.environ.get("WHET_SHARED_DATA", pytestconfig.rootpath.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"real data is read from {folder}, which does not exist; set WHET_SHARED_DATA")
    return folder


@pytest.fixture
def no_orphans() -> Iterator[None]:
    """Fail the test when a process that the test started, or a descendant of it, outlives the test by five seconds."""
    from whet_testing.processes import adopting_orphans, end, survivors

    with adopting_orphans():
        before = survivors(frozenset())
        yield
        left = survivors(before, patience_seconds=5.0)
        end(left)
    assert not left, f"the test left processes behind: {', '.join(sorted(map(str, left)))}"


@pytest.fixture(scope="session")
def another_interpreter() -> "Iterator[AnotherInterpreter]":
    """Yield an interpreter in which the hashes of texts are others, to call methods of contracts in it."""
    if not sys.platform.startswith("linux"):
        pytest.skip("programs are forked on Linux only")
    from whet_testing.another_interpreter import AnotherInterpreter

    with AnotherInterpreter() as one:
        yield one


@pytest.fixture(scope="module")
def forked_workers() -> Iterator[None]:
    """Fork the worker processes that tests start from this process; see `whet_testing.forked_children`."""
    from whet_testing.forked_children import forked_children

    with forked_children():
        yield
