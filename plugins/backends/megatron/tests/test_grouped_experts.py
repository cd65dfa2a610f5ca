"""Grouped experts: Megatron's module with plain matrices, against experts that are computed one after the other."""

import numpy as np
import pytest

from whet_megatron.grouped_experts import single_name
from whet_megatron.layers import grouped
from whet_testing.stored_weights import assert_bitwise, weights_of
from whet_testing.three_steps import steps_of

CASES = [
    ("qwen3_moe", 1, {}),
    ("mixtral", 2, {"expert": 2}),
    ("qwen3_moe", 2, {"tensor": 2, "sequence": True, "expert_tensor": 2}),
]


def test_parameters_of_grouped_experts_have_the_names_of_single_ones():
    name = "decoder.layers.3.mlp.experts.linear_fc2.weight17"
    assert single_name(name) == "decoder.layers.3.mlp.experts.local_experts.17.linear_fc2.weight"
    assert single_name("decoder.layers.3.mlp.linear_fc2.weight") == "decoder.layers.3.mlp.linear_fc2.weight"


def test_experts_are_grouped_on_their_own_where_there_is_a_kernel():
    found = [[grouped(wanted, layers) for wanted in ("auto", True, False)] for layers in ("transformer-engine", "test")]
    assert found == [[True, True, False], [False, True, False]]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "ranks", "sizes"), CASES, ids=str)
def test_steps_exports_and_checkpoints_are_those_of_single_experts_on_one_rank(
    build, folders, make_batch, tmp_path, name, ranks, sizes
):
    batches = [make_batch(seed) for seed in range(4)]
    single = build(name, micro_batch_tokens=40, grouped_experts=False)
    many = build(name, ranks, sizes, micro_batch_tokens=40, grouped_experts=True)
    many.export(tmp_path / "out")
    assert_bitwise(weights_of(tmp_path / "out"), weights_of(folders(name)))
    np.testing.assert_allclose(steps_of(many, batches[:2]), steps_of(single, batches[:2]), rtol=1e-5)
    many.save(tmp_path / "saved").result()
    single.load(tmp_path / "saved")
    np.testing.assert_allclose(steps_of(single, batches[2:]), steps_of(many, batches[2:]), rtol=1e-5)
    single.save(tmp_path / "again").result()
    many.load(tmp_path / "again")
    more = [make_batch(4)]
    np.testing.assert_allclose(steps_of(many, more), steps_of(single, more), rtol=1e-5)
