"""An engine's log is turned into the few lines that say why it ended."""

import json
import logging.config
from pathlib import Path

import pytest

from whet_vllm.words import last_words, logging_config

LOG = """\
[MainProcess] INFO Initializing a V1 LLM engine
[VllmWorker-0] ERROR WorkerProc failed to start.
Traceback (most recent call last):
  File "/x/multiproc_executor.py", line 900, in worker_main
    worker = WorkerProc(*args, **kwargs)
ValueError: Head size 16 is not supported by CPU attention.
  Supported head sizes are: 32, 64.
[EngineCore] ERROR EngineCore failed to start.
Traceback (most recent call last):
  File "/x/core.py", line 1, in run_engine_core
    raise e from None
Exception: WorkerProc initialization failed due to an exception in a background process. See stack trace for root cause.
"""


def test_the_first_cause_is_quoted_and_those_that_only_point_to_it_are_not(tmp_path: Path) -> None:
    (tmp_path / "log").write_text(LOG)
    said = last_words(tmp_path / "log")
    assert said == "ValueError: Head size 16 is not supported by CPU attention.\n  Supported head sizes are: 32, 64."


def test_without_an_error_the_last_lines_are_quoted(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("\n".join(f"[EngineCore] INFO line {n}" for n in range(9)) + "\n\n")
    assert last_words(tmp_path / "log").splitlines() == [f"[EngineCore] INFO line {n}" for n in (6, 7, 8)]
    assert last_words(tmp_path / "none") == ""


def test_an_error_that_is_logged_lands_in_the_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "engine.log"
    logging.config.dictConfig(json.loads(logging_config(tmp_path / "config.json", log).read_text()))
    try:
        raise MemoryError("no room for 7 GiB of cache")
    except MemoryError:
        logging.getLogger("vllm.worker").exception("it failed")
    logging.getLogger("vllm.worker").info("a detail")
    assert last_words(log) == "MemoryError: no room for 7 GiB of cache"
    assert "a detail" in log.read_text()
    assert "a detail" not in capsys.readouterr().err
    logging.getLogger("vllm").handlers.clear()
