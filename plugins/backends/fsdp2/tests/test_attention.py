"""Block attention, against dense attention with the whole mask written out."""

import sys
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from whet_fsdp2 import blocks, varlen
from whet_fsdp2.attention import UnsupportedAttentionError, attend_elsewhere, packed_attention
from whet_fsdp2.blocks import AttentionPlan
from whet_fsdp2.portable import attend_rows, plan_rows

CASES = {
    "mixed": ([5, 9, 4, 1, 3, 7, 2], [-1, -1, -1, 0, 0, 1, 0]),
    "no prefixes": ([5, 1, 30], [-1, -1, -1]),
    "one group": ([3, 4, 4], [-1, 0, 0]),
    "long prompt": ([200, 5, 3], [-1, 0, 0]),
    "long completions": ([3, 190, 170, 20], [-1, 0, 0, -1]),
    "an unused prompt": ([4, 3, 2], [-1, -1, 1]),
    "one token": ([1], [-1]),
}


def sorted_case(name):
    """Segments with a prefix come last."""
    lengths, prefix = (np.array(column) for column in CASES[name])
    order = np.argsort(prefix >= 0, kind="stable")
    back = np.argsort(order)
    return lengths[order], np.where(prefix[order] >= 0, back[prefix[order]], -1)


def inputs(tokens, heads, kv_heads, dim=24, seed=0):
    make = torch.Generator().manual_seed(seed)
    shapes = ((1, heads, tokens, dim), (1, kv_heads, tokens, dim), (1, kv_heads, tokens, dim))
    return [torch.randn(shape, generator=make, requires_grad=True) for shape in shapes]


def dense(q, k, v, lengths, prefix, scale, window=None):
    place = np.cumsum(lengths) - lengths
    behind = np.where(prefix >= 0, lengths[prefix], 0)
    position = torch.from_numpy(np.concatenate([np.arange(n) + b for n, b in zip(lengths, behind, strict=True)]))
    mask = torch.zeros(q.shape[2], q.shape[2], dtype=torch.bool)
    for begin, length, before in zip(place, lengths, prefix, strict=True):
        mask[begin : begin + length, begin : begin + length] = torch.ones(length, length, dtype=torch.bool).tril()
        if before >= 0:
            mask[begin : begin + length, place[before] : place[before] + lengths[before]] = True
    if window is not None:
        mask &= position[:, None] - position < window
    repeat = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(repeat, 1).transpose(2, 3) * scale
    return scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v.repeat_interleave(repeat, 1)


def compare(lengths, prefix, heads, kv_heads, attend, window=None):
    q, k, v = inputs(int(lengths.sum()), heads, kv_heads)
    expected = dense(q, k, v, lengths, prefix, 0.3, window)
    found = attend(q, k, v)
    upstream = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=1e-5)
    for ours, theirs in zip(
        torch.autograd.grad(found, (q, k, v), upstream),
        torch.autograd.grad(expected, (q, k, v), upstream),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("small", [160 * 160, 0], ids=["products", "flash"])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_blocks_give_what_dense_attention_gives(case, heads, small):
    lengths, prefix = sorted_case(case)
    plan = AttentionPlan(lengths, prefix)
    with mock.patch.object(blocks, "SMALL", small):
        compare(
            lengths, prefix, *heads,
            lambda q, k, v: packed_attention(None, q, k, v, None, 0.3, whet_plan=plan)[0].transpose(1, 2),
        )  # fmt: skip


WINDOWS = (None, 1, 3, 40)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_the_portable_way_gives_what_dense_attention_gives(case, heads, window):
    lengths, prefix = sorted_case(case)
    plan = plan_rows(lengths, prefix, torch.device("cpu"), window)

    def attend(*three):
        out = attend_rows(*(x[0].transpose(0, 1) for x in three), plan, 0.3)
        return out[None].transpose(1, 2)

    compare(lengths, prefix, *heads, attend, window)


def flash(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale, window_size, enable_gqa=False):
    """Compute what `torch.nn.attention.varlen.varlen_attn` documents, a sequence at a time."""
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    assert enable_gqa == (query.shape[1] != key.shape[1])
    left, right = window_size
    assert right == 0
    found = []
    spans = zip(cu_seq_q.tolist(), cu_seq_q.tolist()[1:], cu_seq_k.tolist(), cu_seq_k.tolist()[1:], strict=False)
    for q_begin, q_end, k_begin, k_end in spans:
        queries, keys = q_end - q_begin, k_end - k_begin
        assert queries <= max_q
        assert keys <= max_k
        distance = torch.arange(queries)[:, None] + keys - queries - torch.arange(keys)  # aligned to the last of both
        seen = (distance >= 0) & ((distance <= left) if left >= 0 else True)
        k, v = (
            x[k_begin:k_end].repeat_interleave(query.shape[1] // key.shape[1], 1).transpose(0, 1) for x in (key, value)
        )
        scores = query[q_begin:q_end].transpose(0, 1) @ k.transpose(1, 2) * scale
        found.append((scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v).transpose(0, 1))
    return torch.cat(found)


def older_flash(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale, window_size):
    """Compute what versions do that do not state that keys may have fewer heads."""
    assert query.shape[1] == key.shape[1]
    return flash(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale=scale, window_size=window_size)


@pytest.mark.parametrize("kernel", [flash, older_flash])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("heads", [(4, 4), (6, 2)], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_one_call_of_a_flash_kernel_gives_what_dense_attention_gives(case, heads, window, kernel, monkeypatch):
    lengths, prefix = sorted_case(case)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", kernel)
    found, _ = varlen.of_torch()
    plan = AttentionPlan(lengths, prefix)

    def attend(*three):
        row = (x[0].transpose(0, 1) for x in three)
        return attend_elsewhere(*row, plan, 0.3, window, found)[None].transpose(1, 2)

    compare(lengths, prefix, *heads, attend, window)


def test_the_module_docstring_of_varlen_is_right():
    plan = varlen.plan_varlen(np.array([3, 2, 2, 1]), np.array([-1, -1, 0, 0]), torch.device("cpu"))
    assert plan.cu_queries.tolist() == [0, 3, 5, 7, 8]
    assert plan.cu_keys.tolist() == [0, 3, 5, 10, 14]
    assert plan.keys.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 5, 6, 0, 1, 2, 7]
    assert (plan.most_queries, plan.most_keys) == (3, 5)


def test_a_row_without_prefixes_keeps_its_keys_as_they_lie():
    assert varlen.plan_varlen(np.array([4, 2]), np.array([-1, -1]), torch.device("cpu")).keys is None


@pytest.mark.parametrize(
    ("device", "dtype", "head", "capability", "words"),
    [
        ("cpu", torch.bfloat16, 128, (9, 0), "the device is cpu"),
        ("cuda", torch.float32, 128, (9, 0), "not float32"),
        ("cuda", torch.bfloat16, 100, (9, 0), "a head of 100"),
        ("cuda", torch.bfloat16, 512, (9, 0), "a head of 512"),
        ("cuda", torch.bfloat16, 128, (7, 5), "this GPU has 7.5"),
        ("cuda", torch.bfloat16, 128, (9, 0), ""),
    ],
)
def test_the_kernel_follows_from_the_device(device, dtype, head, capability, words, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    kernel, why = varlen.kernel_for.__wrapped__(torch.device(device), dtype, head)
    if words:
        assert kernel is None
        assert words in why
    else:
        assert kernel.name == why == f"varlen_attn of torch {torch.__version__}"


def test_without_a_kernel_all_that_was_looked_for_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", lambda query, key, value, is_causal: query)
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    kernel, why = varlen.kernel_for.__wrapped__(torch.device("cuda"), torch.bfloat16, 64)
    assert kernel is None
    assert why.startswith(f"varlen_attn of torch {torch.__version__} has no scale and window_size")
    assert why.endswith("the package flash-attn is not installed")


@settings(max_examples=30)
@given(data=st.data())
def test_any_segments_with_any_prefixes(data):
    lengths = np.array(data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=9)))
    first = data.draw(st.integers(1, len(lengths)))
    prefix = np.array([-1] * first + [data.draw(st.integers(0, first - 1)) for _ in lengths[first:]])
    prefix[first:] = np.where(prefix[first:] >= first, 0, prefix[first:])
    own = sorted(set(prefix[first:].tolist()))
    order = [*own, *(i for i in range(first) if i not in own), *range(first, len(lengths))]
    back = np.argsort(order)
    lengths, prefix = lengths[order], np.where(prefix[order] >= 0, back[prefix[order]], -1)
    plan = AttentionPlan(lengths, prefix)
    compare(
        lengths, prefix, 4, 2,
        lambda q, k, v: packed_attention(None, q, k, v, None, 0.3, whet_plan=plan)[0].transpose(1, 2),
    )  # fmt: skip


def test_very_different_scores_do_not_overflow():
    lengths, prefix = sorted_case("one group")
    q, k, v = (200 * x.detach() for x in inputs(int(lengths.sum()), 2, 2))
    out = packed_attention(None, q, k, v, None, 1.0, whet_plan=AttentionPlan(lengths, prefix))[0]
    assert torch.isfinite(out).all()
    torch.testing.assert_close(out.transpose(1, 2), dense(q, k, v, lengths, prefix, 1.0), atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"softcap": 50.0}, "softcap"),
        ({"s_aux": torch.zeros(2)}, "s_aux"),
        ({"dropout": 0.1}, "dropout"),
        ({"block_indices": torch.zeros(2)}, "block_indices"),
        ({"indices": torch.zeros(2)}, "indices"),
    ],
)
def test_what_packed_rows_cannot_do_is_refused(more, words):
    q, k, v = inputs(5, 2, 2)
    plan = AttentionPlan(np.array([5]), np.array([-1]))
    with pytest.raises(UnsupportedAttentionError, match=words):
        packed_attention(None, q, k, v, None, 0.3, whet_plan=plan, **more)


@pytest.mark.parametrize("window", [3, 5, 13, 14, 100])
def test_a_window_that_a_model_states_is_kept(window):
    lengths, prefix = sorted_case("mixed")
    plan = AttentionPlan(lengths, prefix)
    compare(
        lengths, prefix, 4, 2,
        lambda q, k, v: packed_attention(None, q, k, v, None, 0.3, whet_plan=plan, sliding_window=window)[0].transpose(
            1, 2
        ),
        window,
    )  # fmt: skip


def test_without_a_plan_it_says_that_the_model_drops_keywords():
    q, k, v = inputs(5, 2, 2)
    with pytest.raises(UnsupportedAttentionError, match="keyword"):
        packed_attention(None, q, k, v, None)


def test_bfloat16_is_computed_in_float32():
    lengths, prefix = sorted_case("mixed")
    q, k, v = (x.detach().bfloat16() for x in inputs(int(lengths.sum()), 4, 2))
    out = packed_attention(None, q, k, v, None, 0.3, whet_plan=AttentionPlan(lengths, prefix))[0]
    assert out.dtype == torch.bfloat16
    expected = dense(q.float(), k.float(), v.float(), lengths, prefix, 0.3).transpose(1, 2)
    torch.testing.assert_close(out.float(), expected, atol=1e-2, rtol=1e-2)
