"""Compiled layers: the same numbers, no new code for rows of other lengths, and errors that name what to change."""

import os
import tempfile

import pytest

from whet.component import Spec
from whet.errors import ConfigError
from whet_fsdp2 import compiled
from whet_fsdp2.backend import Fsdp2Backend
from whet_fsdp2.config import Fsdp2Config, OptimizerConfig
from whet_testing.held import held_processes
from whet_testing.role_context import make_context

LOSS = Spec("whet_testing.losses:Likelihood")
IMPORTS = ("whet_fsdp2.worker", "transformers.modeling_utils")


@pytest.fixture(scope="module", autouse=True)
def _cache(tmp_path_factory):
    """Keep compiled code in a folder of the tests, so that each session compiles it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(compiled.CACHE_DIR, str(tmp_path_factory.mktemp("compiled")))
        yield


@pytest.fixture(scope="module", autouse=True)
def _forked():
    """No process is forked from this one: the compiler has threads and processes of its own."""


def numbers(found):
    return {name: found[name].number() for name in ("loss", "grad_norm", "tokens")}


def graphs():
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


def test_compiled_layers_compute_the_same_and_are_compiled_once(make_worker, make_batch):
    plain, fast = make_worker(), make_worker(compile=True)
    assert graphs()
    made = set()
    for seed in range(5):
        batch = make_batch(seed)
        assert numbers(fast.train(batch, LOSS)) == pytest.approx(numbers(plain.train(batch, LOSS)), rel=1e-4)
        expected = plain.score(batch, ("logprobs",))["logprobs"]
        assert fast.score(batch, ("logprobs",))["logprobs"] == pytest.approx(expected, abs=2e-4)
        made.add(graphs())
    assert len(made) == 1


def test_ranks_with_checkpointing_compute_the_same_as_one_rank_without(folders, make_batch, tmp_path):
    built = []
    with held_processes(tmp_path, {("backend",): 2}, IMPORTS) as cluster:
        for size in (1, 2):
            several = {"compile": True, "gradient_checkpointing": True} if size > 1 else {}
            config = Fsdp2Config(optimizer=OptimizerConfig(lr=1e-2), micro_batch_tokens=40, **several)
            place = cluster.worker_group("backend", size) if size > 1 else None
            built.append(Fsdp2Backend(config, make_context(tmp_path / str(size), "backend", folders(), place)))
        for seed in range(3):
            expected, found = (numbers(backend.train(make_batch(seed), LOSS)) for backend in built)
            assert found == pytest.approx(expected, rel=1e-4)
        for backend in built:
            backend.close()


def test_a_missing_compiler_is_named(make_worker, monkeypatch, tmp_path):
    import torch

    torch._dynamo.reset()
    monkeypatch.setenv(compiled.CACHE_DIR, str(tmp_path))
    monkeypatch.setattr(torch._inductor.config.cpp, "cxx", (None, str(tmp_path / "no-compiler")))
    with pytest.raises(ConfigError, match=r"backend\.compile: torch\.compile does not work .* needs a C\+\+ compiler"):
        make_worker(compile=True)
    torch._dynamo.reset()


def test_layers_that_compute_something_else_are_refused(make_worker, monkeypatch):
    monkeypatch.setattr("torch.compile", lambda run, dynamic: lambda *args, **more: 1.5 * run(*args, **more))
    with pytest.raises(ConfigError, match=r"backend\.compile: compiled, outputs of Qwen3ForCausalLM differ by"):
        make_worker(compile=True)


def test_compiled_code_is_kept_where_no_other_user_can_write(monkeypatch, tmp_path):
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for before, after in (
        (default_cache_dir(), str(tmp_path / "whet" / "compiled")),
        (str(tmp_path / "own"), str(tmp_path / "own")),
    ):
        monkeypatch.setenv(compiled.CACHE_DIR, before)
        compiled.keep_code_with_the_user()
        assert os.environ[compiled.CACHE_DIR] == after


def test_compiled_code_is_of_this_process_alone_where_there_is_no_home_folder(monkeypatch, tmp_path):
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as where neither HOME nor the user is known
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv(compiled.CACHE_DIR, "")
    monkeypatch.delenv(compiled.CACHE_DIR)
    compiled.keep_code_with_the_user()
    (folder,) = tmp_path.iterdir()
    assert os.environ[compiled.CACHE_DIR] == str(folder)
    assert folder.stat().st_mode & 0o777 == 0o700
