"""Parse untrusted JSON with a bound on the memory that it takes.

`[[],[],[]]` takes twenty times its length in memory, and deep nesting raises an error that is no `ValueError`.
"""

import json
from typing import Any, Final

MODEL_VALUES: Final = 1 << 21
"""Limit for a file of a model folder. The header of 100,000 tensors has about a million values."""


def loads(text: bytes | bytearray | memoryview, values: int) -> Any:
    """Return the value of a JSON text in UTF-8.

    Raises `ValueError` if the text is not JSON, nests too deeply or has more than `values` values. Each value costs at
    most some hundred bytes beside its text. Brackets and commas inside strings count as values too.
    """
    text = bytes(text)
    found = sum(map(text.count, (b"[", b"{", b",")))
    if found > values:
        raise ValueError(f"it has about {found:,} values, wanted at most {values:,}")
    try:
        return json.loads(text.decode("utf-8"))
    except RecursionError:
        raise ValueError("it nests too deeply") from None
