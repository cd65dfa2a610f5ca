"""Routers of `transformers`: what their probabilities are, and whether their choices can be replayed."""

from functools import partial

import pytest
import torch
from torch import nn

from whet_ops.routing import Routed, find_routers, problem_of

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16, "num_hidden_layers": 2,
    "num_attention_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.3,
}  # fmt: skip
TOKENS = torch.arange(2, 22)[None]


def deepseek(**options):
    """Return a model with sigmoid scores and experts in four groups, of which two are chosen."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    torch.manual_seed(0)
    return DeepseekV3ForCausalLM(
        DeepseekV3Config(
            **SIZES, num_key_value_heads=2, n_shared_experts=1, n_routed_experts=8, kv_lora_rank=8, q_lora_rank=8,
            qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16, n_group=4, topk_group=2, first_k_dense_replace=0,
            **options,
        )
    )  # fmt: skip


def gemma():
    """Return a model whose routers return probabilities in place of logits."""
    from transformers import Gemma4ForCausalLM, Gemma4TextConfig

    torch.manual_seed(0)
    return Gemma4ForCausalLM(
        Gemma4TextConfig(
            **SIZES, num_key_value_heads=1, head_dim=16, global_head_dim=16, num_experts=8, top_k_experts=2,
            enable_moe_block=True, sliding_window=32, hidden_size_per_layer_input=0, num_kv_shared_layers=0,
            layer_types=["sliding_attention", "full_attention"],
        )
    )  # fmt: skip


def mixtral():
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    sizes = {key: value for key, value in SIZES.items() if key != "moe_intermediate_size"}
    return MixtralForCausalLM(MixtralConfig(**sizes, num_key_value_heads=2, num_local_experts=8))


def routers_of(model):
    """Return the routers of a model that can record and replay."""
    routers = find_routers(model)
    assert problem_of(routers, model, lambda: model(input_ids=TOKENS)) == ""
    return routers


def routed(model, routers):
    routers.listen()
    model(input_ids=TOKENS)
    return routers.take()


@pytest.mark.parametrize("chosen", [2, 3])
def test_a_choice_of_groups_of_experts_is_not_replaced_by_recorded_experts(chosen):
    model = deepseek(num_experts_per_tok=chosen)
    routers = routers_of(model)
    free = routed(model, routers)
    wanted = (torch.stack([one.chosen for one in free], 1) + 1) % 8
    routers.replay(wanted)
    found = routed(model, routers)
    assert all(torch.equal(one.chosen, wanted[:, layer]) for layer, one in enumerate(found))
    assert torch.equal(found[0].own, free[0].chosen)


@pytest.mark.parametrize("make", [lambda: deepseek(num_experts_per_tok=2), gemma, mixtral], ids=["v3", "gemma", "mix"])
def test_logits_are_those_of_the_routers_distribution(make):
    model = make()
    routers, projected = routers_of(model), []
    for router in routers.routers:
        if hasattr(router.module, "proj"):
            router.module.proj.register_forward_hook(lambda module, given, found: projected.append(found))
        else:
            router.module.register_forward_hook(lambda module, given, found: projected.append(found[0]))
    found = routed(model, routers)
    assert len(projected) == len(found) == 2
    for one, logits in zip(found, projected, strict=True):
        scores = logits.sigmoid() if "Deepseek" in type(model).__name__ else logits.exp()
        torch.testing.assert_close(one.logits.softmax(-1), scores / scores.sum(-1, keepdim=True))
        torch.testing.assert_close(one.logits.logsumexp(-1), logits.logsumexp(-1))


def test_the_gradient_of_sigmoid_scores_is_that_of_their_normalised_values():
    draw = torch.Generator().manual_seed(0)
    logits, weights = torch.randn(5, 8, generator=draw).mul(4).requires_grad_(), torch.randn(5, 8, generator=draw)
    chosen = torch.zeros(5, 2, dtype=torch.int64)
    scores = logits.sigmoid()
    (expected,) = torch.autograd.grad((weights * scores / scores.sum(-1, keepdim=True)).sum(), logits)
    one = Routed(logits, chosen, chosen, "sigmoid")
    (found,) = torch.autograd.grad((weights * one.logits.softmax(-1)).sum(), logits, retain_graph=True)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-4)
    (found,) = torch.autograd.grad(one.logits.logsumexp(-1).sum(), logits)
    torch.testing.assert_close(found, logits.softmax(-1), atol=1e-6, rtol=1e-4)


def through(model, change):
    """Replace the forward pass of each router by `change`, which gets the router and it; return the model."""
    for module in model.modules():
        if type(module).__name__.endswith("TopKRouter"):
            module.forward = partial(change, module, module.forward)
    return model


def problem(model):
    return problem_of(find_routers(model), model, lambda: model(input_ids=TOKENS))


def test_a_pass_that_fails_with_other_experts_is_a_problem():
    def only_the_best(router, whole, hidden):
        logits, weights, chosen = whole(hidden)
        if not torch.equal(chosen, logits.argsort(-1, descending=True)[:, :2]):
            raise RuntimeError("these are not the best")
        return logits, weights, chosen

    found = problem(through(mixtral(), only_the_best))
    assert found == "a forward pass of MixtralForCausalLM with other experts fails: these are not the best"


def test_probabilities_whose_logits_are_not_seen_are_a_problem():
    def without_a_softmax(router, whole, hidden):
        chances = nn.functional.linear(hidden.reshape(-1, hidden.shape[-1]), router.weight).exp()
        chances = chances / chances.sum(-1, keepdim=True)
        return chances, *torch.topk(chances, 2, dim=-1)

    found = problem(through(mixtral(), without_a_softmax))
    assert found == "the routers of MixtralForCausalLM return probabilities in place of logits"
