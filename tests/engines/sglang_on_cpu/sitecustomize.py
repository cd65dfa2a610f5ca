"""Lets SGLang import torchvision, built for GPUs, beside a torch that was not: declares the operators it looks for."""

import contextlib
import importlib.abc
import sys
from collections.abc import Sequence
from types import ModuleType


class _Operators(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> None:
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            for operator in ("nms", "qnms"):
                with contextlib.suppress(RuntimeError):
                    torch.library.define(
                        f"torchvision::{operator}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
                    )


sys.meta_path.insert(0, _Operators())
