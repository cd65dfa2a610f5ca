import json
from pathlib import Path

from whet.interfaces.logger import RunInfo
from whet_jsonl.config import JsonlConfig
from whet_jsonl.logger import JsonlLogger
from whet_testing.contracts.component import ComponentContract
from whet_testing.contracts.logger import LoggerContract, Rows


class TestPlugin(ComponentContract):
    hooks = "whet_jsonl.hooks"


class TestJsonl(LoggerContract):
    def make(self, run: RunInfo) -> JsonlLogger:
        return JsonlLogger(JsonlConfig(), run)

    def read(self, folder: Path) -> Rows:
        rows = map(json.loads, (folder / JsonlConfig().path).read_text(encoding="utf-8").splitlines())
        return [(row.pop("step"), row) for row in rows]


class TestStandardOutput(LoggerContract):
    def make(self, run: RunInfo) -> JsonlLogger:
        return JsonlLogger(JsonlConfig(path="-"), run)
