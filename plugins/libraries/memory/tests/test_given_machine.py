"""Machines that are described in a few words, or in a file."""

from pathlib import Path

import pytest

from whet.errors import ConfigError
from whet_memory.given_machine import GPU_GIB, given_machine

GIB = 2**30


@pytest.mark.parametrize(
    ("words", "nodes"),
    [
        ("8xH100-80GB", [(0, None, (80,) * 8)]),
        ("8xH100", [(0, None, (80,) * 8)]),
        ("2x8xa100-40GiB", [(0, None, (40,) * 8)] * 2),
        ("4x24G,cores=32,memory=0.25TB", [(32, 256, (24,) * 4)]),
        ("1xH100+2xA100-40GB", [(0, None, (80, 40, 40))]),
        ("cores=8,memory=16GB,nodes=3", [(8, 16, ())] * 3),
    ],
)
def test_a_few_words_describe_machines(words: str, nodes: list[tuple[int, int | None, tuple[int, ...]]]) -> None:
    machine = given_machine(words)
    assert machine.given
    found = [
        (
            node.cores,
            node.memory_bytes and node.memory_bytes // GIB,
            tuple((size or 0) // GIB for size in node.gpu_bytes),
        )
        for node in machine.nodes
    ]
    assert found == nodes
    assert [node.gpus for node in machine.nodes] == [len(gpus) for _, _, gpus in nodes]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("H100", "gpus: found 'H100'; wanted for example `8xH100-80GB`"),
        ("8xA100", "A100 comes with 40 and 80 GB; write A100-40GB or A100-80GB"),
        ("8xH1000", "the memory of 'H1000' is not known here; did you mean H100?"),
        ("8xH100-80", "gpus: found '80', wanted a size"),
        ("8xH100,memory=lots", "memory: found 'lots', wanted a size, e.g. 80GB or 1.5TB"),
        (f"8x{'9' * 320}GB", "the memory of '99999999"),
        (f"8xH100,memory={'9' * 320}GB", "memory: found '99999999"),
        ("8xH100-0.0000001MB", "gpus: found '0.0000001MB', wanted a size"),
        ("8xH100-80GB+", "gpus: found ''; wanted for example"),
        ("8xH100,cores=many", "cores is 'many'"),
        ("0x8xH100", "nodes is '0'"),
        ("999999999x8xH100", "nodes is '999999999'"),
        ("99999xH100", "gpus: found '99999xH100'"),
        ("8xH100,corse=3", "found 'corse=3' in '8xH100,corse=3'; wanted cores=N"),
        ("2x8xH100,nodes=4", "the number of machines is given twice in '2x8xH100,nodes=4': 2x, and nodes=4"),
        ("8xH100,cores=8,cores=16", "cores is given twice"),
        ("", "wanted for example"),
        ("gone.yaml", "there is no file 'gone.yaml'"),
    ],
)
def test_what_describes_no_machine_is_refused_in_words(words: str, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        given_machine(words)
    assert str(caught.value).startswith("--machine: ")
    assert told in str(caught.value)


def test_a_file_lists_machines_that_are_not_alike(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(
        "nodes:\n"
        "  - {count: 2, cores: 96, memory: 1TB, gpus: 8xH100-80GB, resources: {sampler: 8}}\n"
        "  - {cores: 64, memory: 512GB}\n"
    )
    machine = given_machine(str(file))
    assert [(node.cores, node.gpus, dict(node.resources)) for node in machine.nodes] == [
        (96, 8, {"sampler": 8.0}), (96, 8, {"sampler": 8.0}), (64, 0, {}),
    ]  # fmt: skip
    file.write_text("nodes: [{gpu: 8xH100}]")
    with pytest.raises(ConfigError, match=r"--machine: nodes\.0\.gpu: unknown key \(did you mean 'gpus'\?\)"):
        given_machine(str(file))
    file.write_text("nodes: [{gpus: 8xA100}]")
    with pytest.raises(ConfigError, match=r"nodes\.0\.gpus: A100 comes with 40 and 80 GB"):
        given_machine(str(file))


def test_every_gpu_that_is_known_can_be_written() -> None:
    for name, sizes in GPU_GIB.items():
        for size in sizes:
            assert given_machine(f"1x{name}-{size}GB").gpu_bytes == (size * GIB,)
