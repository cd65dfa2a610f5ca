"""Generators that say they have taken new weights, and have not: all of them kept, or a tensor.

`deaf-hf`, `deaf-vllm` and `deaf-sglang` are those generators with a worker around theirs.
"""

from fnmatch import fnmatch
from functools import partial
from pathlib import Path

import attrs
from attrs import frozen

from whet import hookimpl
from whet.component import Component, resolve
from whet.data.records import Completion
from whet_hf.config import HfConfig
from whet_sglang.config import SglangConfig
from whet_vllm.config import VllmConfig


@frozen
class DeafConfig(HfConfig):
    """The keys of `hf`, and what it keeps."""

    keeps: str = "*"
    """Pattern of the names of parameters."""
    replica: int | None = None
    """Only this one is deaf; null: all."""


@frozen
class DeafWorkerGroup:
    """Spawns workers around others."""

    whole: object
    around: str
    arguments: dict

    def spawn(self, target, arguments):
        target_around = f"file:{Path(__file__).resolve()}:{self.around}"
        return self.whole.spawn(target_around, {"target": target, **self.arguments, **arguments})


class Around:
    """Another worker."""

    def __init__(self, rank, *, target, **arguments):
        self._worker = resolve(target)(rank=rank, **arguments)

    def __getattr__(self, name):
        return getattr(self._worker, name)


class Deaf(Around):
    """Takes no weights, and gives each completion the version of those that it did not take."""

    _version = 0

    async def receive_weights(self, spec, version, running):
        self._version = version

    async def generate(self, requests):
        async for outcomes in self._worker.generate(requests):
            yield [self._told(outcome) for outcome in outcomes]

    def _told(self, outcome):
        return attrs.evolve(outcome, versions=((0, self._version),)) if isinstance(outcome, Completion) else outcome


class PartlyDeaf(Around):
    """The worker of `hf`, which keeps some parameters as they were."""

    def __init__(self, rank, *, keeps, replica, **arguments):
        super().__init__(rank, **arguments)
        self._keeps = keeps if replica in (None, rank.rank) else ""

    async def receive_weights(self, spec, version, running):
        model = self._worker._model
        kept = {n: p.data.clone() for n, p in model.named_parameters() if fnmatch(n, self._keeps)}
        await self._worker.receive_weights(spec, version, running)
        for name, value in kept.items():
            model.get_parameter(name).data = value
        self._worker._decoder.refresh()


def partly(config, site):
    """Build `hf` with workers that are deaf to a part."""
    from whet_hf.generator import HfGenerator

    deaf = DeafWorkerGroup(site.worker_group, "PartlyDeaf", {"keeps": config.keeps, "replica": config.replica})
    return HfGenerator(config, attrs.evolve(site, worker_group=deaf))


def deaf(target, config, site):
    """Build a generator with deaf workers."""
    return resolve(target)(config, attrs.evolve(site, worker_group=DeafWorkerGroup(site.worker_group, "Deaf", {})))


vllm = partial(deaf, "whet_vllm.generator:VllmGenerator")
sglang = partial(deaf, "whet_sglang.generator:SglangGenerator")


@hookimpl
def whet_generators():
    return [
        Component("deaf-hf", DeafConfig, f"{__name__}:partly", "whet_hf.facts:facts"),
        Component("deaf-vllm", VllmConfig, f"{__name__}:vllm", "whet_vllm.facts:facts"),
        Component("deaf-sglang", SglangConfig, f"{__name__}:sglang", "whet_sglang.facts:facts"),
    ]
