"""Rows of few lengths: numbers stay the same, and PyTorch plans each operator once."""

import attrs
import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor

from whet.component import Spec
from whet.config.structure import structure
from whet.data.batch import from_sequences
from whet.data.model_info import read_model
from whet.interfaces.workers import WorkerRank
from whet_fsdp2 import attention, trace
from whet_fsdp2.config import Fsdp2Config, sizes
from whet_fsdp2.feed import EXACT, Widths, feed, widths
from whet_fsdp2.ranks import Ranks
from whet_memory.case import Case
from whet_memory.live_bytes import fake_ranks

LOSS = Spec("whet_testing.losses:Weighted")


@pytest.mark.parametrize(("tokens", "width"), [(1, 7), (7, 7), (8, 14), (98, 98), (99, 100), (100, 100), (130, 130)])
def test_a_row_is_padded_to_a_multiple_but_never_over_the_budget(tokens, width):
    found = Widths(7, 100)
    assert found.of(tokens) == width
    assert EXACT.of(tokens) == tokens


def test_rows_have_at_most_sixteen_lengths_under_tensor_parallelism_and_any_length_elsewhere():
    config = structure({"micro_batch_tokens": 1000, "parallel": {"tensor": 2}}, Fsdp2Config, None)
    assert len({widths(config).of(tokens) for tokens in range(1, 1001)}) == 16
    assert widths(structure({}, Fsdp2Config, None)) == EXACT


def test_positions_are_added_until_their_number_is_allowed():
    assert Widths(4, 100).extend(np.array([2, 3, 9, 11, 12]), 20).tolist() == [2, 3, 9, 11, 12, 0, 1, 4]
    assert sorted(Widths(8, 100).extend(np.array([1, 2]), 5)) == [0, 1, 2, 3, 4], "there are no more"


@pytest.mark.parametrize("layout", ["packed", "shared"])
@pytest.mark.parametrize("head", ["lm", "value"])
def test_padding_behind_a_row_changes_neither_outputs_nor_gradients(make_worker, batch, gradients, head, layout):
    worker = make_worker(head=head, layout=layout)
    loss = LOSS if head == "lm" else Spec("whet_testing.losses:Regression")
    output = "logprobs" if head == "lm" else "values"
    found = []
    for allowed in (EXACT, Widths(64, 4096)):
        worker._widths = allowed
        found.append((worker.score(batch, (output,))[output], gradients(worker, batch, loss)))
    np.testing.assert_allclose(found[1][0], found[0][0], atol=1e-5)
    for name, gradient in found[0][1].items():
        torch.testing.assert_close(found[1][1][name], gradient, atol=2e-6, rtol=1e-4)


def test_operators_are_planned_once_for_rows_of_similar_length(folders, monkeypatch):
    """A plan takes longer than the operator. Without padding each micro-batch of a new length makes all plans anew."""
    config = structure({"micro_batch_tokens": 160, "parallel": {"tensor": 2}, "layout": "packed"}, Fsdp2Config, None)
    model = read_model(folders("llama"), "float32")
    case = Case(attrs.asdict(config), model, sizes(config, 2), tokens=160)
    attention.register()
    planner = DTensor._op_dispatcher.sharding_propagator
    plans = []
    whole = planner.propagate_op_sharding_non_cached
    monkeypatch.setattr(planner, "propagate_op_sharding_non_cached", lambda one: (plans.append(one), whole(one))[1])

    def planned(root, length, allowed):
        plans.clear()
        row = {"tokens": np.arange(length) % 50, "loss_mask": np.arange(length) >= length - 45 + length % 4}
        one = feed(from_sequences([row], prompt_lengths=[1]), "packed", torch.device("cpu"), None, allowed)
        root(one, ("logprobs",))["logprobs"].sum().backward()
        return len(plans)

    with fake_ranks(2):
        root, _ = trace._build(case, config, Ranks(WorkerRank("backend", 0, 2), config.parallel), trained=True)
        trace._allocate(root.model)
        first = planned(root, 102, widths(config))
        planned(root, 104, widths(config))  # gradients are added up from here on
        assert [planned(root, length, widths(config)) for length in (103, 107, 111)] == [0, 0, 0]
        assert planned(root, 109, EXACT) > first / 2
