"""What an engine's processes leave in shared memory is removed after them."""

import subprocess
import sys
from pathlib import Path

import pytest

from whet_vllm.leftovers import note, sweep

CODE = """
from multiprocessing import resource_tracker, shared_memory
made = shared_memory.SharedMemory(create=True, size=4096)
resource_tracker.unregister(made._name, "shared_memory")
print(made.name, flush=True)
input()
"""


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="there is no /dev/shm here")
def test_shared_memory_of_a_process_that_was_killed_is_removed(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", CODE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    segment = Path("/dev/shm") / child.stdout.readline().strip()
    note(tmp_path / "noted")
    child.kill()
    child.communicate()
    assert segment.exists()
    assert (tmp_path / "noted").read_text().split() == [str(segment)]
    sweep(tmp_path / "noted")
    assert not segment.exists()
    sweep(tmp_path / "noted")
