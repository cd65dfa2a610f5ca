"""LoRA under every kind of parallelism, against PEFT on the same weights in one process."""

import numpy as np
import pytest
import torch
from attrs import evolve
from safetensors.torch import load_file

from whet.component import Spec
from whet.errors import CheckpointError, ConfigError, WhetError
from whet.interfaces.weights import TransferSpec
from whet_megatron.config import OptimizerConfig
from whet_testing.three_steps import steps_of
from whet_training.lora_config import LoraConfig, adapter_info
from whet_weights.transfer import receive

peft = pytest.importorskip("peft", reason="PEFT is the independent source: pip install peft")

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
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    torch.manual_seed(1)
    settings = {"r": 4, "lora_alpha": 6.0, "target_modules": "all-linear", "init_lora_weights": False, **config}
    return peft.get_peft_model(model, peft.LoraConfig(**settings))


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
    known = {}

    def of(name, **config):
        key = (name, *sorted(config.items()))
        if key not in known:
            model, start = wrapped(folders(name), **config), tmp_path_factory.mktemp("start")
            model.save_pretrained(start)
            steps = steps_of_peft(model, [make_batch(seed) for seed in SEEDS])
            after = {n: t.detach().clone() for n, t in peft.get_peft_model_state_dict(model).items()}
            known[key] = start, steps, after
        return known[key]

    return of


@pytest.mark.parametrize("name", ["llama", "qwen3"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_three_steps_and_the_adapter_then_are_those_of_peft(build, reference, make_batch, tmp_path, layout, name):
    start, steps, after = reference(name)
    ranks, sizes = LAYOUTS[layout]
    backend = build(name, ranks, sizes, lora=LoraConfig(rank=4, alpha=6.0, adapter=str(start)), **FEW)
    found = steps_of(backend, [make_batch(seed) for seed in SEEDS])
    np.testing.assert_allclose(found, steps, rtol=1e-4)
    backend.save(tmp_path / "saved").result()
    ours = load_file(tmp_path / "saved" / "adapter_model.safetensors")
    assert set(ours) == set(after)
    for one, tensor in after.items():
        torch.testing.assert_close(ours[one], tensor, atol=1e-4, rtol=0, msg=lambda m, n=one: f"{n}: {m}")


SPLITS = [(1, {}), (2, {"tensor": 2, "sequence": True}), (2, {"pipeline": 2})]


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_what_leaves_a_backend_is_the_model_that_it_trained(build, folders, make_batch, tmp_path, split):
    """The adapter in PEFT's hands, the merged export in those of `transformers`, and what generators get."""
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
    for model in (peft.PeftModel.from_pretrained(load(folder), tmp_path / "saved"), load(tmp_path / "merged")):
        np.testing.assert_allclose(logprobs(model, batch).detach(), ours, atol=1e-4)
    assert np.abs(plain - ours).max() > 0.05

    merged, base, alone = (
        sent(backend, tmp_path),
        load_file(folder / "model.safetensors"),
        sent(backend, tmp_path, lora),
    )
    assert set(merged) == set(base)
    changed = {name for name, tensor in base.items() if not torch.equal(merged[name], tensor)}
    assert changed == {name for name in base if name.split(".")[-2] in lora.targets}
    exported, saved = (
        load_file(tmp_path / one) for one in ("merged/model.safetensors", "saved/adapter_model.safetensors")
    )
    for found, expected in ((merged, exported), (alone, saved)):
        assert set(found) == set(expected)
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def sent(backend, tmp_path, lora=None, weights="policy"):
    """Return what a generator would get: all weights, or an adapter alone."""
    way = tmp_path / f"way-{len(list(tmp_path.iterdir()))}"
    spec = TransferSpec("disk", str(way), "1", 1, adapter=None if lora is None else adapter_info(lora), weights=weights)
    pending = backend.send_weights(spec)
    found = {name: tensor.clone() for name, tensor in receive(spec)}
    pending.result()
    return found


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_without_its_adapter_the_model_is_the_base_bit_for_bit(build, folders, make_batch, tmp_path, split):
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
    base, tried = load_file(folders("qwen3") / "model.safetensors"), sent(backend, tmp_path, weights="trial")
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
    build, folders, make_batch, tmp_path, saving, loading, distributed
):
    config = {"lora": LORA, **FEW, "optimizer": evolve(OPTIMIZER, distributed=distributed)}
    first, later = build("qwen3", *saving, **config), [make_batch(seed) for seed in (2, 3, 4)]
    steps_of(first, [make_batch(0), make_batch(1)])
    first.save(tmp_path / "saved").result()
    expected = steps_of(first, later)
    first.close()
    size = sum(path.stat().st_size for path in (tmp_path / "saved").rglob("*") if path.is_file())
    assert size < (folders("qwen3") / "model.safetensors").stat().st_size  # the model is not in it
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
    "attention of a mixture": ("qwen3_moe", (2, {"tensor": 2, "sequence": True, "expert": 2}), {}),
}


@pytest.mark.parametrize("case", CASES)
def test_an_adapter_is_trained_as_on_one_rank(build, folders, make_batch, case):
    name, split, options = CASES[case]
    options = {"lora": evolve(LORA, rslora=True), **options}
    folder, batches = folders(name, layers=4), [make_batch(seed) for seed in SEEDS]
    one, several = build(folder, lora=options["lora"], optimizer=OPTIMIZER), build(folder, *split, **{**FEW, **options})
    np.testing.assert_allclose(steps_of(several, batches), steps_of(one, batches), rtol=1e-4)
