"""Puts data, style and script into one HTML page that needs no network and that model output cannot reach into.

Two things keep what a model wrote from being more than text: the data is a JSON block in which no character can end the
block, and the policy in the page's head lets exactly the script and the style run that were written here.
"""

import base64
import hashlib
import json
import math
import os
import re
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from whet.data.files import disk_errors, private
from whet.errors import WhetError

SCRIPTS = ("dom.js", "colours.js", "chart.js", "overview.js", "metrics.js", "time.js", "tokens.js", "task.js",
           "rollouts.js", "gaps.js", "run.js", "main.js")  # fmt: skip
"""Parts of the one script, in order."""

_UNSAFE = re.compile("[<>&\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Characters that could end the block, start another, or change how an editor shows the file."""


def write_page(file: Path, data: Mapping[str, Any]) -> int:
    """Write the page, whole or not at all, for this user's eyes alone: it quotes rollouts. Return its size in bytes."""
    page, file = page_of(data).encode(), Path(os.path.realpath(file))
    if file.exists() and not file.is_file():
        raise WhetError(f"{file} is no regular file; name a file for the page")
    partial = file.with_name(f"{file.name}.{os.getpid()}.partial")
    with disk_errors(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        partial.unlink(missing_ok=True)
        try:
            with open(partial, "wb", opener=private) as stream:
                stream.write(page)
            partial.replace(file)
        finally:
            partial.unlink(missing_ok=True)
    return len(page)


def page_of(data: Mapping[str, Any]) -> str:
    """Return the page as text."""
    assets = files(__package__) / "assets"
    style = (assets / "style.css").read_text(encoding="utf-8")
    parts = "\n".join((assets / name).read_text(encoding="utf-8") for name in SCRIPTS)
    script = f'"use strict";\n(() => {{\n{parts}\n}})();\n'
    filled = {"policy": policy(script, style), "style": style, "data": embedded(data), "script": script}
    template = (assets / "page.html").read_text(encoding="utf-8")
    return re.sub(r"\$\{(\w+)\}", lambda found: filled[found[1]], template)


def policy(script: str, style: str) -> str:
    """Return the content security policy: this script, this style, images in the page, and nothing from elsewhere."""
    return (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def embedded(data: Mapping[str, Any]) -> str:
    """Write JSON that can stand inside a script element; numbers that are not finite, which JSON lacks, are null."""
    try:
        plain = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except ValueError:
        plain = json.dumps(_finite(data), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return _UNSAFE.sub(lambda found: f"\\u{ord(found[0]):04x}", plain)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
