"""An engine's log is turned into the few lines that say why it ended."""

from pathlib import Path

from whet_generation.engine_log import causes, errors

LOG = """\
[MainProcess] INFO Initializing a V1 LLM engine
[VllmWorker-0] ERROR WorkerProc failed to start.
Traceback (most recent call last):
  File "/x/multiproc_executor.py", line 900, in worker_main
    worker = WorkerProc(*args, **kwargs)
ValueError: Head size 16 is not supported by CPU attention.
  Supported head sizes are: 32, 64.
[2026-01-02 03:04:05] Scheduler hit an exception: Traceback (most recent call last):
  File "/x/scheduler.py", line 1, in __init__
RuntimeError: Not enough memory.
[EngineCore] ERROR EngineCore failed to start.
Traceback (most recent call last):
  File "/x/core.py", line 1, in run_engine_core
    raise e from None
Exception: WorkerProc initialization failed due to an exception in a background process. See stack trace for root cause.
"""


def test_the_first_cause_is_quoted_and_those_that_only_point_to_it_are_not(tmp_path: Path) -> None:
    (tmp_path / "log").write_text(LOG)
    said = causes(tmp_path / "log")
    assert said.splitlines() == [
        "ValueError: Head size 16 is not supported by CPU attention.",
        "  Supported head sizes are: 32, 64.",
        "RuntimeError: Not enough memory.",
    ]


def test_without_an_error_the_last_lines_are_quoted(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("\n".join(f"[EngineCore] INFO line {n}" for n in range(9)) + "\n\n")
    assert causes(tmp_path / "log").splitlines() == [f"[EngineCore] INFO line {n}" for n in (6, 7, 8)]
    assert causes(tmp_path / "none") == ""


def test_where_one_log_has_no_error_another_may(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("[EngineCore] WARNING a detail\n")
    (tmp_path / "stderr").write_text("Traceback (most recent call last):\nOSError: libtorch.so: no such file\n")
    assert causes(tmp_path / "log", tmp_path / "stderr") == "OSError: libtorch.so: no such file"
    assert errors(tmp_path / "log") == ""
    assert causes(tmp_path / "log", tmp_path / "none") == "[EngineCore] WARNING a detail"
