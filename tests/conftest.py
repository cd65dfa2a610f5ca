"""whet as people start it: its command in a process of its own, and an environment in which they may install things."""

import importlib.util
import os
import shutil
import subprocess
import sys
import time
import venv
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from attrs import frozen

from whet.runtime.worker_process import import_ahead
from whet_testing import warm
from whet_testing.environments import make_wheels
from whet_testing.forking import Program, Programs

Shell = Callable[[str, Path], str]
IMPORTED = (
    "whet.cli.app", "whet.plan.prepare", "whet.run.compose", "whet_fsdp2.worker", "whet_hf.worker",
    "transformers.modeling_utils",
)  # fmt: skip
"""What workers, and all commands, import."""
OF_RUNS = (
    "whet.plugins.registry:load_plugins", "whet.rollout.event_loop", "whet.rollout.recorder", "whet.runtime.inline",
    "whet.runtime.local", "whet_chat.learn", "whet_chat.tokenizer", "whet_data.readers", "whet_fsdp2.backend",
    "whet_fsdp2.checks", "whet_grpo.grpo", "whet_hf.checks", "whet_hf.generator", "whet_memory.forecasts",
    "whet_memory.tracer", "whet_sandbox.open", "whet_sglang.arguments", "whet_vllm.arguments", "whet_weights.exchange",
    "whet_weights.probe", "whet_weights.shared_memory",
)  # fmt: skip
"""What most runs import besides."""

COMMAND = """
from whet.cli import main
from whet_testing.forked_children import forked_children
with forked_children():
    main()
"""


@frozen
class Ended:
    """A command that has ended."""

    code: int
    output: str
    errors: str
    seconds: float

    @property
    def error(self) -> str:
        """What it ended with: a message in plain words and the exit code 1, or the test fails."""
        assert self.code == 1, f"exit code {self.code}\n{self.output}\n{self.errors}"
        assert "Traceback" not in self.errors
        *_, error = f"\n{self.errors}".partition("\nError: ")  # warnings before it may quote errors
        assert error, self.errors
        return error.strip()


@pytest.fixture
def judge_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], Path]:
    """Return a function that writes a model with a new value head beside it, as a judge, and returns the folder."""

    def write(model: Path) -> Path:
        from transformers import AutoModelForSequenceClassification

        folder = shutil.copytree(model, tmp_path_factory.mktemp("judge"), dirs_exist_ok=True)
        AutoModelForSequenceClassification.from_pretrained(model, num_labels=1).save_pretrained(folder)
        return folder

    return write


@pytest.fixture(scope="session")
def programs() -> Iterator[Programs]:
    """Start what forks the commands: it has imported what commands and workers import, as far as it is installed."""
    there = ("whet_megatron.ahead",) if importlib.util.find_spec("megatron") else ()
    with Programs((*IMPORTED, *OF_RUNS, *there, "whet_testing.warm:decoding")) as started:
        yield started


@pytest.fixture(scope="session")
def whet(programs: Programs) -> Callable[..., Ended]:
    """Run `whet` with arguments, in a folder if one is given, by a new start of `python` if that is given.

    `variables` are added to the environment variables of this process.
    """

    def run(
        *arguments: object,
        folder: Path | None = None,
        python: Path | None = None,
        variables: Mapping[str, str] | None = None,
        seconds: float = 120,
    ) -> Ended:
        words, begin = list(map(str, arguments)), time.monotonic()
        its = {**os.environ, **(variables or {})}
        if python is None:
            done = programs.run(COMMAND, words, folder=folder, variables=its, seconds=seconds)
        else:
            command = [str(python), "-m", "whet", *words]
            done = subprocess.run(
                command, capture_output=True, text=True, cwd=folder, env=its, timeout=seconds, check=False
            )
        return Ended(done.returncode, done.stdout, done.stderr, time.monotonic() - begin)

    return run


@pytest.fixture(scope="session")
def start_whet(programs: Programs) -> Callable[..., Program]:
    """Start `whet` with arguments, in a folder if one is given, and return the program. See `Programs.start`."""

    def start(*arguments: object, folder: Path | None = None, variables: Mapping[str, str] | None = None) -> Program:
        return programs.start(COMMAND, list(map(str, arguments)), folder=folder, variables=variables)

    return start


@pytest.fixture(scope="session")
def small_run(tiny_model_folder: Path) -> Callable[..., Path]:
    """Write the config of a small GRPO run into a folder; sections that are given take the place of its own."""

    def write(folder: Path, **sections: Any) -> Path:
        config: Mapping[str, Any] = {
            "run": {"folder": str(folder / "run"), "steps": 3},
            "model": {"path": str(tiny_model_folder)},
            "algorithm": {"use": "grpo", "prompts_per_step": 4, "group_size": 2},
            "backend": {"use": "fsdp2", "optimizer": {"lr": 1.0e-3}},
            "generator": {"use": "hf"},
            "rollout": {"max_tokens": 8},
            "environments": [{"use": "even"}],
            "cluster": {"threads": {"backend": 1, "generator": 1}},
            "plugins": [str(Path(__file__).parent / "even_digits.py")],
            **sections,
        }
        path = folder / "run.yaml"
        path.write_text(yaml.safe_dump(config), encoding="utf-8")
        return path

    return write


@pytest.fixture
def backend(tmp_path: Path, tiny_model_folder: Path) -> Iterator[Callable[..., Any]]:
    """Return a function that builds a backend on the tiny model, in this process or elsewhere; all are closed after."""
    from whet_fsdp2.backend import Fsdp2Backend
    from whet_fsdp2.config import Fsdp2Config, OptimizerConfig
    from whet_testing.role_context import make_context

    built: list[Fsdp2Backend] = []

    def build(place: Any = None, **config: Any) -> Fsdp2Backend:
        settings = Fsdp2Config(optimizer=OptimizerConfig(lr=1e-3), **config)
        context = make_context(tmp_path / str(len(built)), "backend", tiny_model_folder, place)
        built.append(Fsdp2Backend(settings, context))
        return built[-1]

    yield build
    for one in built:
        one.close()


@pytest.fixture(scope="session")
def new_layer(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Path]:
    """Return a function that makes a virtual environment, and returns its folder of commands; see `layered`."""
    return lambda: layered(tmp_path_factory.mktemp("layer") / "venv")


@pytest.fixture(scope="session")
def layered_python(new_layer: Callable[[], Path]) -> Path:
    """The folder of commands of an environment that the tests share."""
    return new_layer()


def layered(folder: Path) -> Path:
    """Make a virtual environment that also sees everything installed here; give its folder of commands."""
    venv.create(folder, with_pip=False, symlinks=True)
    here = next(p for p in sys.path if p.endswith("site-packages"))
    site = next(folder.glob("lib/python*/site-packages"))
    # `addsitedir` rather than a plain path, so that editable installs below are seen too.
    (site / "outer.pth").write_text(f"import site; site.addsitedir({here!r})\n")
    run_whet = "-c 'from whet.cli import main; main()'"
    for command, how in (("pip", "-m pip"), ("pytest", "-m pytest"), ("whet", run_whet)):
        script = folder / "bin" / command
        script.write_text(f'#!/bin/sh\nexec "{folder}/bin/python" {how} "$@"\n')
        script.chmod(0o755)
    return folder / "bin"


@pytest.fixture
def offline_environments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make `whet env create` find what is installed here, without a network. Return the folder that it writes to."""
    wheels = make_wheels(
        ["whet", "whet-hf", "whet-generation", "whet-weights", "hatchling", "editables"], tmp_path / "here"
    )
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setenv("WHET_ENVIRONMENTS", str(tmp_path / "environments"))
    return tmp_path / "environments"


@pytest.fixture
def shell(layered_python: Path) -> Shell:
    """Return a function that runs bash text in a folder and returns its output, or fails the test."""
    environment = {
        **os.environ,
        "PATH": f"{layered_python}:{os.environ['PATH']}",
        "VIRTUAL_ENV": str(layered_python.parent),
        "PIP_NO_BUILD_ISOLATION": "0",  # pip's own way to say yes
        "PIP_NO_INDEX": "1",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "120",
    }

    def run(text: str, folder: Path) -> str:
        command = ["bash", "-e", "-o", "pipefail", "-c", text]
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240, check=False
        )
        assert done.returncode == 0, f"{text}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
        return done.stdout

    return run


@pytest.fixture(scope="session")
def _threads() -> int:
    """Do what workers do first, and give the number of threads that torch has then."""
    import_ahead(list(IMPORTED))
    warm.decoding()
    import torch

    return torch.get_num_threads()


@pytest.fixture(scope="module", autouse=True)
def _forked(_threads: int, forked_workers: None) -> None:
    """Workers that start from this process need not import torch again."""


@pytest.fixture(autouse=True)
def _threads_as_before(_threads: int) -> Iterator[None]:
    """An inline worker has set the threads of this process; with more than one, no worker would be forked any more."""
    yield
    import torch

    torch.set_num_threads(_threads)
