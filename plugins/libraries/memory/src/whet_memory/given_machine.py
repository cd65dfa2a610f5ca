"""Machines that are described rather than looked at: `8xH100-80GB`, or a file, for `whet check --machine`.

[NODESx]GPUS[+GPUS...][,cores=N][,memory=SIZE]     GPUS: COUNTxNAME, COUNTxNAME-SIZE or COUNTxSIZE
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from attrs import evolve, field, frozen, validators

from whet.config.bounds import FACTOR, PROCESSES, between
from whet.config.document import read_file
from whet.config.messages import nearest
from whet.config.structure import structure
from whet.errors import ConfigError
from whet.plan.placement import Machine

GPU_GIB: Final[Mapping[str, tuple[int, ...]]] = {
    "A10": (24,), "A10G": (24,), "A30": (24,), "A40": (48,), "A100": (40, 80), "A5000": (24,), "A6000": (48,),
    "B200": (180,), "GH200": (96, 144), "H20": (96, 141), "H100": (80,), "H200": (141,), "H800": (80,), "L4": (24,),
    "L40": (48,), "L40S": (48,), "MI210": (64,), "MI250X": (128,), "MI300X": (192,), "MI325X": (256,), "P100": (16,),
    "RTX3090": (24,), "RTX4090": (24,), "RTX5090": (32,), "T4": (16,), "V100": (16, 32),
}  # fmt: skip
"""Memory with which well-known GPUs come. Makers' gigabytes are about 2**30 bytes."""
EXAMPLES: Final = "`8xH100-80GB`, `2x8xA100-40GB`, `4x24GB,cores=32,memory=256GB`, or a YAML file"
_SIZE: Final = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)(M|G|T)i?B?", re.IGNORECASE)
_UNITS: Final = {"M": 2**20, "G": 2**30, "T": 2**40}
_AMOUNTS: Any = validators.deep_mapping(value_validator=between(0, FACTOR))


@frozen
class NodeSection:
    """Machines of one kind, in a file of `whet check --machine`."""

    count: int = field(default=1, validator=between(1, PROCESSES))
    """How many there are."""
    cores: int = field(default=0, validator=between(0, PROCESSES))
    """Processor cores of each; 0: not known."""
    memory: str = ""
    """Memory of each host, e.g. `512GB`; empty: not known, and not checked."""
    gpus: str = ""
    """The GPUs of each host, e.g. `8xH100-80GB`, or `4xA100-40GB+4xA100-80GB`; empty: none."""
    resources: dict[str, float] = field(factory=dict, validator=_AMOUNTS)
    """Custom resources of each node, as `cluster.resources` asks for them."""


@frozen
class MachineFile:
    """A file of `whet check --machine`."""

    nodes: list[NodeSection] = field(validator=validators.min_len(1))
    """The machines."""


def given_machine(text: str) -> Machine:
    """Return the machines that a text describes, or the file of that name. Raises `ConfigError`."""
    try:
        first, *others = _of_file(Path(text)) if Path(text).suffix in (".yaml", ".yml") else _of_words(text)
    except ConfigError as error:
        raise ConfigError([f"--machine: {problem}" for problem in error.problems]) from error
    return evolve(first, others=tuple(others), given=True)


def _of_file(file: Path) -> list[Machine]:
    sections = structure(read_file(file).value, MachineFile, None).nodes
    nodes = list[Machine]()
    for i, section in enumerate(sections):
        try:
            nodes += [_node(section)] * section.count
        except ConfigError as error:
            raise ConfigError([f"{file}: nodes.{i}.{problem}" for problem in error.problems]) from error
    return nodes


def _of_words(text: str) -> list[Machine]:
    """Read the compact form."""
    first, *rest = text.replace(" ", "").split(",")
    if not first:
        raise ConfigError(f"found {text!r}; wanted for example {EXAMPLES}")
    keys = dict[str, str]()
    if "=" in first:
        first, rest = "", [first, *rest]
    for word in rest:
        key, _, value = word.partition("=")
        if key not in ("cores", "memory", "nodes") or not value:
            raise ConfigError(f"found {word!r} in {text!r}; wanted cores=N, memory=SIZE or nodes=N")
        if key in keys:
            raise ConfigError(f"{key} is given twice in {text!r}")
        keys[key] = value
    count, gpus = keys.get("nodes", "1"), first
    if several := re.fullmatch(r"(\d+)x(\d+x.*)", first, re.IGNORECASE):
        if "nodes" in keys:
            raise ConfigError(f"the number of machines is given twice in {text!r}: {several[1]}x, and nodes={count}")
        count, gpus = several[1], several[2]
    numbers = {"nodes": count, "cores": keys.get("cores", "0")}
    for key, number in numbers.items():
        least = 1 if key == "nodes" else 0
        if not number.isdecimal() or not least <= int(number[:9]) <= PROCESSES or len(number) > 9:
            raise ConfigError(f"{key} is {number!r} in {text!r}, wanted a whole number from {least} to {PROCESSES}")
    section = NodeSection(int(count), int(numbers["cores"]), keys.get("memory", ""), gpus)
    return [_node(section)] * section.count


def _node(section: NodeSection) -> Machine:
    sizes = [size for words in section.gpus.split("+") if section.gpus for size in _gpus(words)]
    memory = _size(section.memory, "memory") if section.memory else None
    return Machine(section.cores, len(sizes), memory, tuple(sizes), section.resources)


def _gpus(words: str) -> list[int]:
    """Return the bytes of each of some GPUs of one kind."""
    found = re.fullmatch(r"(\d{1,4})x(.+)", words.strip(), re.IGNORECASE)
    if not found:
        raise ConfigError(f"gpus: found {words!r}; wanted for example {EXAMPLES}")
    return [_gpu_bytes(found[2])] * int(found[1])


def _gpu_bytes(words: str) -> int:
    if _SIZE.fullmatch(words):
        return _size(words, "gpus")
    name, _, given = words.partition("-")
    if given:
        return _size(given, "gpus")
    sizes = GPU_GIB.get(name.upper().replace("_", ""), ())
    if len(sizes) == 1:
        return sizes[0] << 30
    if sizes:
        listed = " or ".join(f"{name}-{size}GB" for size in sizes)
        raise ConfigError(f"gpus: {name} comes with {' and '.join(map(str, sizes))} GB; write {listed}")
    meant = nearest(name.upper(), GPU_GIB)
    hint = f"did you mean {meant}? Else " if meant else ""
    raise ConfigError(
        f"gpus: the memory of {name[:80]!r} is not known here; {hint}write it behind the name: {name[:80]}-80GB"
    )


def _size(words: str, what: str) -> int:
    found = _SIZE.fullmatch(words.strip())
    size = int(float(found[1]) * _UNITS[found[2].upper()]) if found else 0
    if not size:
        raise ConfigError(f"{what}: found {words[:80]!r}, wanted a size, e.g. 80GB or 1.5TB")
    return size
