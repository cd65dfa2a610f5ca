"""Every kind of parallelism against one process that trains with `transformers` and torch's AdamW, over three steps."""

from pathlib import Path

import attrs
import numpy as np
import pytest
import torch

from whet.component import Spec
from whet.errors import CheckpointError, WorkerError
from whet.runtime.local import LocalCluster
from whet_fsdp2.backend import Fsdp2Backend
from whet_fsdp2.config import Fsdp2Config, OptimizerConfig
from whet_fsdp2.parallel import ParallelConfig
from whet_testing.role_context import make_context
from whet_testing.three_steps import LIKELIHOOD, steps_by_hand, steps_of
from whet_training.experts import ExpertsConfig

pytestmark = pytest.mark.slow
IMPORTS = ("whet_fsdp2.worker", "transformers.modeling_utils")
OPTIMIZER = OptimizerConfig(lr=1e-3, weight_decay=0.1)
SEEDS = (0, 1, 2)
LAYOUTS = {
    "fsdp 2": (2, {}),
    "tensor 2": (2, {"tensor": 2}),
    "context 2": (2, {"context": 2}),
    "replicate 2": (2, {"replicate": 2}),
    "expert 2": (2, {"expert": 2}),
    "tensor 2, expert 2": (2, {"tensor": 2, "expert": 2}),
    "tensor 2 x fsdp 2": (4, {"tensor": 2}),
    "replicate 2 x fsdp 2": (4, {"replicate": 2}),
    "context 2 x fsdp 2": (4, {"context": 2}),
    "tensor 2 x context 2": (4, {"tensor": 2, "context": 2}),
    "tensor 2 x fsdp 2, expert 4": (4, {"tensor": 2, "expert": 4}),
}
# The first has norms of queries and keys, whose gradients are parts, and a tied vocabulary of 375, which 2 does not
# divide.
MODELS = ("qwen3", "llama", "qwen3_moe", "mixtral")
MIXTURES = ("qwen3_moe", "mixtral")
PADDED = ("qwen3", "mixtral")
"""Models whose padded rows are trained in every layout: a dense one and a mixture."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory, folders):
    """Start two and four processes once. A frozen model holds them, and their process group, from test to test."""
    share = [("backend2", "held2"), ("backend4", "held4")]
    with LocalCluster(tmp_path_factory.mktemp("logs"), share=share) as made:
        roles = [role for group in share for role in group]
        for role in roles:
            made.worker_group(role, int(role[-1]))
        made.warm(dict.fromkeys(roles, IMPORTS), roles)
        for role in ("held2", "held4"):
            place = made.worker_group(role, int(role[-1]))
            held = make_context(tmp_path_factory.mktemp(role), role, folders("qwen3"), place)
            Fsdp2Backend(Fsdp2Config(), attrs.evolve(held, trained=False))
        yield made


@pytest.fixture
def build(cluster, folders, tmp_path):
    """Return a function that builds a backend with a parallel layout; "" is one rank in this process."""
    built = []

    def make(name, where="", dtype="float32", **config):
        ranks, sizes = LAYOUTS.get(where, (1, {}))
        config = Fsdp2Config(**{"optimizer": OPTIMIZER, "parallel": ParallelConfig(**sizes), **config})
        place = cluster.worker_group(f"backend{ranks}", ranks) if ranks > 1 else None
        folder = name if isinstance(name, Path) else folders(name)
        context = make_context(tmp_path / str(len(built)), "backend", folder, place, dtype=dtype)
        built.append(Fsdp2Backend(config, context))
        return built[-1]

    yield make
    for backend in built:
        backend.close()


@pytest.fixture(scope="module")
def reference(folders, make_batch):
    """Return loss and gradient norm of three steps of a model that is trained by hand, a sequence at a time."""
    known = {}

    def steps(name):
        if name not in known:
            of, batches = OPTIMIZER, [make_batch(seed) for seed in SEEDS]
            known[name] = steps_by_hand(folders(name), batches, of.lr, of.weight_decay, of.betas, of.eps)
        return known[name]

    return steps


def cases():
    for layout, (_, sizes) in LAYOUTS.items():
        for name in MODELS:
            if "expert" not in sizes or name in MIXTURES:
                yield pytest.param(layout, name, id=f"{layout} of {name}")


@pytest.mark.parametrize(("layout", "name"), list(cases()))
def test_three_steps_equal_those_of_one_process_by_hand(build, reference, make_batch, layout, name):
    batches = [make_batch(seed) for seed in SEEDS]
    for rows in ("shared", "padded"):
        if rows == "padded" and ("context" in layout or name not in PADDED):
            continue
        # 60 tokens of some 180: several micro-batches on each rank
        found = steps_of(build(name, layout, micro_batch_tokens=60, layout=rows), batches)
        np.testing.assert_allclose(found, reference(name), rtol=1e-4)


@pytest.mark.parametrize("layout", ["fsdp 2", "tensor 2", "context 2", "tensor 2 x fsdp 2"])
def test_three_steps_in_bfloat16_stay_near_float32(build, reference, make_batch, layout):
    found = steps_of(build("llama", layout, "bfloat16", micro_batch_tokens=40), [make_batch(seed) for seed in SEEDS])
    np.testing.assert_allclose(found, reference("llama"), rtol=3e-2)


@pytest.mark.parametrize("layout", ["tensor 2", "context 2", "tensor 2 x fsdp 2"])
@pytest.mark.parametrize(
    "options",
    [{"gradient_checkpointing": True}, {"gradient_checkpointing": "selective"}, {"reshard_after_forward": False}],
    ids=str,
)
def test_options_hold_in_every_layout(build, reference, make_batch, layout, options):
    found = steps_of(build("qwen3", layout, micro_batch_tokens=40, **options), [make_batch(seed) for seed in SEEDS])
    np.testing.assert_allclose(found, reference("qwen3"), rtol=1e-4)


@pytest.mark.parametrize("layout", ["tensor 2", "context 2", "tensor 2 x fsdp 2", "tensor 2 x context 2"])
def test_scores_are_those_of_one_rank(build, folders, make_batch, layout):
    batch = make_batch(5)
    mixed = batch.take(np.random.default_rng(0).permutation(batch.sequences))
    outputs = ("logprobs", "entropy", "topk_ids:4", "topk_logprobs:4", "kl_forward", "kl_reverse", "jensen_shannon:0.3")
    options = {"teacher": str(folders("llama")), "reference": True}
    one, several = build("qwen3", **options), build("qwen3", layout, **options)
    for weights in ("policy", "reference"):
        asked = outputs if weights == "policy" else outputs[:4]
        expected, found = (backend.score(mixed, asked, weights) for backend in (one, several))
        assert np.array_equal(found["topk_ids:4"], expected["topk_ids:4"])
        for name in expected:
            np.testing.assert_allclose(found[name], expected[name], atol=1e-4, err_msg=name)
    at = mixed.with_columns(topk_ids=expected["topk_ids:4"])
    for loss in ("Divergence", "AtTokens"):
        spec = Spec(f"whet_testing.losses:{loss}")
        np.testing.assert_allclose(steps_of(several, [at], spec), steps_of(one, [at], spec), rtol=1e-4)


@pytest.mark.parametrize("layout", ["tensor 2", "context 2", "tensor 2 x fsdp 2"])
def test_values_are_those_of_one_rank(build, make_batch, layout):
    one, several = build("qwen3", head="value"), build("qwen3", layout, head="value")
    spec, batches = Spec("whet_testing.losses:Regression"), [make_batch(0), make_batch(1).take([0])]
    np.testing.assert_allclose(steps_of(several, batches, spec), steps_of(one, batches, spec), rtol=1e-4)


EXPERTS = ExpertsConfig(balance=0.3, z_loss=0.1)


@pytest.mark.parametrize("layout", ["fsdp 2", "tensor 2", "context 2", "expert 2", "tensor 2 x context 2"])
@pytest.mark.parametrize("over", ["batch", "micro-batch"])
def test_balance_and_loads_are_those_of_one_rank(build, make_batch, layout, over):
    if over == "micro-batch" and layout in ("fsdp 2", "expert 2"):
        pytest.skip("each rank has a micro-batch of its own, so the mean is another one")
    experts = attrs.evolve(EXPERTS, balance_over=over)
    one, several = build("qwen3_moe", experts=experts), build("qwen3_moe", layout, experts=experts)
    expected, found = (backend.train(make_batch(0), LIKELIHOOD) for backend in (one, several))
    for name in ("loss", "grad_norm", "experts/load_max", "experts/entropy", "experts/balance_loss", "experts/z_loss"):
        assert found[name].number() == pytest.approx(expected[name].number(), rel=1e-4), name


@pytest.mark.parametrize("layout", ["expert 2", "tensor 2 x fsdp 2", "replicate 2 x fsdp 2", "tensor 2, expert 2"])
def test_routers_that_each_rank_holds_whole_train_as_on_one_rank(build, ernie, make_batch, layout):
    batches = [make_batch(seed) for seed in SEEDS]
    one, several = (steps_of(build(ernie, where, micro_batch_tokens=40), batches) for where in ("", layout))
    np.testing.assert_allclose(several, one, rtol=1e-4)


CONTINUATIONS = [
    ("qwen3", "", "fsdp 2"),
    ("qwen3", "fsdp 2", ""),
    ("qwen3", "tensor 2", "fsdp 2"),
    ("qwen3", "tensor 2 x fsdp 2", "context 2"),
    ("qwen3_moe", "expert 2", ""),
    ("qwen3_moe", "tensor 2 x fsdp 2, expert 4", "expert 2"),
]


@pytest.mark.parametrize(("name", "saving", "loading"), CONTINUATIONS)
def test_a_checkpoint_goes_on_bitwise_in_its_layout_and_to_rounding_in_another(
    build, make_batch, tmp_path, name, saving, loading
):
    later = [make_batch(seed) for seed in (2, 3)]
    first = build(name, saving)
    steps_of(first, [make_batch(0), make_batch(1)])
    first.save(tmp_path / "saved").result()
    expected = steps_of(first, later)
    for where in (saving, loading):
        other = build(name, where)
        other.load(tmp_path / "saved")
        found = steps_of(other, later)
        if where == saving:
            assert np.array_equal(found, expected)
        np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize("layout", ["tensor 2 x fsdp 2", "replicate 2 x fsdp 2"])
def test_muon_steps_as_on_one_rank(build, make_batch, layout):
    batches = [make_batch(seed) for seed in SEEDS]
    optimizer = OptimizerConfig(lr=1e-3, kind="muon")
    one, several = (steps_of(build("llama", where, optimizer=optimizer), batches) for where in ("", layout))
    np.testing.assert_allclose(several, one, rtol=1e-3)


@pytest.mark.parametrize("layout", ["fsdp 2", "tensor 2 x fsdp 2"])
@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe"])
def test_an_export_is_bitwise_the_model_that_was_loaded(build, folders, tmp_path, name, layout):
    from transformers import AutoModelForCausalLM

    build(name, layout).export(tmp_path / "out")
    ours, theirs = (AutoModelForCausalLM.from_pretrained(at).state_dict() for at in (tmp_path / "out", folders(name)))
    assert set(ours) == set(theirs)
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_a_checkpoint_that_lacks_a_ranks_part_is_refused(build, make_batch, tmp_path):
    backend = build("qwen3", "fsdp 2")
    steps_of(backend, [make_batch(0)])
    backend.save(tmp_path / "saved").result()
    (tmp_path / "saved" / "rank-0001.json").unlink()
    backend.close()
    with pytest.raises((CheckpointError, WorkerError), match=r"holds no rank-0001\.json"):
        build("qwen3").load(tmp_path / "saved")


def test_sizes_that_do_not_divide_are_refused_by_name(build):
    with pytest.raises(WorkerError, match=r"backend2\.parallel\.context: 2 ranks cannot be split into groups of"):
        build("qwen3", "fsdp 2", parallel=ParallelConfig(tensor=2, context=2))
