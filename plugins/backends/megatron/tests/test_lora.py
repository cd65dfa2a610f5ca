"""LoRA under every kind of parallelism, against PEFT on the same weights in one process."""

import shutil
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from attrs import evolve
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.filesystem import FileSystemReader

from whet.component import Spec
from whet.errors import WhetError
from whet.interfaces.weights import TransferSpec
from whet_megatron.config import OptimizerConfig
from whet_megatron.parallel import ParallelConfig
from whet_testing.three_steps import steps_of
from whet_training.lora_config import LoraConfig, adapter_info
from whet_training.weight_groups import WeightGroup

if find_spec("peft") is None:  # it is not imported here: every test process collects the file, and few run it
    pytest.skip("PEFT is the independent source: pip install peft", allow_module_level=True)

pytestmark = pytest.mark.slow
LORA = LoraConfig(rank=4, alpha=6.0)
OPTIMIZER = OptimizerConfig(lr=1e-2, weight_decay=0.1, eps=1e-5)
SEEDS = (0, 1, 2)
FEW = {"micro_batch_tokens": 40, "optimizer": OPTIMIZER}
"""Several micro-batches on each rank."""
LAYOUTS = {
    "one rank": (1, {}),
    "data 2": (2, {}),
    "tensor 2": (2, {"tensor": 2}),
    "tensor 2, sequence": (2, {"tensor": 2, "sequence": True}),
    "pipeline 2": (2, {"pipeline": 2}),
    "context 2": (2, {"context": 2}),
}


def wrapped(folder, **config):
    """Return PEFT's model with a random adapter: neither matrix is zero."""
    from peft import LoraConfig as PeftConfig
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    torch.manual_seed(1)
    lists = {key: list(value) for key, value in config.items() if isinstance(value, tuple)}
    settings = {"r": 4, "lora_alpha": 6.0, "target_modules": "all-linear", "init_lora_weights": False, **config}
    return get_peft_model(model, PeftConfig(**{**settings, **lists}))


def logprobs(model, batch):
    """Return the log-probability of each learned token [N], a sequence at a time. Elsewhere 0."""
    found = []
    for row in np.split(batch["tokens"], np.cumsum(batch["lengths"])[:-1]):
        tokens = torch.tensor(row)
        log_p = torch.log_softmax(model(input_ids=tokens[None], use_cache=False).logits[0, :-1], -1)
        found.append(torch.cat([torch.zeros(1), log_p.gather(1, tokens[1:, None])[:, 0]]))
    return torch.cat(found) * torch.tensor(batch["loss_mask"])


def steps_of_peft(model, batches):
    """Return loss and gradient norm [steps, 2] of steps of torch's AdamW on the adapter that PEFT has added."""
    trained = [one for one in model.parameters() if one.requires_grad]
    of, found = OPTIMIZER, []
    optimizer = torch.optim.AdamW(trained, of.lr, of.betas, of.eps, of.weight_decay)
    for batch in batches:
        optimizer.zero_grad()
        loss = -logprobs(model, batch).sum() / int(batch["loss_mask"].sum())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        found.append((loss.item(), norm.item()))
    return np.array(found)


@pytest.fixture(scope="module")
def reference(folders, make_batch, tmp_path_factory):
    """Return a function: name of a model -> folder of an adapter, the steps of PEFT from it, and the adapter then."""
    from peft import get_peft_model_state_dict

    known = {}

    def of(name, **config):
        key = (name, *sorted(config.items()))
        if key not in known:
            model, start = wrapped(folders(name), **config), tmp_path_factory.mktemp("start")
            model.save_pretrained(start)
            steps = steps_of_peft(model, [make_batch(seed) for seed in SEEDS])
            after = {n: t.detach().clone() for n, t in get_peft_model_state_dict(model).items()}
            known[key] = start, steps, after
        return known[key]

    return of


def follows_peft(build, steps, after, make_batch, folder, made):
    """Assert that three steps, and the adapter then, are those of PEFT. `made`: the arguments of the backend."""
    backend = build(*made[:3], **made[3], **FEW)
    found = steps_of(backend, [make_batch(seed) for seed in SEEDS])
    np.testing.assert_allclose(found, steps, rtol=1e-4)
    backend.save(folder).result()
    ours = load_file(folder / "adapter_model.safetensors")
    assert set(ours) == set(after)
    for one, tensor in after.items():
        torch.testing.assert_close(ours[one], tensor, atol=1e-4, rtol=0, msg=lambda m, n=one: f"{n}: {m}")


@pytest.mark.parametrize(
    ("layout", "name"), [*((layout, "qwen3") for layout in LAYOUTS), ("tensor 2", "llama"), ("context 2", "qwen2")]
)
def test_three_steps_and_the_adapter_then_are_those_of_peft(build, reference, make_batch, tmp_path, layout, name):
    start, steps, after = reference(name)
    options = {"lora": LoraConfig(rank=4, alpha=6.0, adapter=str(start))}
    follows_peft(build, steps, after, make_batch, tmp_path / "saved", (name, *LAYOUTS[layout], options))


@pytest.mark.parametrize("layout", ["one rank", "tensor 2", "pipeline 2"])
def test_a_model_that_is_not_trained_computes_with_its_adapter(build, reference, make_batch, layout):
    start, steps, _ = reference("qwen3")
    options = {"lora": LoraConfig(rank=4, alpha=6.0, adapter=str(start))}
    backend, batch = build("qwen3", *LAYOUTS[layout], **options, trained=False), make_batch(SEEDS[0])
    found = backend.score(batch, ("logprobs",))["logprobs"]
    assert -found.sum() / int(batch["loss_mask"].sum()) == pytest.approx(steps[0][0], rel=1e-4)


EXPERTS = {
    "one rank, grouped": ("mixtral", 1, {}, True),
    "data 2": ("qwen3_moe", 2, {}, False),
    "tensor 2": ("qwen3_moe", 2, {"tensor": 2, "sequence": True, "expert_tensor": 2}, False),
    "tensor 2, grouped": ("mixtral", 2, {"tensor": 2, "sequence": True, "expert_tensor": 2}, True),
    "expert 2": ("mixtral", 2, {"expert": 2}, False),
    "expert 2, grouped": ("qwen3_moe", 2, {"expert": 2}, True),
    "pipeline 2": ("mixtral", 2, {"pipeline": 2}, False),
    "context 2, grouped": ("qwen3_moe", 2, {"context": 2}, True),
    "tensor 2 x expert 2": ("qwen3_moe", 4, {"tensor": 2, "sequence": True, "expert": 2}, False),
    "tensor 2 x expert 2, grouped": ("mixtral", 4, {"tensor": 2, "sequence": True, "expert": 2}, True),
    "pipeline 2 x expert 2, grouped": ("qwen3_moe", 4, {"pipeline": 2, "expert": 2}, True),
}
"""Model, ranks, sizes of axes, and whether experts are grouped."""


@pytest.mark.parametrize("layout", EXPERTS)
def test_three_steps_and_the_adapter_of_experts_then_are_those_of_peft(build, reference, make_batch, tmp_path, layout):
    name, ranks, sizes, grouped = EXPERTS[layout]
    start, steps, after = reference(
        name, target_modules=("q_proj", "k_proj", "v_proj", "o_proj"),
        target_parameters=("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
    )  # fmt: skip
    lora = LoraConfig(rank=4, alpha=6.0, experts=True, adapter=str(start))
    options = {"lora": lora, "grouped_experts": grouped}
    follows_peft(build, steps, after, make_batch, tmp_path / "saved", (name, ranks, sizes, options))


SPLITS = [(1, {}), (2, {"tensor": 2, "sequence": True}), (2, {"pipeline": 2})]


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_what_leaves_a_backend_is_the_model_that_it_trained(build, folders, make_batch, sent, tmp_path, split):
    """The adapter in PEFT's hands, the merged export in those of `transformers`, and what generators get."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    folder, batch, lora = (
        folders("qwen3"),
        make_batch(0),
        evolve(LORA, targets=("q_proj", "v_proj", "up_proj", "o_proj")),
    )
    backend = build("qwen3", *split, lora=lora, **FEW)
    steps_of(backend, [make_batch(seed) for seed in SEEDS])
    ours = backend.score(batch, ("logprobs",))["logprobs"]
    backend.save(tmp_path / "saved").result()
    backend.export(tmp_path / "merged")

    def load(path):
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")

    plain = logprobs(load(folder), batch).detach().numpy()
    for model in (PeftModel.from_pretrained(load(folder), tmp_path / "saved"), load(tmp_path / "merged")):
        np.testing.assert_allclose(logprobs(model, batch).detach(), ours, atol=1e-4)
    assert np.abs(plain - ours).max() > 0.05

    merged, base, alone = (
        sent(backend, ParallelConfig(**split[1]).senders),
        load_file(folder / "model.safetensors"),
        sent(backend, lora=lora),
    )
    assert set(merged) == set(base)
    changed = {name for name, tensor in base.items() if not torch.equal(merged[name], tensor)}
    assert changed == {name for name in base if name.split(".")[-2] in lora.targets}
    files = sorted((tmp_path / "merged").glob("*.safetensors"))
    exported = {name: tensor for file in files for name, tensor in load_file(file).items()}
    saved = load_file(tmp_path / "saved/adapter_model.safetensors")
    for found, expected in ((merged, exported), (alone, saved)):
        assert set(found) == set(expected)
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_without_its_adapter_the_model_is_the_base_bit_for_bit(build, folders, make_batch, sent, tmp_path, split):
    frozen, backend, batch = (
        build("qwen3", *split, **FEW),
        build("qwen3", *split, lora=LORA, reference=True, **FEW),
        make_batch(0),
    )
    expected = frozen.score(batch, ("logprobs",))["logprobs"]
    assert np.array_equal(backend.score(batch, ("logprobs",))["logprobs"], expected)  # a new adapter changes nothing
    steps_of(backend, [make_batch(0), make_batch(1)])
    for weights in ("reference", "base"):
        assert np.array_equal(backend.score(batch, ("logprobs",), weights)["logprobs"], expected)
    after = backend.score(batch, ("logprobs",))["logprobs"]
    assert np.abs(after - expected).max() > 0.01
    trial = backend.score(batch, ("logprobs",), "trial")["logprobs"]
    assert np.abs(trial - expected)[batch["loss_mask"]].mean() > 0.05
    assert np.array_equal(backend.score(batch, ("logprobs",))["logprobs"], after)
    base, tried = (
        load_file(folders("qwen3") / "model.safetensors"),
        sent(backend, ParallelConfig(**split[1]).senders, weights="trial"),
    )
    for name, tensor in base.items():
        assert torch.equal(tried[name], tensor) == ("proj" not in name), name
    backend.save(tmp_path / "saved").result()
    again = build("qwen3", *split, lora=evolve(LORA, adapter=str(tmp_path / "saved")), **FEW)
    steps_of(again, [batch])
    assert np.array_equal(again.score(batch, ("logprobs",), "reference")["logprobs"], after)
    assert np.array_equal(again.score(batch, ("logprobs",), "base")["logprobs"], expected)


@pytest.mark.parametrize(
    ("saving", "loading", "distributed"),
    [
        ((2, {"tensor": 2, "sequence": True}), (2, {"pipeline": 2}), True),
        ((2, {"pipeline": 2}), (1, {}), True),
        ((1, {}), (2, {}), False),
    ],
    ids=str,
)
def test_a_run_goes_on_bitwise_in_its_layout_and_to_rounding_in_another(
    build, make_batch, tmp_path, saving, loading, distributed
):
    config = {"lora": LORA, **FEW, "optimizer": evolve(OPTIMIZER, distributed=distributed)}
    first, later = build("qwen3", *saving, **config), [make_batch(seed) for seed in (2, 3, 4)]
    steps_of(first, [make_batch(0), make_batch(1)])
    first.save(tmp_path / "saved").result()
    expected = steps_of(first, later)
    first.close()
    held = FileSystemReader(str(tmp_path / "saved" / "megatron")).read_metadata().state_dict_metadata
    assert all("lora" in name for name in held if name.startswith("optimizer.state."))
    assert not any(name.startswith("model.") for name in held)  # the base is not saved
    for where in (saving, loading):
        other = build("qwen3", *where, **config)
        other.load(tmp_path / "saved")
        found = steps_of(other, later)
        other.close()
        if where == saving:
            assert np.array_equal(found, expected)
        np.testing.assert_allclose(found, expected, rtol=1e-5)


CASES = {
    "virtual stages": ("llama", (2, {"pipeline": 2, "virtual": 2}), {}),
    "recomputed": ("llama", (2, {"tensor": 2, "sequence": True}), {"gradient_checkpointing": True}),
    "recomputed, stages": ("llama", (2, {"pipeline": 2}), {"gradient_checkpointing": True}),
    "a stage without adapters": (
        "llama",
        (2, {"pipeline": 2}),
        {"lora": evolve(LORA, targets=(r".*layers\.[01]\..*",))},
    ),
    "a first stage without adapters": (
        "llama",
        (2, {"pipeline": 2}),
        {"lora": evolve(LORA, targets=(r".*layers\.[23]\..*_proj",))},
    ),
    "padded": ("qwen2", (2, {"context": 2}), {"layout": "padded"}),
    "no distributed optimizer": ("llama", (2, {}), {"optimizer": evolve(OPTIMIZER, distributed=False)}),
    "overlap": ("llama", (2, {}), {"optimizer": evolve(OPTIMIZER, overlap=True)}),
    "experts, recomputed": (
        "qwen3_moe",
        (2, {"tensor": 2, "sequence": True, "expert_tensor": 2}),
        {"lora": evolve(LORA, experts=True), "gradient_checkpointing": True},
    ),
    "experts, no distributed optimizer": (
        "mixtral",
        (2, {"tensor": 2, "sequence": True, "expert_tensor": 2}),
        {
            "lora": evolve(LORA, experts=True),
            "optimizer": evolve(OPTIMIZER, distributed=False),
            "grouped_experts": True,
        },
    ),
    "experts, virtual stages": (
        "qwen3_moe",
        (2, {"pipeline": 2, "virtual": 2}),
        {"lora": evolve(LORA, experts=True)},
    ),
    "experts, overlap": (
        "qwen3_moe",
        (2, {"expert": 2}),
        {"lora": evolve(LORA, experts=True), "optimizer": evolve(OPTIMIZER, overlap=True)},
    ),
    "attention of a mixture": ("qwen3_moe", (2, {"tensor": 2, "sequence": True, "expert": 2}), {}),
}


@pytest.mark.parametrize("case", CASES)
def test_an_adapter_is_trained_as_on_one_rank(build, folders, make_batch, case):
    name, split, options = CASES[case]
    options = {"lora": evolve(LORA, rslora=True), **options}
    folder, batches = folders(name, layers=4), [make_batch(seed) for seed in SEEDS]
    one, several = build(folder, lora=options["lora"], optimizer=OPTIMIZER), build(folder, *split, **{**FEW, **options})
    np.testing.assert_allclose(steps_of(several, batches), steps_of(one, batches), rtol=1e-4)


@pytest.mark.parametrize(
    ("split", "dtype"), [((2, {"tensor": 2}), "float32"), ((2, {"pipeline": 2}), "bfloat16")], ids=str
)
def test_a_value_head_is_trained_whole_in_float32_beside_the_adapter(build, make_batch, tmp_path, split, dtype):
    from transformers import AutoModelForSequenceClassification

    options = {"head": "value", "lora": LORA, "dtype": dtype}
    one, several = build("qwen3", **options, optimizer=OPTIMIZER), build("qwen3", *split, **options, **FEW)
    spec, batches = Spec("whet_testing.losses:Regression"), [make_batch(seed) for seed in SEEDS]
    tolerance = 1e-4 if dtype == "float32" else 3e-2
    np.testing.assert_allclose(steps_of(several, batches, spec), steps_of(one, batches, spec), rtol=tolerance)
    values = several.score(batches[0], ("values",))["values"]
    several.save(tmp_path / "saved").result()
    several.export(tmp_path / "merged")
    again = build("qwen3", *split, **options, **FEW)
    again.load(tmp_path / "saved")
    assert np.array_equal(again.score(batches[0], ("values",))["values"], values)
    start = evolve(LORA, adapter=str(tmp_path / "saved"))
    judge = build("qwen3", *split, **{**options, "lora": start}, trained=False)
    np.testing.assert_allclose(judge.score(batches[0], ("values",))["values"], values, atol=tolerance)
    head = load_file(tmp_path / "saved" / "adapter_model.safetensors")["base_model.model.score.weight"]
    exported = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged", dtype=getattr(torch, dtype))
    assert head.dtype == torch.float32
    assert torch.equal(exported.score.weight, head.to(exported.dtype))


def test_in_bfloat16_the_base_is_held_once_and_the_adapter_in_float32(build, make_batch):
    low, exact = build("llama", dtype="bfloat16", lora=LORA, **FEW), build("llama", lora=LORA, **FEW)
    batches = [make_batch(seed) for seed in SEEDS]
    np.testing.assert_allclose(steps_of(low, batches), steps_of(exact, batches), rtol=3e-2)
    (worker,) = low._workers._workers
    whole = sum(one.numel() for one in worker._model.weights.stages[0].parameters())
    held = [one for one in worker._held() if one.dtype == torch.float32]
    trained = sum(one.numel() for _, one in worker._model.trained())
    assert sum(one.numel() for one in {one.data_ptr(): one for one in held}.values()) == 3 * trained
    frozen = [one for one in worker._model.weights.stages[0].parameters() if not one.requires_grad]
    assert {one.dtype for one in frozen} == {torch.bfloat16}
    assert trained < whole / 5


def test_optimizer_groups_see_the_matrices_of_the_adapter(build, make_batch, tmp_path):
    groups = (WeightGroup("lora_B", lr_factor=4.0), WeightGroup(r"layers\.0\.", lr_factor=0.0))
    backend = build("llama", 2, {"pipeline": 2}, lora=LORA, optimizer=evolve(OPTIMIZER, groups=groups))
    backend.save(tmp_path / "before").result()
    steps_of(backend, [make_batch(0), make_batch(1)])
    backend.save(tmp_path / "after").result()
    before, after = (load_file(tmp_path / one / "adapter_model.safetensors") for one in ("before", "after"))
    still = {name for name in before if torch.equal(before[name], after[name])}
    assert still == {name for name in before if "layers.0." in name and "lora_B" not in name}
    with pytest.raises(WhetError, match="matches no weight"):
        build("llama", lora=LORA, optimizer=evolve(OPTIMIZER, groups=(WeightGroup("norm"),)))


def test_a_checkpoint_of_other_weights_targets_or_kind_is_refused_and_changes_nothing(
    build, folders, make_batch, tmp_path
):
    backend, batch = build("qwen3", lora=LORA), make_batch(0)
    other = shutil.copytree(folders("qwen3"), tmp_path / "other")
    backend.save(tmp_path / "saved").result()
    weights = load_file(other / "model.safetensors")
    weights["model.norm.weight"] += 0.5
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    build("qwen3").save(tmp_path / "whole").result()
    for folder, lora, saved, words in (
        (other, LORA, "saved", "adapter of other weights"),
        ("qwen3", evolve(LORA, targets=("q_proj",)), "saved", "adapter is .*'layers': 14"),
        ("qwen3", evolve(LORA, targets=("q_proj", "k_proj")), "half", "lacks .*k_proj"),
        ("qwen3", evolve(LORA, rank=8), "saved", "adapter is .*'rank': 4"),
        ("qwen3", None, "saved", "the model has None"),
        ("qwen3", LORA, "whole", "adapter is None"),
    ):
        if saved == "half":
            build("qwen3", lora=evolve(LORA, targets=("q_proj", "v_proj"))).save(tmp_path / "half").result()
        made = build(folder, lora=lora)
        before = made.score(batch, ("logprobs",))["logprobs"]
        with pytest.raises(WhetError, match=words):
            made.load(tmp_path / saved)
        assert np.array_equal(made.score(batch, ("logprobs",))["logprobs"], before)


def test_an_adapter_to_start_from_must_have_the_same_rank_scaling_and_targets(build, folders, tmp_path):
    wrapped(folders("qwen3")).save_pretrained(tmp_path)
    for change, words in (
        ({"rank": 8}, "backend.lora.rank: is 8, and the adapter .* has 4"),
        ({"alpha": 4.0}, "backend.lora.alpha: is 4"),
        ({"rslora": True}, "backend.lora.rslora: is True"),
        ({"targets": ("q_proj",)}, "does not train"),
    ):
        with pytest.raises(WhetError, match=words):
            build("qwen3", lora=evolve(LORA, adapter=str(tmp_path), **change))
    with pytest.raises(WhetError, match="'query' matches no linear layer but the head of Qwen3ForCausalLM"):
        build("qwen3", lora=evolve(LORA, targets=("query",)))


def test_an_adapter_is_not_sent_by_who_trains_none(build, tmp_path):
    spec = TransferSpec("disk", str(tmp_path), "1", 1, adapter=adapter_info(LORA))
    with pytest.raises(WhetError, match=r"set backend\.lora"):
        build("qwen3").send_weights(spec).result()
