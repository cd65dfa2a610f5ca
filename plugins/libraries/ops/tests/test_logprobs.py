"""Chunked logprobs against log_softmax and gather, values, gradients and memory."""

import resource
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from whet_ops.logprobs import LogitRule, distribution_kl, token_logprobs, top_logprobs  # noqa: E402


def inputs(seed, count=13, width=24, vocab=37, bias=False):
    make = torch.Generator().manual_seed(seed)
    hidden = torch.randn(count, width, generator=make, requires_grad=True)
    weight = torch.randn(vocab, width, generator=make, requires_grad=True)
    offset = torch.randn(vocab, generator=make, requires_grad=True) if bias else None
    targets = torch.randint(vocab, (count,), generator=make)
    temperature = torch.rand(count, generator=make) + 0.5
    return hidden, weight, offset, targets, temperature


def reference(hidden, weight, bias, targets, temperature, scale=1.0, softcap=0.0):
    logits = torch.nn.functional.linear(hidden, weight, bias) * scale
    if softcap:
        logits = torch.tanh(logits / softcap) * softcap
    logits = logits / temperature[:, None]
    logprobs = torch.log_softmax(logits, -1)
    return logprobs.gather(1, targets[:, None])[:, 0], torch.distributions.Categorical(logits=logits).entropy()


@settings(max_examples=50)
@given(
    seed=st.integers(0, 1000), chunk=st.integers(1, 20), bias=st.booleans(), wants=st.sampled_from("leb"),
    scale=st.sampled_from([1.0, 0.25, 3.0]), softcap=st.sampled_from([0.0, 5.0]),
)  # fmt: skip
def test_values_and_gradients_are_those_of_log_softmax(seed, chunk, bias, wants, scale, softcap):
    hidden, weight, offset, targets, temperature = inputs(seed, bias=bias)
    leaves = [leaf for leaf in (hidden, weight, offset) if leaf is not None]
    expected = reference(hidden, weight, offset, targets, temperature, scale, softcap)
    found = token_logprobs(
        hidden, weight, targets, bias=offset, temperature=temperature, entropy=wants != "l", chunk=chunk,
        rule=LogitRule(scale, softcap),
    )  # fmt: skip
    mix = torch.randn(2, 13, generator=torch.Generator().manual_seed(seed))

    def objective(pair):
        total = (mix[0] * pair[0]).sum() if wants in "lb" else 0.0
        return total + ((mix[1] * pair[1]).sum() if wants in "eb" else 0.0)

    torch.testing.assert_close(found[0], expected[0], atol=1e-5 * max(1, scale), rtol=1e-5)
    if wants != "l":
        torch.testing.assert_close(found[1], expected[1], atol=1e-5 * max(1, scale), rtol=1e-5)
    for ours, theirs in zip(
        torch.autograd.grad(objective(found), leaves), torch.autograd.grad(objective(expected), leaves), strict=True
    ):
        torch.testing.assert_close(ours, theirs, atol=2e-5 * max(1, scale), rtol=1e-5)


def test_a_single_chunk_and_many_agree_to_rounding():
    hidden, weight, _, targets, temperature = inputs(3)
    one = token_logprobs(hidden, weight, targets, temperature=temperature, chunk=13)[0]
    many = token_logprobs(hidden, weight, targets, temperature=temperature, chunk=4)[0]
    torch.testing.assert_close(one, many, atol=1e-6, rtol=0)


def test_without_temperature_it_is_one():
    hidden, weight, _, targets, _ = inputs(4)
    ones = torch.ones(13)
    assert torch.equal(
        token_logprobs(hidden, weight, targets)[0], token_logprobs(hidden, weight, targets, temperature=ones)[0]
    )


def test_a_token_that_cannot_occur_leaves_the_entropy_finite():
    hidden, weight, _, targets, _ = inputs(5)
    bias = torch.zeros(37)
    bias[36] = -torch.inf
    targets = targets.clamp(max=35)
    logprobs, entropy = token_logprobs(hidden, weight, targets, bias=bias, entropy=True)
    kept = reference(hidden, weight[:36], bias[:36], targets, torch.ones(13))
    torch.testing.assert_close(logprobs, kept[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropy, kept[1], atol=1e-5, rtol=1e-5)
    gradients = torch.autograd.grad((logprobs + entropy).sum(), (hidden, weight))
    assert all(torch.isfinite(gradient).all() for gradient in gradients)


def test_no_tokens_give_no_logprobs_and_zero_gradients():
    weight = torch.randn(5, 3, requires_grad=True)
    hidden = torch.zeros(0, 3, requires_grad=True)
    logprobs, entropy = token_logprobs(hidden, weight, torch.zeros(0, dtype=torch.long), entropy=True)
    assert logprobs.shape == entropy.shape == (0,)
    logprobs.sum().backward()
    assert weight.grad.abs().max() == 0


def test_bfloat16_inputs_give_float32_logprobs():
    hidden, weight, _, targets, temperature = inputs(6)
    low = token_logprobs(hidden.bfloat16(), weight.bfloat16(), targets, temperature=temperature)[0]
    assert low.dtype == torch.float32
    torch.testing.assert_close(low, reference(hidden, weight, None, targets, temperature)[0], atol=0.3, rtol=0.05)


def test_logits_in_float32_are_not_rounded_as_those_in_bfloat16():
    hidden, weight, _, targets, _ = (None if one is None else one.detach() for one in inputs(6, width=200))
    hidden, weight = hidden.bfloat16(), weight.bfloat16()
    exact = torch.log_softmax(hidden.double() @ weight.double().T, -1)
    rounded, kept = (token_logprobs(hidden, weight, targets, rule=LogitRule(float32=on))[0] for on in (False, True))
    expected = exact.gather(1, targets[:, None])[:, 0]
    assert (rounded - expected).abs().max() > 0.02
    torch.testing.assert_close(kept.double(), expected, atol=1e-4, rtol=1e-5)
    best = top_logprobs(hidden, weight, 3, rule=LogitRule(float32=True))[1]
    torch.testing.assert_close(best.double(), exact.topk(3).values, atol=1e-4, rtol=1e-5)


def test_wrong_shapes_are_named():
    with pytest.raises(ValueError, match=r"wanted hidden \[M, H\].*\(2, 3\)"):
        token_logprobs(torch.zeros(2, 3), torch.zeros(5, 4), torch.zeros(2, dtype=torch.long))


PEAK = """
import resource, sys, torch
from whet_ops.logprobs import token_logprobs
torch.set_num_threads(1)
tokens, vocab, chunk = 2048, 32000, int(sys.argv[1])
hidden = torch.randn(tokens, 64, requires_grad=True)
weight = torch.randn(vocab, 64, requires_grad=True)
targets = torch.randint(vocab, (tokens,))
token_logprobs(hidden[:8], weight, targets[:8], chunk=8)[0].sum().backward()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
token_logprobs(hidden, weight, targets, chunk=chunk)[0].sum().backward()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.skipif(not hasattr(resource, "RUSAGE_SELF"), reason="needs getrusage")
def test_the_peak_is_that_of_a_chunk_not_of_all_logits():
    # 2048 tokens of 32,000 logits are 250 MiB; a chunk of 128 is 16 MiB.
    out = subprocess.run(
        [sys.executable, "-c", PEAK, "128"],
        capture_output=True, text=True, check=True, env={"MALLOC_MMAP_THRESHOLD_": "65536"},
    )  # fmt: skip
    assert int(out.stdout) < 100 * 1024


@pytest.mark.parametrize("entropy", [False, True])
def test_several_tokens_at_each_place_have_the_logprobs_and_gradients_of_log_softmax(entropy):
    hidden, weight, offset, _, temperature = inputs(5, bias=True)
    several = torch.randint(37, (13, 4), generator=torch.Generator().manual_seed(1))
    several[0] = several[0, 0]  # the same one four times
    log_p = torch.log_softmax(torch.nn.functional.linear(hidden, weight, offset) / temperature[:, None], -1)
    expected = log_p.gather(1, several)
    found, spread = token_logprobs(
        hidden, weight, several, bias=offset, temperature=temperature, entropy=entropy, chunk=5
    )
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    mix = torch.randn(13, 4, generator=torch.Generator().manual_seed(2))
    ours = (mix * found).sum() + (0 if spread is None else spread.sum())
    theirs = (mix * expected).sum() - ((log_p.exp() * log_p).sum() if entropy else 0)
    leaves = [hidden, weight, offset]
    for one, other in zip(torch.autograd.grad(ours, leaves), torch.autograd.grad(theirs, leaves), strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-5)


def test_the_likeliest_tokens_are_those_of_topk():
    hidden, weight, offset, _, temperature = inputs(6, bias=True)
    log_p = torch.log_softmax(torch.nn.functional.linear(hidden, weight, offset) / temperature[:, None], -1)
    ids, logprobs = top_logprobs(hidden, weight, 5, bias=offset, temperature=temperature, chunk=4)
    assert torch.equal(ids, log_p.topk(5).indices)
    torch.testing.assert_close(logprobs, log_p.topk(5).values, atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match="between 1 and 37"):
        top_logprobs(hidden, weight, 38)


@pytest.mark.parametrize("chunk", [1, 5, 13])
def test_divergences_are_those_of_whole_distributions(chunk):
    hidden, weight, offset, _, temperature = inputs(7, bias=True)
    other, other_weight, other_offset, _, _ = inputs(8, width=10, bias=True)
    product = torch.nn.functional.linear
    of_p = torch.tanh(product(hidden, weight, offset) * 2 / 5) * 5
    of_q = product(other, other_weight, other_offset).detach() * 0.5
    p, q = (torch.distributions.Categorical(logits=logits / temperature[:, None]) for logits in (of_p, of_q))
    kl = torch.distributions.kl_divergence
    forward, reverse = distribution_kl(
        hidden, weight, other, other_weight, bias=offset, other_bias=other_offset, temperature=temperature, chunk=chunk,
        rule=LogitRule(2.0, 5.0), other_rule=LogitRule(0.5),
    )  # fmt: skip
    for found, expected in ((forward, kl(q, p)), (reverse, kl(p, q))):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
        leaves = [hidden, weight, offset]
        for ours, theirs in zip(
            torch.autograd.grad(found.sum(), leaves, retain_graph=True),
            torch.autograd.grad(expected.sum(), leaves, retain_graph=True), strict=True,
        ):  # fmt: skip
            torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-5)
    assert not torch.autograd.grad(forward.sum(), [other], allow_unused=True)[0]


def test_a_token_that_cannot_occur_leaves_divergences_and_gradients_finite():
    hidden, weight, _, _, _ = inputs(9)
    impossible = torch.zeros(37)
    impossible[3] = -torch.inf
    for bias, other in ((impossible, None), (None, impossible), (impossible, impossible)):
        forward, reverse = distribution_kl(hidden, weight, hidden, weight, bias=bias, other_bias=other)
        assert torch.isfinite(forward).all()
        assert torch.isfinite(reverse).all()
        assert torch.isfinite(torch.autograd.grad((forward + reverse).sum(), hidden)[0]).all()
    torch.testing.assert_close(forward, torch.zeros(13), atol=1e-6, rtol=0)
