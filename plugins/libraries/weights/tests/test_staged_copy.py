"""The copy that a sender keeps: pieces of one size, and the bytes that were sent."""

import secrets
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from whet.interfaces.weights import TransferSpec
from whet_weights import staged_copy
from whet_weights.exchange import Exchange
from whet_weights.manifest import checksum
from whet_weights.staged_copy import StagedCopy

MIB = 1 << 20


@contextmanager
def copying() -> Iterator[StagedCopy]:
    """Yield a copy in a session."""
    exchange = Exchange("127.0.0.1")
    copy = StagedCopy("127.0.0.1", secrets.token_hex(16))
    try:
        copy.begin(TransferSpec("broadcast", exchange.address, "1-0", 1, token=copy.token))
        yield copy
    finally:
        copy.server.close()
        exchange.close()


def test_memory_grows_by_pieces_that_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, real = [], torch.empty

    def empty(size: int, **options: object) -> torch.Tensor:
        asked.append(size)
        return real(size, **options)  # type: ignore[call-overload,no-any-return]

    monkeypatch.setattr(staged_copy, "_SLAB_BYTES", MIB)
    monkeypatch.setattr(torch, "empty", empty)
    weights = [torch.arange(n, dtype=torch.float32) for n in (700_000, 3, 100_000, 1_000_000)]
    with copying() as copy:
        for session in range(2):
            copy.begin(TransferSpec("broadcast", "127.0.0.1:1", f"{session}-0", session))
            entries = [copy.keep(f"w{i}", weight, "") for i, weight in enumerate(weights)]
        total = sum(weight.nbytes for weight in weights)
        assert set(asked) == {MIB}
        assert total <= sum(asked) < total + 2 * MIB
        for entry, weight in zip(entries, weights, strict=True):
            found = torch.cat(list(copy._pieces(entry.offset, entry.offset + weight.nbytes))).view(torch.float32)
            assert torch.equal(found, weight)
            assert entry.checksum == checksum(found)


def test_what_is_cast_is_kept_as_it_is_sent() -> None:
    weight = torch.linspace(-1, 1, 35).view(5, 7)
    with copying() as copy:
        entry = copy.keep("w", weight, "bfloat16")
        (piece,) = copy._pieces(entry.offset, entry.offset + 70)
        assert torch.equal(piece.view(torch.bfloat16).view(5, 7), weight.bfloat16())
        assert (entry.dtype, entry.shape) == ("bfloat16", (5, 7))
