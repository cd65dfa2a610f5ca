"""What an engine writes lands where its last words are looked for."""

import json
import logging.config
from pathlib import Path

import pytest

from whet.cluster.words import causes
from whet_vllm.words import logging_config


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
