import numpy as np
import pytest
import torch

from whet.component import Spec
from whet_fsdp2 import attention
from whet_fsdp2.blocks import AttentionPlan
from whet_fsdp2.few_queries import attend_few, keys_of
from whet_fsdp2.narrowed import narrow

LOSSES = {"lm": Spec("whet_testing.losses:Weighted"), "value": Spec("whet_testing.losses:Regression")}


@pytest.fixture
def answers_alone(batch):
    """Return the batch with something to learn at the last place of each sequence alone."""
    mask = np.zeros(batch.tokens, bool)
    mask[batch["lengths"].cumsum() - 1] = True
    return batch.with_columns(loss_mask=mask)


@pytest.mark.parametrize("layout", ["shared", "packed", "padded"])
@pytest.mark.parametrize("head", LOSSES)
def test_values_and_gradients_are_those_of_all_places(make_worker, answers_alone, gradients, head, layout):
    worker = make_worker(head=head, layout=layout)
    assert len(worker._root.narrowed) == 3
    outputs = ("values",) if head == "value" else ("logprobs", "entropy")
    found = worker.score(answers_alone, outputs), gradients(worker, answers_alone, LOSSES[head])
    for one in worker._root.narrowed:
        one.undo()
    worker._root.narrowed = ()
    expected = worker.score(answers_alone, outputs), gradients(worker, answers_alone, LOSSES[head])
    for name, values in expected[0].items():
        torch.testing.assert_close(torch.tensor(found[0][name]), torch.tensor(values), atol=1e-5, rtol=1e-5)
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        torch.testing.assert_close(found[1][name], gradient, atol=2e-6, rtol=1e-4)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_last_layer_is_computed_only_where_it_is_read(make_worker, answers_alone, checkpointing):
    worker = make_worker(layout="packed", gradient_checkpointing=checkpointing)
    seen: dict[str, set[int]] = {}
    for number, layer in enumerate(worker._root.model.base_model.layers):
        for name, module in (("network", layer.mlp.down_proj), ("projection", layer.self_attn.o_proj)):
            module.register_forward_hook(
                lambda module, given, made, key=f"{name} {number}": seen.setdefault(key, set()).add(given[0].shape[-2])
            )
    worker.train(answers_alone, LOSSES["lm"])
    assert seen["network 1"] == {answers_alone.sequences}
    assert min(seen["network 0"]) > answers_alone.sequences


def test_where_few_positions_are_read_attention_has_no_other_queries(make_worker, answers_alone, monkeypatch):
    made = []
    monkeypatch.setattr(attention, "attend_few", lambda *args: made.append(args[3]) or attend_few(*args))
    worker = make_worker(head="value", layout="shared")
    made.clear()  # of the probe when it was loaded
    worker.train(answers_alone, LOSSES["value"])
    assert [len(rows) for rows in made] == [answers_alone.sequences]


def test_the_keys_of_a_position_are_its_prompt_and_what_is_before_it():
    # segments [0 1 2] [3 4], then [5 6] and [7 8 9] behind the first and [10] behind the second
    plan = AttentionPlan(np.array([3, 2, 2, 3, 1]), np.array([-1, -1, 0, 0, 1]))
    tokens, real = keys_of(plan, np.array([1, 6, 8, 10]))
    assert [row[there].tolist() for row, there in zip(tokens, real, strict=True)] == [
        [0, 1], [0, 1, 2, 5, 6], [0, 1, 2, 7, 8], [3, 4, 10],
    ]  # fmt: skip
    assert keys_of(plan, np.arange(11)) is None


def test_where_nearly_all_is_read_nothing_is_picked_out(make_worker, batch):
    worker = make_worker(layout="packed")
    all_of_it = batch.with_columns(loss_mask=np.arange(batch.tokens) > 0)
    worker.score(all_of_it, ("logprobs",))
    assert all(one.rows is None for one in worker._root.narrowed)


def test_mixtures_of_experts_are_left_alone():
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    config = Qwen3MoeConfig(
        vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, head_dim=8,
        num_experts=2, num_experts_per_tok=1, moe_intermediate_size=8, intermediate_size=16,
    )  # fmt: skip
    assert narrow(AutoModelForCausalLM.from_config(config)) == ()
