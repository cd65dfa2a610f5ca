"""The responses at the endpoint of a run, recorded as tokens in the file `endpoint.jsonl` of the run folder."""

import asyncio
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from whet.data.files import json_line
from whet.data.records import Request
from whet.interfaces.endpoint import RunFiles
from whet_endpoint.choices import Choice

FILE = "endpoint.jsonl"


class RowWriter:
    """Writes a row for each completion until the file has reached its largest size, and counts the others."""

    def __init__(self, folder: RunFiles, limit: int) -> None:
        """`limit` is in bytes; 0: nothing is written."""
        self._folder, self._limit = folder, limit
        file = folder.path / FILE
        self._size = file.stat().st_size if file.exists() else 0
        self._writer = ThreadPoolExecutor(1, "whet endpoint")
        self.counts = Counter[str]()
        """Completions that were `recorded`, and that were `left_out`."""

    async def add(self, request: Request, choice: Choice) -> None:
        """Write a request to the generator and its completion, and return when the row is written."""
        await asyncio.get_running_loop().run_in_executor(self._writer, self._add, request, choice)

    def close(self) -> None:
        """Wait for the rows that are being written."""
        self._writer.shutdown()

    def _add(self, request: Request, choice: Choice) -> None:
        row = _row(request, choice)
        size = len(json_line(row).encode())
        if self._size + size > self._limit:
            self.counts["left_out"] += 1
            return
        self._folder.append(FILE, [row])
        self._size += size
        self.counts["recorded"] += 1


def _row(request: Request, choice: Choice) -> dict[str, Any]:
    completion, sampling = choice.completion, request.sampling
    return {
        "time": round(time.time(), 3),
        "id": request.id,
        "sampling": {name: getattr(sampling, name) for name in ("max_tokens", "temperature", "top_p", "top_k")},
        "prompt_token_ids": request.tokens.tolist(),
        "token_ids": completion.tokens.tolist(),
        "logprobs": completion.logprobs.astype(str).astype(float).tolist(),
        "weight_versions": [[int(first), int(version)] for first, version in completion.versions],
        "stop": completion.stop,
    }
