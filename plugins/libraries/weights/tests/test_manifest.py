"""The checksum sees what can go wrong with bytes in memory."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from whet_weights.manifest import checksum


@settings(max_examples=50)
@given(size=st.integers(1, 5000), data=st.data())
def test_any_changed_byte_changes_the_checksum(size: int, data: st.DataObject) -> None:
    tensor = torch.arange(size, dtype=torch.int32).view(torch.uint8).clone()
    changed = tensor.clone()
    changed[data.draw(st.integers(0, len(tensor) - 1))] ^= data.draw(st.integers(1, 255))
    assert checksum(changed) != checksum(tensor)


def test_pages_that_changed_places_change_the_checksum() -> None:
    pages = torch.randn(4, 1024)
    assert checksum(pages[[0, 2, 1, 3]]) != checksum(pages)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_slice_has_the_checksum_of_its_copy(dtype: torch.dtype) -> None:
    tensor = torch.randn(5001).to(dtype)
    assert checksum(tensor[1:]) == checksum(tensor[1:].clone())
    assert checksum(tensor[:0]) == checksum(torch.empty(0, dtype=dtype))
