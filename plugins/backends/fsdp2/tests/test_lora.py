"""LoRA on one rank, against PEFT on the same weights. Two ranks against one: test_ranks.py."""

import json
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from whet.component import AdapterInfo, Spec
from whet.errors import CheckpointError, ConfigError, WhetError
from whet_fsdp2.lora import Adapters
from whet_training.adapter_files import base_digest
from whet_training.lora_config import LoraConfig
from whet_weights.adapter import PREFIX

if find_spec("peft") is None:  # it is not imported here: every test process collects the file, and few run it
    pytest.skip("PEFT is the independent source: pip install peft", allow_module_level=True)

WEIGHTED = Spec("whet_testing.losses:Weighted")
LIKELIHOOD = Spec("whet_testing.losses:Likelihood")
VALUES = Spec("whet_testing.losses:Regression")
LORA = {"rank": 4, "alpha": 6.0}


def wrapped(folder, **config):
    """Return PEFT's model with a random adapter: neither matrix is zero."""
    from peft import LoraConfig as PeftConfig
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    torch.manual_seed(1)
    settings = {"r": 4, "lora_alpha": 6.0, "target_modules": "all-linear", "init_lora_weights": False, **config}
    return get_peft_model(model, PeftConfig(**settings))


def logprobs(model, batch):
    rows = np.split(batch["tokens"], np.cumsum(batch["lengths"])[:-1])
    found = []
    for row in rows:
        log_p = torch.log_softmax(model(input_ids=torch.tensor(row)[None]).logits[0, :-1], -1)
        found.append(torch.cat([torch.zeros(1), log_p.gather(1, torch.tensor(row)[1:, None])[:, 0]]))
    return torch.cat(found) * torch.tensor(batch["loss_mask"])


def weighted(model, batch):
    weight = torch.tensor(np.repeat(batch["advantages"], batch["lengths"]))
    return -(logprobs(model, batch) * weight).sum() / int(batch["loss_mask"].sum())


def adapter_of(model):
    from peft import get_peft_model_state_dict

    return {n: t.detach().clone() for n, t in get_peft_model_state_dict(model).items()}


def adapter_after(worker, folder):
    worker.save(str(folder))
    return load_file(folder / "adapter_model.safetensors")


def close(found, expected, tolerance=1e-4):
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, atol=tolerance, rtol=0, msg=lambda m, n=name: f"{n}: {m}")


CASES = {
    "dense": ({}, {}),
    "rslora on two names": ({"rslora": True, "targets": ["q_proj", "down_proj"]},
                            {"use_rslora": True, "target_modules": ["q_proj", "down_proj"]}),
    "a regular expression": ({"targets": [r".*layers\.1\.self_attn\..*"]},
                             {"target_modules": r".*layers\.1\.self_attn\..*_proj"}),
    "experts": ({"experts": True, "targets": ["q_proj", "v_proj"]},
                {"target_modules": ["q_proj", "v_proj"],
                 "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}),
}  # fmt: skip


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_loss_gradients_and_three_steps_are_those_of_peft(
    make_worker, folders, moe, batch, gradients, tmp_path, case, checkpointing
):
    ours, theirs = CASES[case]
    folder = moe if case == "experts" else folders()
    reference = wrapped(folder, **theirs)
    reference.save_pretrained(tmp_path / "start")
    worker = make_worker(
        folder=folder, gradient_checkpointing=checkpointing, micro_batch_tokens=60,
        lora={**LORA, **ours, "adapter": str(tmp_path / "start")},
        optimizer={"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-5},
    )  # fmt: skip
    loss = weighted(reference, batch)
    loss.backward()
    assert worker.evaluate(batch, WEIGHTED)["loss"].number() == pytest.approx(loss.item(), abs=1e-5)
    found = gradients(worker, batch)
    parameters = {n.replace(".default", ""): p for n, p in reference.named_parameters() if p.requires_grad}
    assert sum(g.numel() for g in found.values()) == sum(p.numel() for p in parameters.values())
    norm = torch.stack([p.grad.norm() for p in parameters.values()]).norm().item()
    assert torch.stack([g.norm() for g in found.values()]).norm().item() == pytest.approx(norm, rel=1e-5)
    flat = {PREFIX + n: g for n, g in found.items() if g.ndim == 2}
    for name, gradient in flat.items():
        torch.testing.assert_close(gradient, parameters[name].grad, atol=1e-5, rtol=1e-4)

    decayed = [p for p in parameters.values() if p.ndim > 1]
    optimizer = torch.optim.AdamW(decayed, lr=1e-2, weight_decay=0.1, eps=1e-5)
    for _ in range(3):
        optimizer.zero_grad()
        expected = weighted(reference, batch)
        expected.backward()
        norm = torch.nn.utils.clip_grad_norm_(decayed, 1.0)
        optimizer.step()
        metrics = worker.train(batch, WEIGHTED)
        assert metrics["loss"].number() == pytest.approx(expected.item(), abs=1e-4)
        assert metrics["grad_norm"].number() == pytest.approx(norm.item(), rel=1e-3)
    close(adapter_after(worker, tmp_path / "saved"), adapter_of(reference))
    scored = worker.score(batch, ("logprobs",))["logprobs"]
    np.testing.assert_allclose(scored, logprobs(reference, batch).detach(), atol=5e-4)


def test_peft_loads_a_checkpoint_and_the_merged_export_has_the_same_logits(make_worker, moe, folders, batch, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    for folder, lora in ((folders(), LORA), (moe, {**LORA, "experts": True})):
        worker = make_worker(folder=folder, lora=lora)
        for _ in range(3):
            worker.train(batch, WEIGHTED)
        ours = worker.score(batch, ("logprobs",))["logprobs"]
        saved, exported = tmp_path / f"saved-{folder.name}", tmp_path / f"exported-{folder.name}"
        worker.save(str(saved))
        worker.export(str(exported))
        base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        plain = logprobs(base, batch).detach()
        loaded = PeftModel.from_pretrained(base, saved)
        merged = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32, attn_implementation="eager")
        for model in (loaded, merged):
            np.testing.assert_allclose(logprobs(model, batch).detach(), ours, atol=1e-4)
        assert np.abs(plain - ours).max() > 0.05


def test_the_base_is_untouched_bit_for_bit(make_worker, folders, batch, tmp_path):
    worker = make_worker(lora={**LORA, "targets": ["q_proj"]})
    for _ in range(2):
        worker.train(batch, WEIGHTED)
    base = load_file(folders() / "model.safetensors")
    sent = dict(worker._weights.computing())
    changed = {name for name, tensor in base.items() if not torch.equal(sent[name], tensor)}
    assert changed == {name for name in base if name.endswith("q_proj.weight")}
    with worker._adapters.using("base"):
        assert all(torch.equal(tensor, base[name]) for name, tensor in worker._weights.computing())


def test_a_new_adapter_changes_nothing_and_is_the_same_on_every_start(make_worker, batch):
    plain, first, second = make_worker(), make_worker(lora=LORA), make_worker(lora=LORA)
    expected = plain.score(batch, ("logprobs",))["logprobs"]
    assert np.array_equal(first.score(batch, ("logprobs",))["logprobs"], expected)
    for name, parameter in first._weights.trained.items():
        assert torch.equal(parameter, second._weights.trained[name])
        if name.endswith("lora_A.weight"):  # uniform over +-1/sqrt(in), as PEFT draws it
            bound = parameter.shape[1] ** -0.5
            assert 0.9 * bound < parameter.abs().max() <= bound
            assert parameter.std().item() == pytest.approx(bound / 3**0.5, rel=0.15)


def test_the_reference_is_the_adapter_switched_off(make_worker, batch, folders):
    frozen, worker = make_worker(), make_worker(lora=LORA, reference=True)
    expected = frozen.score(batch, ("logprobs",))["logprobs"]
    for _ in range(2):
        worker.train(batch, WEIGHTED)
    assert not worker._frozen
    for weights in ("reference", "base"):
        np.testing.assert_array_equal(worker.score(batch, ("logprobs",), weights)["logprobs"], expected)
    assert np.abs(worker.score(batch, ("logprobs",))["logprobs"] - expected).max() > 0.01


def test_the_reference_of_a_run_from_an_adapter_is_that_adapter(make_worker, batch, tmp_path):
    first = make_worker(lora=LORA)
    first.train(batch, WEIGHTED)
    first.save(str(tmp_path / "saved"))
    expected = first.score(batch, ("logprobs",))["logprobs"]
    worker = make_worker(lora={**LORA, "adapter": str(tmp_path / "saved")})
    worker.train(batch, WEIGHTED)
    np.testing.assert_array_equal(worker.score(batch, ("logprobs",), "reference")["logprobs"], expected)
    assert not np.array_equal(worker.score(batch, ("logprobs",), "base")["logprobs"], expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_that_is_not_trained_computes_with_its_adapter(make_worker, batch, folders, tmp_path, dtype):
    reference = wrapped(folders())
    reference.save_pretrained(tmp_path)
    worker = make_worker(role="teacher", trained=False, dtype=dtype, lora={**LORA, "adapter": str(tmp_path)})
    found, expected = worker.score(batch, ("logprobs",))["logprobs"], logprobs(reference, batch).detach().numpy()
    plain = make_worker(dtype=dtype).score(batch, ("logprobs",))["logprobs"]
    assert np.abs(found - expected).max() < (1e-4 if dtype == "float32" else 0.1 * np.abs(plain - expected).max())
    assert not list(worker._stepper.held())
    with pytest.raises(WhetError, match="frozen"):
        worker.train(batch, WEIGHTED)


def test_a_trial_changes_every_layer_and_not_what_is_trained(make_worker, batch):
    worker = make_worker(lora=LORA)
    before = {name: tensor.clone() for name, tensor in worker._weights.trained.items()}
    base, trial = (worker.score(batch, ("logprobs",), weights)["logprobs"] for weights in ("base", "trial"))
    mask = batch["loss_mask"]
    assert np.abs(trial - base)[mask].mean() > 0.05
    assert np.array_equal(worker.score(batch, ("logprobs",), "trial")["logprobs"], trial)
    assert all(torch.equal(tensor, before[name]) for name, tensor in worker._weights.trained.items())
    weights = dict(worker._weights.computing())
    with worker._adapters.using("trial"):
        for name, tensor in worker._weights.computing():
            assert torch.equal(tensor, weights[name]) == (f"{name}" not in worker._adapters.pairs)


@pytest.mark.parametrize("layout", ["shared", "packed", "padded"])
def test_gradients_do_not_depend_on_micro_batches_or_layout(make_worker, batch, gradients, layout, tmp_path):
    lora = {**LORA, "adapter": str(tmp_path)}
    make_worker(lora=LORA).save(str(tmp_path))
    expected = gradients(make_worker(lora=lora), batch)
    found = gradients(make_worker(lora=lora, layout=layout, micro_batch_tokens=30), batch)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, atol=1e-6, rtol=1e-4)


def test_in_bfloat16_the_base_is_held_once_and_the_adapter_in_float32(make_worker, batch):
    worker = make_worker(dtype="bfloat16", lora=LORA, layout="padded")
    dtypes = {parameter.dtype for parameter in worker._root.model.parameters()}
    assert dtypes == {torch.bfloat16}
    assert {tensor.dtype for tensor in worker._weights.trained.values()} == {torch.float32}
    exact = make_worker(lora=LORA)
    for _ in range(3):
        low, high = (one.train(batch, WEIGHTED)["loss"].number() for one in (worker, exact))
        assert low == pytest.approx(high, abs=0.05)
    held = sum(tensor.numel() for tensor in worker._held() if tensor.dtype == torch.float32)
    assert held == 3 * sum(tensor.numel() for tensor in worker._weights.trained.values())


def test_a_run_goes_on_from_a_checkpoint_bit_for_bit(make_worker, batch, tmp_path):
    worker = make_worker(lora=LORA)
    worker.train(batch, WEIGHTED)
    worker.save(str(tmp_path))
    index = json.loads((tmp_path / "backend.json").read_text())
    assert {name.partition("/")[0] for name in index["tensors"]} == {"exp_avg", "exp_avg_sq"}
    base = sum(file.stat().st_size for file in Path(worker._info.path).glob("*.safetensors"))
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < base
    again = make_worker(lora=LORA)
    again.load(str(tmp_path))
    for _ in range(2):
        expected, found = (one.train(batch, WEIGHTED) for one in (worker, again))
        assert found["loss"].number() == expected["loss"].number()
    for name, tensor in worker._weights.trained.items():
        assert torch.equal(again._weights.trained[name], tensor)


def test_a_checkpoint_of_other_weights_targets_or_kind_is_refused(make_worker, batch, folders, tmp_path):
    from shutil import copytree

    worker = make_worker(lora=LORA)
    worker.train(batch, WEIGHTED)
    worker.save(str(tmp_path / "saved"))
    other = copytree(folders(), tmp_path / "other")
    weights = load_file(other / "model.safetensors")
    weights["model.norm.weight"] += 0.5
    from safetensors.torch import save_file

    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    assert base_digest(other) != base_digest(folders())
    before = {name: tensor.clone() for name, tensor in worker._weights.trained.items()}
    for made, words in (
        (make_worker(lora=LORA, folder=other), "adapter of other weights"),
        (make_worker(lora={**LORA, "targets": ["q_proj"]}), "optimizer state of .*down_proj.lora_A"),
        (make_worker(lora={**LORA, "rank": 8}), r"backend\.lora\.rank: is 8, and the adapter .* has 4"),
        (make_worker(), "is missing"),
    ):
        with pytest.raises(CheckpointError, match=words):
            made.load(str(tmp_path / "saved"))
    make_worker().save(str(tmp_path / "whole"))
    with pytest.raises(CheckpointError, match="is not in the model"):
        worker.load(str(tmp_path / "whole"))
    assert all(torch.equal(tensor, before[name]) for name, tensor in worker._weights.trained.items())


def test_an_adapter_to_start_from_must_have_the_same_rank_scaling_and_targets(make_worker, folders, tmp_path):
    wrapped(folders()).save_pretrained(tmp_path)
    for change, words in (
        ({"rank": 8}, "backend.lora.rank: is 8, and the adapter .* has 4"),
        ({"alpha": 4.0}, "backend.lora.alpha: is 4"),
        ({"rslora": True}, "backend.lora.rslora: is True"),
        ({"targets": ["q_proj"]}, "does not train"),
    ):
        with pytest.raises(WhetError, match=words):
            make_worker(lora={**LORA, "adapter": str(tmp_path), **change})
    wrapped(folders(), use_dora=True).save_pretrained(tmp_path / "dora")
    with pytest.raises(WhetError, match="no plain LoRA adapter: use_dora"):
        make_worker(lora={**LORA, "adapter": str(tmp_path / "dora")})
    with pytest.raises(WhetError, match="no LoRA adapter in PEFT's format"):
        make_worker(lora={**LORA, "adapter": str(tmp_path / "nothing")})


def test_a_checkpoint_of_an_adapter_with_another_scaling_is_refused(make_worker, tmp_path):
    make_worker(lora=LORA).save(str(tmp_path / "saved"))
    for change, words in (
        ({"alpha": 60.0}, r"cannot be loaded: backend\.lora\.alpha: is 60\.0, and the adapter .* has 6\.0"),
        ({"rslora": True}, r"backend\.lora\.rslora: is True"),
    ):
        with pytest.raises(CheckpointError, match=words):
            make_worker(lora={**LORA, **change}).load(str(tmp_path / "saved"))
    make_worker(lora=LORA).load(str(tmp_path / "saved"))


def test_targets_that_match_nothing_are_refused_with_what_there_is(make_worker):
    for targets in (["query"], ["q_proj", "lm_head"]):
        with pytest.raises(ConfigError, match=r"matches no linear layer but the head .*down_proj, .*q_proj"):
            make_worker("llama", lora={**LORA, "targets": targets})
    with pytest.raises(ConfigError, match="has no stacked weights of experts"):
        make_worker(lora={**LORA, "experts": True})


def made(folder, family, **config):
    """Write a random model of any family of `transformers`."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **config)).save_pretrained(folder)
    return folder


def test_a_model_without_linear_layers_is_refused(make_worker, tmp_path):
    folder = made(tmp_path / "gpt2", "gpt2", vocab_size=256, n_embd=32, n_layer=2, n_head=2, n_positions=64)
    with pytest.raises(ConfigError, match=r"GPT2LMHeadModel have no nn.Linear to adapt, only Conv1D; leave .*lora out"):
        make_worker(folder=folder, lora=LORA)


@pytest.mark.parametrize("init", ["pissa_niter_4", "olora"])
def test_an_adapter_of_a_changed_base_is_refused_until_peft_has_converted_it(
    make_worker, folders, batch, tmp_path, init
):
    model = wrapped(folders(), init_lora_weights=init, target_modules=["q_proj", "v_proj"])
    start, trained, converted = (tmp_path / name for name in ("start", "trained", "converted"))
    with torch.no_grad():
        model.save_pretrained(trained)
        model.peft_config["default"].init_lora_weights = True  # as PEFT's documentation has it
        model.save_pretrained(start)
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
        model.save_pretrained(converted, path_initial_model_for_weight_conversion=str(start))
        expected = logprobs(model, batch)
    lora = {**LORA, "targets": ["q_proj", "v_proj"]}
    with pytest.raises(WhetError, match=f"init_lora_weights '{init}', which changes the base weights.*conversion="):
        make_worker(lora={**lora, "adapter": str(trained)})
    doubled = make_worker(lora={**lora, "rank": 8, "alpha": 12.0, "adapter": str(converted)})
    np.testing.assert_allclose(doubled.score(batch, ("logprobs",))["logprobs"], expected, atol=5e-4)
    model.save_pretrained(tmp_path / "own")
    model.unload().save_pretrained(tmp_path / "base")
    changed = make_worker(folder=tmp_path / "base", lora={**lora, "adapter": str(tmp_path / "own")})
    np.testing.assert_allclose(changed.score(batch, ("logprobs",))["logprobs"], expected, atol=5e-4)


def test_layers_whose_weights_are_read_without_a_call_get_no_adapter(make_worker, batch, tmp_path, caplog):
    folder = made(
        tmp_path / "jamba", "jamba", vocab_size=256, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, attn_layer_period=2, attn_layer_offset=1, num_experts=1,
        use_mamba_kernels=False, mamba_dt_rank=4, initializer_range=0.2,
    )  # fmt: skip
    worker = make_worker(folder=folder, lora=LORA)
    assert "no adapter for model.layers.0.mamba.dt_proj: the model reads their weights" in caplog.text
    worker.train(batch, WEIGHTED)
    ends = {name.removesuffix(".lora_B.weight") for name in worker._weights.trained if name.endswith("lora_B.weight")}
    assert {name for name in ends if "mamba" in name} == {f"model.layers.0.mamba.{n}_proj" for n in ("in", "x", "out")}
    for name, (_, b) in worker._adapters.pairs.items():
        assert b.any(), f"{name} was not trained"
    worker.export(str(tmp_path / "merged"))
    found = worker.score(batch, ("logprobs",))["logprobs"]
    merged = make_worker(folder=tmp_path / "merged").score(batch, ("logprobs",))["logprobs"]
    np.testing.assert_allclose(found, merged, atol=1e-4)
    with pytest.raises(ConfigError, match=r"backend.lora.targets.1: 'dt_proj' matches only layers .*leave it out"):
        make_worker(folder=folder, lora={**LORA, "targets": ["q_proj", "dt_proj"]})


def test_an_adapter_whose_layer_is_never_called_is_not_dropped_in_silence(make_worker, folders):
    worker = make_worker(lora=LORA)
    name = "model.layers.0.self_attn.q_proj"
    worker._adapters._config = LoraConfig(rank=4, alpha=6.0, adapter="somewhere")
    with torch.no_grad():
        worker._adapters.pairs[f"{name}.weight"][1].fill_(1.0)
    words = f"backend.lora.adapter: somewhere changes {name}, which is never called"
    with pytest.raises(ConfigError, match=words), worker._adapters.only_called():
        pass


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3))


class Model(torch.nn.Module):
    """Two layers with three experts, each a module of its own."""

    _no_split_modules = ("Layer",)

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([Layer(), Layer()])

    def get_decoder(self):
        return self

    def get_output_embeddings(self):
        return None


def test_an_expert_that_no_token_has_chosen_keeps_its_adapter():
    model = Model()
    adapters = Adapters(model, LoraConfig(rank=2), 0)
    with adapters.only_called():
        model.layers[1].experts[2](torch.zeros(1, 4))
    assert list(adapters.pairs) == [f"layers.1.experts.{number}.weight" for number in range(3)]
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert model.layers[0].experts[0](torch.ones(1, 4)).shape == (1, 4), "it computes without an adapter"


def test_a_value_head_is_trained_whole_beside_the_adapter(make_worker, batch, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForSequenceClassification

    for dtype in ("float32", "bfloat16"):
        worker = make_worker(head="value", lora=LORA, dtype=dtype)
        head = worker._adapters.head
        start = head.detach().clone()
        column = batch.with_columns(returns=np.linspace(-1, 1, batch.tokens).astype(np.float32))
        losses = [worker.train(column, VALUES)["loss"].number() for _ in range(5)]
        assert losses[-1] < losses[0]
        assert head.dtype == torch.float32
        assert not torch.equal(head, start)
        values = worker.score(batch, ("values",))["values"]
        worker.save(str(tmp_path / dtype))
        again = make_worker(head="value", lora=LORA, dtype=dtype)
        again.load(str(tmp_path / dtype))
        assert np.array_equal(again.score(batch, ("values",))["values"], values)
        if dtype == "float32":
            base = AutoModelForSequenceClassification.from_pretrained(worker._info.path, num_labels=1)
            loaded = PeftModel.from_pretrained(base, tmp_path / dtype)
            assert torch.equal(loaded.base_model.model.score.weight, head)
        judging = {"role": "judge", "trained": False, "head": "value", "dtype": dtype}
        judge = make_worker(**judging, lora={**LORA, "adapter": str(tmp_path / dtype)})
        assert np.array_equal(judge.score(batch, ("values",))["values"], values)
    headless = make_worker(lora=LORA)
    headless.save(str(tmp_path / "headless"))
    with pytest.raises(WhetError, match="has no value head"):
        make_worker(**judging, lora={**LORA, "adapter": str(tmp_path / "headless")})


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_optimizers_and_groups_see_the_matrices_of_the_adapter(make_worker, moe, batch, kind):
    groups = [{"match": "lora_B", "lr_factor": 4.0}, {"match": r"layers\.0\.", "lr_factor": 0.0}]
    worker = make_worker(
        folder=moe, lora={**LORA, "experts": True}, optimizer={"kind": kind, "lr": 1e-2, "groups": groups}
    )
    kinds = worker._stepper._kinds
    assert {name for name, one in kinds.items() if one == "muon"} == (
        {name for name in kinds if ".experts" not in name} if kind == "muon" else set()
    )
    before = {name: tensor.clone() for name, tensor in worker._weights.trained.items()}
    for _ in range(2):
        worker.train(batch, WEIGHTED)
    for name, tensor in worker._weights.trained.items():
        still = "layers.0." in name and "lora_B" not in name
        assert torch.equal(tensor, before[name]) == still, name


def test_what_is_sent_alone_is_what_peft_would_have_saved(make_worker, moe, batch, tmp_path):
    from whet.interfaces.weights import TransferSpec
    from whet_weights.transfer import receive

    worker = make_worker(folder=moe, lora={**LORA, "experts": True})
    worker.train(batch, WEIGHTED)
    info = AdapterInfo(4, 6.0, kinds=("linear", "experts"))
    spec = TransferSpec("disk", str(tmp_path / "way"), "1", 1, adapter=info)
    worker.send_weights(spec)
    sent = {name: tensor.clone() for name, tensor in receive(spec)}
    close(sent, adapter_after(worker, tmp_path / "saved"), 0)
    plain = make_worker()
    with pytest.raises(WhetError, match=r"set backend\.lora"):
        plain.send_weights(spec)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_the_plan_counts_the_parameters_of_the_adapter(make_worker, folders, family):
    from whet.data.model_info import read_model
    from whet_fsdp2.config import Fsdp2Config, memory
    from whet_training.lora_config import LoraConfig, adapter_parameters

    config, info = LoraConfig(rank=4), read_model(folders(family), "bfloat16")
    worker = make_worker(family, lora={"rank": 4})
    assert adapter_parameters(config, info) == sum(tensor.numel() for tensor in worker._weights.trained.values())
    terms = {term.what: term.bytes for term in memory(Fsdp2Config(lora=config, reference=True), info, 1, True)}
    assert terms["frozen weights in bfloat16"] == 2 * info.parameters
    assert terms["the model on its GPU as it is loaded, in bfloat16"] == 2 * info.parameters
    assert not any("reference" in what or what.startswith("AdamW") for what in terms)
    frozen = {term.what for term in memory(Fsdp2Config(lora=LoraConfig(rank=4, adapter="there")), info, 1, False)}
    assert "the adapter in float32" in frozen
    assert "gradients of the adapter in float32" not in frozen
