"""What adapters are drawn from, and which layers a target means."""

import pytest
import torch

from whet.component import AdapterInfo
from whet.errors import ConfigError, WhetError
from whet_training.lora import TRIAL_SIZE, AdapterSets, drawn_a, drawn_trial, refuse_others
from whet_training.lora_config import LoraConfig, chosen

NAMES = [f"model.layers.{layer}.self_attn.{one}_proj" for layer in range(12) for one in "qkv"]


def test_a_new_a_is_uniform_as_in_peft_and_depends_on_seed_and_name_alone():
    drawn, bound = drawn_a(0, "a.weight", (16, 400)), 400**-0.5
    assert 0.99 * bound < drawn.abs().max() <= bound
    assert drawn.std().item() == pytest.approx(bound / 3**0.5, rel=0.02)
    assert torch.equal(drawn_a(0, "a.weight", (16, 400)), drawn)
    assert not torch.equal(drawn_a(1, "a.weight", (16, 400)), drawn)
    assert not torch.equal(drawn_a(0, "b.weight", (16, 400)), drawn)


@pytest.mark.parametrize("info", [AdapterInfo(8, 16.0), AdapterInfo(32, 4.0, rslora=True)], ids=str)
def test_a_trial_changes_a_weight_by_a_known_size_whatever_rank_and_scaling(info):
    a, b = drawn_trial(0, "a.weight", (info.rank, 300), (500, info.rank), info)
    size = (info.scaling * b @ a).square().mean().sqrt().item()
    assert size * 300**0.5 == pytest.approx(TRIAL_SIZE, rel=0.1)


def test_a_target_is_the_end_of_a_name_or_an_expression_for_all_of_it():
    assert chosen(("q_proj",), NAMES, "Model") == NAMES[::3]
    two = chosen((r"model\.layers\.1\..*", "layers.0.self_attn.v_proj"), NAMES, "Model")
    assert two == NAMES[2:6]
    for target in ("proj", "layers.1"):  # an end after a dot, or all of it
        with pytest.raises(
            ConfigError, match="matches no linear layer but the head of Model; its layers have k_proj, q"
        ):
            chosen((target,), NAMES, "Model")


def test_the_adapters_that_compute_change_for_a_while_alone():
    sets = AdapterSets(LoraConfig(rank=2), seed=0)
    pair = torch.ones(2, 3), torch.ones(4, 2)
    sets.pairs["a"] = pair
    with pytest.raises(KeyError), sets.using("base"):
        assert sets.at("a") is None
        with sets.using("trial"):
            assert [tuple(one.shape) for one in sets.at("a")] == [(2, 3), (4, 2)]
        with sets.using("reference"):
            assert sets.at("a") is None
        assert sets.at("a") is None
        raise KeyError("after an error, too")
    assert sets.at("a") is pair


def test_an_adapter_with_other_names_shapes_or_values_is_refused_by_name():
    wanted, whole = {"a": (2, 3)}, torch.ones(2, 3)
    refuse_others(wanted, {"a": whole}, "it")
    for found, words in (
        ({}, "it lacks a"),
        ({"a": whole, "b": whole}, "it holds b, which backend.lora does not train"),
        ({"a": whole.T}, r"it: a has shape \[3, 2\], wanted \[2, 3\]"),
        ({"a": whole / 0}, "finite values"),
    ):
        with pytest.raises(WhetError, match=words):
            refuse_others(wanted, found, "it")
