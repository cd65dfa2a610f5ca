"""Where an engine's processes write."""

import json
from pathlib import Path


def logging_config(file: Path, log: Path) -> Path:
    """Write a config that lets all of an engine's processes write to `log`, and warnings to stderr as well."""
    handlers = {
        "file": {"class": "logging.FileHandler", "filename": str(log), "formatter": "plain", "level": "INFO"},
        "stderr": {"class": "logging.StreamHandler", "formatter": "plain", "level": "WARNING"},
    }
    document = {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"plain": {"format": "[%(processName)s] %(levelname)s %(message)s"}},
        "handlers": handlers,
        "loggers": {"vllm": {"handlers": list(handlers), "level": "INFO", "propagate": False}},
    }
    file.write_text(json.dumps(document), encoding="utf-8")
    return file
