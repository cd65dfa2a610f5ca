"""Read JSON that a stranger wrote, in memory that is known beforehand.

`[[],[],[]]` takes twenty times its length in memory, and nesting ends in an error that is no `ValueError`.
"""

import json
from typing import Any, Final

MODEL_VALUES: Final = 1 << 21
"""Of a file of a model folder: the header of 100,000 tensors has a million."""


def loads(text: bytes | bytearray | memoryview, values: int) -> Any:
    """Return what JSON in UTF-8 holds. Raises `ValueError` where it is none, nests deeply or has more than `values`.

    Each value costs at most some hundred bytes, beside its text. Brackets and commas inside strings count, too.
    """
    text = bytes(text)
    found = sum(map(text.count, (b"[", b"{", b",")))
    if found > values:
        raise ValueError(f"it has about {found:,} values, wanted at most {values:,}")
    try:
        return json.loads(text.decode("utf-8"))
    except RecursionError:
        raise ValueError("it nests too deeply") from None
