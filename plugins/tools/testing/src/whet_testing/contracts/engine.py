"""The rules for plugins whose generator runs a foreign engine. `EngineContract` needs no installed engine,
`EngineFailuresContract` does.

class TestPlugin(EngineContract):
    hooks = "my_plugin.hooks"
    engine = ENGINE
    arguments = staticmethod(engine_arguments)
"""

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest

from whet.component import GeneratorFacts, resolve
from whet.config.sections import DeadlinesSection
from whet.data.records import Request, Sampling
from whet.errors import WorkerError, WorkerLost
from whet.interfaces.generator import Generator
from whet.runtime.local import LocalCluster
from whet_generation.external_engine import CPU_CACHE_GIB, ForeignEngine
from whet_testing.contracts.component import MODEL, ComponentContract
from whet_testing.processes import descendants
from whet_testing.role_context import make_context

Make = Callable[..., Generator]


class EngineContract(ComponentContract):
    """Inherit this class, and set `hooks`, `engine` and `arguments`."""

    engine: ForeignEngine
    arguments: Callable[..., Mapping[str, Any]]
    """Function (config, context, device) -> arguments of the engine."""

    def generator(self, **settings: Any) -> Any:
        """Return a config of the plugin's generator."""
        ((_, component),) = self.components()
        return component.config(**settings)

    def facts(self, **settings: Any) -> GeneratorFacts:
        """Return the facts of the plugin's generator for the small model `MODEL`."""
        ((_, component),) = self.components()
        found = resolve(component.facts)(self.generator(**settings), MODEL)
        assert isinstance(found, GeneratorFacts)
        return found

    @pytest.mark.parametrize(
        "wrong",
        [{"max_batch": 0}, {"cache_gib": 0.0}, {"memory_fraction": 1.5}, {"tensor_parallel": 0}, {"max_context": -1}],
        ids=lambda wrong: next(iter(wrong)),
    )
    def test_settings_that_leave_no_room_are_refused(self, wrong: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match=next(iter(wrong))):
            self.generator(**wrong)

    def test_memory_is_that_of_weights_and_cache(self) -> None:
        def held(**settings: Any) -> list[int]:
            found = self.facts(**settings).memory
            return [term.bytes for term in found(1, False)] if found else []

        assert held() == [4 * MODEL.parameters, int(CPU_CACHE_GIB * 2**30)]
        assert held(dtype="bfloat16", cache_gib=0.5) == [2 * MODEL.parameters, 2**29]
        memory = self.facts().memory
        assert memory is not None
        assert [term.woken for term in memory(1, False)] == ["adapter", ""], "an engine wakes for any weight sync"

    def test_processes_that_cannot_share_the_heads_are_refused(self) -> None:
        found = self.facts(tensor_parallel=3).problems
        assert found is not None
        assert [problem.path for problem in found(1)] == ["tensor_parallel"]

    def test_the_engine_is_among_what_its_workers_stand_on(self) -> None:
        assert self.engine.package in self.facts().packages
        assert self.engine.package.install

    def test_where_an_argument_is_set_there_is_such_a_key(self) -> None:
        keys = {field.name for field in attrs.fields(type(self.generator()))}
        named = {where.partition(".")[2] for where in self.engine.ours.values() if where.startswith("generator.")}
        assert named <= keys

    def test_all_that_it_sets_or_forbids_are_arguments_of_the_installed_engine(
        self, tmp_path: Path, tiny_model_folder: Path
    ) -> None:
        if not self.engine.is_here:
            pytest.skip(f"{self.engine.package.name} is not installed")
        context = make_context(tmp_path, "generator", tiny_model_folder)
        ours = {name for device in ("cpu", "cuda") for name in self.arguments(self.generator(), context, device)}
        assert ours | set(self.engine.ours) | set(self.engine.fixed) <= self.engine.known()


DIES_ON_IMPORT = """
import atexit, runpy, sys, warnings
from pathlib import Path
class Broken:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            raise ImportError("libtorch.so: undefined symbol of another torch")
if any("spawn_main" in word for word in sys.orig_argv):
    sys.meta_path.insert(0, Broken())
    for number in range(40):
        atexit.register(warnings.warn, f"there appear to be {{number + 2}} leaked semaphores")
here = Path(__file__).parent
others = (Path(folder) / "sitecustomize.py" for folder in sys.path if Path(folder) != here)
if other := next((file for file in others if file.is_file()), None):
    runpy.run_path(str(other))
"""
"""A `sitecustomize.py`. Python runs it when an interpreter starts.

Python runs only the first `sitecustomize.py` on the path, so this one runs the next one itself.
"""


class EngineFailuresContract:
    """Inherit this class, and set the class of the generator, the class of its config, and the fields below.

    Each test starts an engine that dies or hangs. The call must raise an error that names the cause.
    """

    generator: Callable[..., Generator]
    config: type
    process: str
    """Part of the command line of the engine process that computes."""
    module: str
    """Module that this process imports before any other module of the engine."""
    name: str
    """Name of the engine in error messages."""
    hang_seconds = 5.0
    """Deadline of a request during which the test stops the engine."""

    @pytest.fixture
    def make(self, tmp_path: Path, tiny_model_folder: Path) -> Iterator[Make]:
        """Yield a function that starts a generator on a worker process of its own, and close all of them afterwards."""
        opened: list[Any] = []

        def made(generate_seconds: float = 60.0, **settings: Any) -> Generator:
            deadlines = attrs.evolve(DeadlinesSection(), generate=generate_seconds)
            cluster = LocalCluster(tmp_path / "logs", deadlines=deadlines)
            opened.append(cluster)
            context = make_context(tmp_path, "generator", tiny_model_folder, cluster.worker_group("generator", size=1))
            generator = type(self).generator(self.config(**{"cache_gib": 0.0625, **settings}), context)
            opened.append(generator)
            return generator

        yield made
        for thing in reversed(opened):
            thing.close()

    def engine_process(self) -> int:
        """Return the id of the process that computes, not of its children; 0 if there is none yet."""
        return min((p.pid for p in descendants() if self.process in p.command), default=0)

    async def struck(
        self, generator: Generator, number: signal.Signals, look: Callable[[int], None] = lambda process: None
    ) -> tuple[BaseException, float]:
        """Send a signal to the engine while it serves requests.

        Call `look` with the id of the engine process before the signal. Return the error of the last request, and the
        seconds from the signal to the error.
        """

        def request(name: str, most: int) -> Request:
            return Request(name, np.array([5, 6, 7]), Sampling(max_tokens=most), 0)

        await generator.generate(request("first", 8))
        process = self.engine_process()
        assert process
        tasks = [asyncio.ensure_future(generator.generate(request(f"later-{n}", 240))) for n in range(32)]
        await asyncio.sleep(0.1)
        assert not tasks[-1].done()
        look(process)
        os.kill(process, number)
        begin = time.monotonic()
        *_, found = await asyncio.gather(*tasks, return_exceptions=True)  # the engine has not begun the last request
        assert isinstance(found, BaseException), "it was served by an engine that had been struck"
        return found, time.monotonic() - begin

    def test_an_engine_that_is_killed_is_a_lost_worker(self, make: Make) -> None:
        found, seconds = asyncio.run(self.struck(make(max_batch=2), signal.SIGKILL))
        assert isinstance(found, WorkerLost)
        assert f"{self.name}'s engine has died" in found.last_words
        assert seconds < 30

    def test_an_engine_that_hangs_is_a_lost_worker_after_its_deadline(self, make: Make) -> None:
        generator = make(generate_seconds=self.hang_seconds, max_batch=2)
        found, seconds = asyncio.run(self.struck(generator, signal.SIGSTOP))
        assert isinstance(found, WorkerLost)
        assert "generate" in str(found)
        assert 4 < seconds < 60

    def test_an_engine_whose_process_dies_on_import_says_of_what(
        self, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folder = tmp_path / "broken"
        folder.mkdir()
        (folder / "sitecustomize.py").write_text(DIES_ON_IMPORT.format(module=self.module))
        monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
        with pytest.raises(
            WorkerError, match=f"generator rank 0 failed in start: {self.name} .*did not start"
        ) as raised:
            make()
        assert "ImportError: libtorch.so: undefined symbol of another torch" in raised.value.cause
        assert "leaked semaphores" not in raised.value.cause
