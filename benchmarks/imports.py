"""Measure how long a process takes that imports what a trainer and a generator import, and ends, in processor seconds.

    python benchmarks/imports.py       as Python does it, and as worker processes do it, in turn

The processor seconds do not depend much on what else runs on the machine.
"""

import os
import statistics
import subprocess
import sys

MODULES = ("whet_fsdp2.worker", "whet_hf.worker", "transformers.modeling_utils")
PYTHON = "import importlib, sys\nfor module in sys.argv[1:]:\n    importlib.import_module(module)"
WORKER = "import gc, sys\nfrom whet.runtime.worker_process import import_ahead\nimport_ahead(sys.argv[1:])\ngc.freeze()"
ROUNDS = 5


def main() -> None:
    """Run both in turn and print the medians."""
    found: dict[str, list[float]] = {PYTHON: [], WORKER: []}
    for _ in range(ROUNDS):
        for program, seconds in found.items():
            seconds.append(measure(program))
    before, now = (statistics.median(seconds) for seconds in found.values())
    print(f"as Python does it {before:.2f} s, as a worker process does it {now:.2f} s, median of {ROUNDS} rounds each")


def measure(program: str) -> float:
    """Return the processor seconds of a program of Python, from its start to its end."""
    process = subprocess.Popen([sys.executable, "-c", program, *MODULES])
    _, status, used = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"the program ended with {os.waitstatus_to_exitcode(status)}")
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
