"""What an engine writes lands where its last words are looked for."""

import json
import logging.config
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from whet_generation.engine_log import causes
from whet_vllm.log_capture import captured_stderr, end_capture, logging_config


def test_an_error_that_is_logged_lands_in_the_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "engine.log"
    logging.config.dictConfig(json.loads(logging_config(tmp_path / "config.json", log).read_text()))
    try:
        raise MemoryError("no room for 7 GiB of cache")
    except MemoryError:
        logging.getLogger("vllm.worker").exception("it failed")
    logging.getLogger("vllm.worker").info("a detail")
    assert causes(log) == "MemoryError: no room for 7 GiB of cache"
    assert "a detail" in log.read_text()
    assert "a detail" not in capsys.readouterr().err
    logging.getLogger("vllm").handlers.clear()


def test_what_a_process_dies_of_before_it_logs_is_overheard_and_still_said(tmp_path: Path, capfd: Any) -> None:
    log, program = tmp_path / "engine.stderr", "import sys; sys.stdin.read(); import no_such_engine"
    with captured_stderr(log) as tee:
        process = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE)
        os.write(2, b"by this process meanwhile\n")
    os.write(2, b"by this process later\n")
    assert tee.poll() is None, "it goes on as long as the process lives"
    process.communicate()
    end_capture(tee)
    assert causes(tmp_path / "none", log) == "ModuleNotFoundError: No module named 'no_such_engine'"
    said = capfd.readouterr().err
    assert "No module named 'no_such_engine'" in said
    assert said.count("by this process") == 2
    assert "later" not in log.read_text()
