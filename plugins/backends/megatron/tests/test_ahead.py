"""What the import of Megatron Core brings with it."""

import os
import subprocess
import sys
from pathlib import Path

CODE = """
import os, sys
import whet_megatron.worker, whet_megatron.generator.worker
assert "megatron" not in sys.modules, "before it is known whether it can be imported"
import whet_megatron.ahead
assert "megatron.core.models.gpt" in sys.modules
assert "wandb" not in sys.modules
print("threads:", len(os.listdir("/proc/self/task")))
"""


def test_megatron_is_imported_ahead_alone_and_without_trackers_and_starts_no_thread(tmp_path: Path) -> None:
    (tmp_path / "wandb.py").write_text("raise SystemExit('wandb was imported')")
    variables = {**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, env=variables, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "threads: 1\n"
