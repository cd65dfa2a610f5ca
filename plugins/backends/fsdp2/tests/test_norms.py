import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from whet_fsdp2.norms import hasten_norms


@pytest.mark.parametrize("norm", [LlamaRMSNorm, Qwen3RMSNorm])
@pytest.mark.parametrize("shape", [(2, 5, 24), (1, 7, 3, 24)], ids=str)
def test_values_and_gradients_are_those_of_the_module(norm, shape):
    slow, fast = norm(24), norm(24)
    weight = torch.randn(24)
    for module in (slow, fast):
        module.weight.data.copy_(weight)
    assert hasten_norms(fast) == 1
    x, upstream = torch.randn(shape, requires_grad=True), torch.randn(shape)
    expected, found = slow(x), fast(x)
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=1e-5)
    for ours, theirs in zip(
        torch.autograd.grad(found, (x, fast.weight), upstream),
        torch.autograd.grad(expected, (x, slow.weight), upstream),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_bfloat16_goes_through_the_module_itself():
    slow, fast = LlamaRMSNorm(24), LlamaRMSNorm(24)
    hasten_norms(fast)
    x = torch.randn(3, 24).bfloat16()
    assert torch.equal(fast(x), slow(x))


def test_a_norm_with_another_formula_is_left_alone():
    class OddRMSNorm(LlamaRMSNorm):
        def forward(self, x):
            return super().forward(x) + x

    module = OddRMSNorm(24)
    assert hasten_norms(module) == 0
    assert "forward" not in vars(module)
