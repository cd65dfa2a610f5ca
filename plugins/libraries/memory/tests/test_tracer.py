"""Traces are kept in a cache, where there is a place for one."""

import os
from types import SimpleNamespace
from typing import Any

import pytest

from whet_memory.tracer import Tracer


def test_where_there_is_no_home_folder_there_is_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as where neither HOME nor the user is known
    case: Any = SimpleNamespace(to_json=dict)
    tracer = Tracer()
    monkeypatch.setattr(tracer, "_ask", lambda job: {"peaks": {"forward": 3}})
    assert tracer.known("json", case) is None
    assert tracer.peaks("json", case)["train"].device == 3
