"""Every kind of parallelism against one process that trains with `transformers` and torch's AdamW, over three steps."""

import numpy as np
import pytest

from whet_megatron.config import OptimizerConfig
from whet_testing.three_steps import steps_by_hand, steps_of

pytestmark = pytest.mark.slow
OPTIMIZER = OptimizerConfig(lr=1e-3, weight_decay=0.1)
SEEDS = (0, 1, 2)
LAYOUTS = {
    "one rank": (1, {}),
    "data 2": (2, {}),
    "tensor 2": (2, {"tensor": 2}),
    "tensor 2, sequence": (2, {"tensor": 2, "sequence": True}),
    "pipeline 2": (2, {"pipeline": 2}),
    "pipeline 2, virtual 2": (2, {"pipeline": 2, "virtual": 2}),
    "context 2": (2, {"context": 2}),
    "tensor 2 x pipeline 2": (4, {"tensor": 2, "pipeline": 2}),
    "tensor 2, sequence x context 2": (4, {"tensor": 2, "sequence": True, "context": 2}),
}
MIXED = {
    "one rank": (1, {}),
    "data 2": (2, {}),
    "expert 2": (2, {"expert": 2}),
    "tensor 2, sequence, expert 2": (2, {"tensor": 2, "sequence": True, "expert": 2}),
    "tensor 2, sequence, expert_tensor 2": (2, {"tensor": 2, "sequence": True, "expert_tensor": 2}),
    "pipeline 2": (2, {"pipeline": 2}),
    "context 2, expert 2": (2, {"context": 2, "expert": 2}),
    "pipeline 2, expert 2": (4, {"pipeline": 2, "expert": 2}),
}
DENSE, MIXTURES = ("qwen3", "llama", "qwen2"), ("qwen3_moe", "mixtral")


def layers(layout):
    return 4 if "virtual" in layout else 2


@pytest.fixture(scope="module")
def reference(folders, make_batch):
    """Return loss and gradient norm of three steps of a model that is trained by hand, a sequence at a time."""
    known = {}

    def steps(name, count):
        if (name, count) not in known:
            of, batches = OPTIMIZER, [make_batch(seed) for seed in SEEDS]
            folder = folders(name, layers=count)
            known[name, count] = steps_by_hand(folder, batches, of.lr, of.weight_decay, of.betas, of.eps)
        return known[name, count]

    return steps


def cases():
    for known, names in ((LAYOUTS, DENSE), (MIXED, MIXTURES)):
        for layout, (ranks, sizes) in known.items():
            for name in names:
                if name != "qwen2" or "tensor" not in sizes:  # it has one key head
                    yield pytest.param(layout, ranks, sizes, name, id=f"{layout} of {name}")


@pytest.mark.parametrize(("layout", "ranks", "sizes", "name"), list(cases()))
def test_three_steps_equal_those_of_one_process_by_hand(
    build, folders, reference, make_batch, layout, ranks, sizes, name
):
    batches = [make_batch(seed) for seed in SEEDS]
    for rows in ("packed", "padded"):
        # 40 tokens of some 180: several micro-batches on each rank
        backend = build(folders(name, layers=layers(layout)), ranks, sizes, micro_batch_tokens=40, layout=rows)
        found = steps_of(backend, batches)
        backend.close()
        np.testing.assert_allclose(found, reference(name, layers(layout)), rtol=1e-4, err_msg=rows)
