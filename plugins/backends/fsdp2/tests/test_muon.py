"""Muon: its numbers, its steps in one process and shared out over ranks, and its checkpoints."""

import re

import pytest
import torch
from safetensors.torch import load_file

from whet.component import Spec
from whet.data.model_info import ModelInfo, read_model
from whet.errors import CheckpointError, ConfigError, WhetError
from whet_fsdp2.backend import Fsdp2Backend
from whet_fsdp2.config import Fsdp2Config, MuonConfig, OptimizerConfig, memory
from whet_fsdp2.muon import Muon, factor, orthogonal
from whet_start.small_models import make_model
from whet_testing.held import held_processes
from whet_testing.role_context import make_context

LIKELIHOOD = Spec("whet_testing.losses:Likelihood")
IMPORTS = ("whet_fsdp2.worker", "transformers.modeling_utils")
EXACT = MuonConfig(iteration_dtype="float32")
MUON = {"kind": "muon", "lr": 1e-2, "weight_decay": 0.1}


def state(worker):
    weights = {name: w.detach().clone() for name, w in worker._weights.masters.items()}
    return weights | {f"{n}.{k}": v.clone() for n, s in worker._stepper.state().items() for k, v in s.items()}


def tensors(folder):
    parts = {}
    for file in folder.glob("*.safetensors"):
        for key, value in load_file(file).items():
            name, _, begin = key.partition("@")
            parts.setdefault(name, []).append((int(begin.partition(",")[0] or 0), value))
    return {name: torch.cat([v for _, v in sorted(found, key=lambda one: one[0])]) for name, found in parts.items()}


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("scale", ["match_rms_adamw", "original"])
def test_five_steps_are_those_of_pytorch(scale, nesterov):
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("this PyTorch has no Muon")
    draw = torch.Generator().manual_seed(0)
    ours = [torch.randn(shape, generator=draw) for shape in ((24, 16), (16, 40), (16, 16), (1, 8))]
    theirs = [weight.clone() for weight in ours]
    group = {"params": ours, "lr": 0.02, "weight_decay": 0.1}
    mine = Muon([group], MuonConfig(scale=scale, nesterov=nesterov))
    other = torch.optim.Muon(theirs, lr=0.02, weight_decay=0.1, nesterov=nesterov, adjust_lr_fn=scale)
    for _ in range(5):
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn(a.shape, generator=draw)
            b.grad = a.grad.clone()
        mine.step()
        other.step()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("shape", [(12, 30), (30, 12)])
def test_an_update_is_made_orthogonal(shape):
    update = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    u, _, v = torch.linalg.svd(update, full_matrices=False)
    torch.testing.assert_close(orthogonal(update, (1.875, -1.25, 0.375), 30), u @ v)
    fast = torch.linalg.svdvals(orthogonal(update, MuonConfig().coefficients, 5))
    assert fast.min() > 0.6
    assert fast.max() < 1.3
    assert not orthogonal(torch.zeros(shape), MuonConfig().coefficients, 5).any()


def test_the_factor_on_the_rate_follows_the_shape():
    assert factor("original", 64, 16) == 2
    assert factor("original", 16, 64) == 1
    assert factor("match_rms_adamw", 16, 100) == factor("match_rms_adamw", 100, 16) == 2


@pytest.mark.parametrize("family", ["qwen3", "qwen3 untied"])
def test_muon_trains_the_matrices_in_the_layers_and_adamw_the_rest(make_worker, batch, family):
    worker = make_worker(family, optimizer=MUON)
    worker.train(batch, LIKELIHOOD)
    for name, held in worker._stepper.state().items():
        inside = re.search(r"layers\.\d+\..*_proj\.weight$", name)
        assert set(held) == ({"momentum", "step"} if inside else {"exp_avg", "exp_avg_sq", "step"}), name


SMALL = {
    "vocab_size": 256, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.2,
}  # fmt: skip
STACKED = {
    "gpt_oss": ({**SMALL, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
                {"mlp.experts.gate_up_proj_bias", "mlp.experts.down_proj_bias"}),
    "jamba": ({**SMALL, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 1, "mamba_dt_rank": 4,
               "use_mamba_kernels": False},
              {"mamba.A_log"}),
    "cohere": ({**SMALL, "use_qk_norm": True, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
               {"self_attn.q_norm.weight", "self_attn.k_norm.weight"}),
}  # fmt: skip
"""Models with stacks of vectors in their layers."""


@pytest.fixture(scope="module", params=[*STACKED, "ernie"])
def stacked(request, tmp_path_factory):
    """Return a model folder, and the names in a layer of the vectors that have two dimensions."""
    from transformers import AutoConfig, AutoModelForCausalLM

    if request.param == "ernie":
        return request.getfixturevalue("ernie"), {"mlp.gate.moe_statics.e_score_correction_bias"}
    config, vectors = STACKED[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(request.param, **config)).save_pretrained(folder)
    return folder, vectors


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_stacks_of_vectors_are_vectors(make_worker, stacked, kind):
    folder, vectors = stacked
    worker = make_worker(folder=folder, optimizer={**MUON, "kind": kind})
    model, stepper = worker._root.model, worker._stepper
    found = {name.partition(".0.")[2] for name, one in worker._weights.trained.items() if one.ndim == 2}
    assert vectors <= found
    decays = {id(p): group["weight_decay"] for one in stepper._optimizers.values() for group in one.param_groups
              for p in group["params"]}  # fmt: skip
    decayed = {name for name, weight in stepper._stepped.items() if decays[id(weight)]}
    flat = {name for name, weight in stepper._stepped.items() if weight.ndim < 2}
    stacks = {name for name in stepper._stepped if re.sub(r"^model\.layers\.\d+\.", "", name) in vectors}
    assert decayed == set(stepper._stepped) - flat - stacks
    if kind == "muon":
        products = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
        routers = {name for name in stepper._stepped if re.search(r"mlp\.(gate|router)\.weight$", name)}
        matrices = {name for name in products if "layers" in name} | routers
        assert {name for name, one in stepper._kinds.items() if one == "muon"} == matrices


def test_the_plan_counts_two_moments_of_stacked_experts(make_worker, moe, batch):
    worker = make_worker(folder=moe, optimizer=MUON)
    worker.train(batch, LIKELIHOOD)
    held = sum(moment.nbytes for moment in worker._stepper.held())
    terms = memory(Fsdp2Config(optimizer=OptimizerConfig("muon")), read_model(moe), 1, True)
    planned = sum(term.bytes for term in terms if "moment" in term.what)
    assert planned == pytest.approx(held, rel=0.01)


@pytest.mark.parametrize(
    ("change", "layers"), [({}, 8), ({"mlp_only_layers": [0, 3]}, 6), ({"decoder_sparse_step": 2}, 4)], ids=str
)
@pytest.mark.parametrize("nested", [False, True])
def test_the_plan_counts_experts_in_the_layers_that_have_them(change, layers, nested):
    config = {
        "hidden_size": 64, "num_hidden_layers": 8, "num_attention_heads": 4, "intermediate_size": 96, "vocab_size": 64,
        "num_experts": 16, "moe_intermediate_size": 128, **change,
    }  # fmt: skip
    named = {"model_type": "qwen3_moe", **({"text_config": config} if nested else config)}
    model = ModelInfo("", named)
    terms = list(memory(Fsdp2Config(optimizer=OptimizerConfig("muon")), model, 1, True))
    (rest,) = (term.bytes for term in terms if term.what.startswith("AdamW"))
    assert rest == 8 * (model.outer_parameters + layers * 16 * 3 * 64 * 128)


def test_a_value_head_is_trained_by_adamw(make_worker, batch):
    worker = make_worker(head="value", optimizer=MUON)
    worker.train(batch, Spec("whet_testing.losses:Regression"))
    kinds = worker._stepper._kinds
    assert [name for name in kinds if kinds[name] == "adamw" and "layers" not in name and "norm" not in name] == [
        "model.embed_tokens.weight",
        "score.weight",
    ]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_resuming_is_bitwise(make_worker, make_batch, tmp_path, dtype):
    options = {"dtype": dtype, "optimizer": MUON, "schedule": {"kind": "wsd", "warmup_steps": 2}}
    first, again = make_worker(**options), make_worker(**options)
    for seed in range(2):
        first.train(make_batch(seed), LIKELIHOOD)
    first.save(str(tmp_path / "saved"))
    again.load(str(tmp_path / "saved"))
    for seed in range(2, 4):
        for worker in (first, again):
            worker.train(make_batch(seed), LIKELIHOOD)
    ours, theirs = state(again), state(first)
    assert set(ours) == set(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize(("saved", "wanted"), [("adamw", "muon"), ("muon", "adamw")])
def test_the_state_of_the_other_optimizer_is_refused(make_worker, batch, tmp_path, saved, wanted):
    first = make_worker(optimizer={"kind": saved})
    first.train(batch, LIKELIHOOD)
    first.save(str(tmp_path))
    again = make_worker(optimizer={"kind": wanted})
    before = state(again)
    words = rf"state of the optimizer {saved}, and backend\.optimizer\.kind is {wanted}; set it to {saved}"
    with pytest.raises(CheckpointError, match=words):
        again.load(str(tmp_path))
    assert all(torch.equal(value, before[name]) for name, value in state(again).items())


def test_a_momentum_that_is_not_finite_is_refused(make_worker, batch, tmp_path):
    from safetensors.torch import save_file

    worker = make_worker(optimizer=MUON)
    worker.train(batch, LIKELIHOOD)
    worker.save(str(tmp_path))
    (file,) = tmp_path.glob("*.safetensors")
    found = load_file(file)
    name = next(name for name in found if name.startswith("momentum/"))
    found[name][0, 0] = torch.nan
    save_file(found, file)
    with pytest.raises(CheckpointError, match=f"holds {name} with 1 of .* values that are not finite"):
        make_worker(optimizer=MUON).load(str(tmp_path))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with held_processes(tmp_path_factory.mktemp("logs"), {("backend",): 2}, IMPORTS) as made:
        yield made


@pytest.fixture(scope="module")
def uneven(tmp_path_factory, tiny_tokenizer):
    """Return the folder of a model with 21 matrices in its layers, of which some have an odd number of rows."""
    return make_model(tmp_path_factory.mktemp("uneven"), tiny_tokenizer, hidden=48, head_dim=24, layers=3, mlp=97)


@pytest.fixture
def build(cluster, uneven, tmp_path):
    """Return a function that builds a backend on one rank or on two."""
    built = []

    def make(size, muon=EXACT, **options):
        # AdamW divides by the root of the mean square: the large eps keeps it from enlarging rounding errors.
        optimizer = OptimizerConfig("muon", lr=1e-2, eps=1e-3, weight_decay=0.1, muon=muon)
        place = cluster.worker_group("backend", 2) if size > 1 else None
        context = make_context(tmp_path / f"place-{len(built)}", "backend", uneven, place)
        built.append(Fsdp2Backend(Fsdp2Config(optimizer=optimizer, **options), context))
        return built[-1]

    yield make
    for backend in built:
        backend.close()


def saved(backend, folder):
    backend.save(folder).result()
    return tensors(folder)


def compare(found, expected, atol):
    assert set(found) == set(expected)
    assert any(name.startswith("momentum/") for name in found)
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], atol=atol, rtol=0, msg=lambda m, n=name: f"{n}: {m}")


def test_two_ranks_share_the_matrices_out_and_take_the_steps_of_one(build, make_batch, tmp_path):
    one, two = build(1), build(2)
    for seed in range(3):
        for backend in (one, two):
            backend.train(make_batch(seed), LIKELIHOOD)
    expected = saved(one, tmp_path / "one")
    compare(saved(two, tmp_path / "two"), expected, 1e-5)

    # two ranks that resume take the same step, bitwise; one rank that resumes takes it within rounding
    again, alone = build(2), build(1)
    for backend in (again, alone):
        backend.load(tmp_path / "two")
    for backend in (two, again, alone):
        backend.train(make_batch(3), LIKELIHOOD)
    after = saved(two, tmp_path / "after")
    resumed = saved(again, tmp_path / "again")
    assert all(torch.equal(resumed[name], after[name]) for name in after)
    compare(saved(alone, tmp_path / "alone"), after, 1e-6)


def test_two_ranks_in_bfloat16_iterations_stay_near_one(build, make_batch, tmp_path):
    one, two = build(1, MuonConfig()), build(2, MuonConfig())
    for backend in (one, two):
        backend.train(make_batch(0), LIKELIHOOD)
    compare(saved(two, tmp_path / "two"), saved(one, tmp_path / "one"), 2e-3)


def trained(make_worker, batch, *, folder=None, **optimizer):
    """Return the weights before and after a step."""
    worker = make_worker("qwen3", folder=folder, max_grad_norm=None, optimizer={"lr": 1e-2, **optimizer})
    before = {name: w.detach().clone() for name, w in worker._weights.masters.items()}
    worker.train(batch, LIKELIHOOD)
    return before, {name: w.detach().clone() for name, w in worker._weights.masters.items()}


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_group_changes_rate_and_decay_of_the_weights_that_it_matches(make_worker, batch, kind):
    start, plain = trained(make_worker, batch, kind=kind)
    groups = [
        {"match": "embed_tokens", "lr_factor": 0},
        {"match": r"layers\.0\..*proj", "lr_factor": 0.5},
        {"match": r"layers\.[01]\.self_attn", "weight_decay": 0.5},
        {"match": "layers.1.mlp", "lr": 2e-2},
        {"match": r"^model\.norm", "weight_decay": 0.5},
    ]
    _, found = trained(make_worker, batch, kind=kind, groups=groups)
    for name, before in start.items():
        step = plain[name] - before
        if "embed_tokens" in name:
            wanted = before
        elif re.search(r"layers\.0\..*proj", name):
            wanted = before + 0.5 * step
        elif "layers.1.mlp" in name:
            wanted = before + 2 * step
        elif "self_attn" in name or name == "model.norm.weight":
            wanted = before * (1 - 1e-2 * 0.5) + step
        else:
            wanted = plain[name]
        torch.testing.assert_close(found[name], wanted, atol=2e-6, rtol=0, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("kind", ["adamw", "adamw_8bit", "muon"])
def test_weights_with_the_rate_0_have_no_part_in_the_norm(make_worker, batch, gradients, kind):
    if kind == "adamw_8bit":
        pytest.importorskip("bitsandbytes")
    groups = [{"match": "embed_tokens|q_proj", "lr_factor": 0}]
    worker = make_worker("qwen3", optimizer={"kind": kind, "lr": 1e-2, "groups": groups})
    frozen = {name: w for name, w in worker._weights.trained.items() if re.search("embed_tokens|q_proj", name)}
    before = {name: weight.detach().clone() for name, weight in frozen.items()}
    others = [one.norm() for name, one in gradients(worker, batch, LIKELIHOOD).items() if name not in frozen]
    for weight in frozen.values():
        weight.register_hook(lambda gradient: gradient * torch.nan)
    found = worker.train(batch, LIKELIHOOD)
    assert found["grad_norm"].number() == pytest.approx(float(torch.stack(others).norm()), rel=1e-5)
    assert set(worker._stepper.state()) == set(worker._weights.trained) - set(frozen)
    assert all(torch.equal(weight, before[name]) for name, weight in frozen.items())


def test_the_rate_of_muon_is_that_of_matrices(make_worker, batch):
    start, plain = trained(make_worker, batch, kind="muon")
    _, found = trained(make_worker, batch, kind="muon", muon={"lr": 3e-2})
    for name, before in start.items():
        times = 3 if name.endswith("_proj.weight") else 1
        torch.testing.assert_close(found[name], before + times * (plain[name] - before), atol=2e-6, rtol=0)


def test_the_factor_is_of_outputs_and_inputs_however_a_layer_stores_them(make_worker, batch, tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=256, n_embd=32, n_layer=1, n_head=2, n_positions=64, initializer_range=0.2)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    (start, own), (_, matched) = (
        trained(make_worker, batch, kind="muon", muon={"scale": scale}, folder=tmp_path / "gpt2")
        for scale in ("original", "match_rms_adamw")
    )
    sizes = {"attn.c_attn": (96, 32), "attn.c_proj": (32, 32), "mlp.c_fc": (128, 32), "mlp.c_proj": (32, 128)}
    for layer, (outputs, inputs) in sizes.items():
        name = f"transformer.h.0.{layer}.weight"
        wanted = max(1, outputs / inputs) ** 0.5 / (0.2 * max(outputs, inputs) ** 0.5)
        ratio = (own[name] - start[name]).norm() / (matched[name] - start[name]).norm()
        assert float(ratio) == pytest.approx(wanted, rel=1e-3), layer


def test_a_group_that_matches_no_weight_is_refused(make_worker):
    with pytest.raises(ConfigError, match=r"groups\.0\.match: 'lm_head' matches no weight; the model has \d+ weights"):
        make_worker("qwen3", optimizer={"groups": [{"match": "lm_head"}]})
    with pytest.raises(WhetError, match=r"groups\.1\.match: 'mlp' matches no weight, that no group before it matches"):
        make_worker("qwen3", optimizer={"groups": [{"match": "layers"}, {"match": "mlp"}]})
