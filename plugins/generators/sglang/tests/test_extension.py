"""Weights are loaded into SGLang's model and checked afterwards; without SGLang."""

from collections.abc import Iterator
from typing import Any

import attrs
import pytest
import torch

from whet.errors import WeightSyncError
from whet.interfaces.weights import TransferSpec
from whet_sglang import extension


class Model(torch.nn.Linear):
    """One layer in FP8 and a bias in float32, which takes the bias alone."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.weight = torch.nn.Parameter(self.weight.detach().to(torch.float8_e4m3fn), requires_grad=False)
        self.config = None

    def load_weights(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Copy what comes."""
        for _, tensor in tensors:
            self.bias.data.copy_(tensor)


@pytest.mark.parametrize(("value", "failure"), [(1.0, ""), (float("nan"), "bias holds numbers that are not finite")])
def test_after_a_weight_sync_all_numbers_but_those_in_fp8_are_finite(
    monkeypatch: pytest.MonkeyPatch, value: float, failure: str
) -> None:
    monkeypatch.setattr(extension, "stored_shapes", lambda folder: {})
    monkeypatch.setattr(extension, "receive_whole", lambda *_, **__: iter([("bias", torch.full((4,), value))]))
    order = {"spec": attrs.asdict(TransferSpec("disk", "", "1", 1)), "receiver": 0, "folder": ""}
    report: dict[str, Any] = {"spoilt": False}
    if failure:
        with pytest.raises(WeightSyncError, match=failure):
            extension._take(Model(), order, 0, report)
    else:
        extension._take(Model(), order, 0, report)
    assert report == {"spoilt": bool(failure)}
