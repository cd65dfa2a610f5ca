"""The responses at the endpoint of a run, recorded as tokens in the file `endpoint.jsonl` of the run folder."""

import asyncio
import logging
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from whet.data.files import json_line
from whet.data.records import Request
from whet.errors import WhetError, in_words
from whet.interfaces.endpoint import RunFiles
from whet_endpoint.choices import Choice

logger = logging.getLogger(__name__)

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
        """Completions that were `recorded`, that were `left_out`, and whose rows were `not_written` for an error."""

    async def add(self, request: Request, choice: Choice) -> None:
        """Write a request to the generator and its completion, and return when the row is written.

        What was sampled is not lost where its row cannot be written: the first such error is a warning.
        """
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
        try:
            self._folder.append(FILE, [row])
        except (OSError, WhetError) as error:
            if not self.counts["not_written"]:
                logger.warning(
                    "a response at the endpoint could not be recorded in %s: %s; make room there, or set "
                    "endpoint.record to 0. Further ones are counted in the journal alone", FILE, in_words(error),
                )  # fmt: skip
            self.counts["not_written"] += 1
            return
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
