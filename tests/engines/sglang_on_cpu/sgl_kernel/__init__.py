"""Stands in for SGLang's own kernels, of which there is no package for processors: names to import, all of which raise.

Without AMX SGLang imports some, and calls none of them on its way through a dense model.
"""

from collections.abc import Callable
from typing import Any


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(f"sgl_kernel.{name} was called, which stands in for a kernel that is not here")

    return missing
