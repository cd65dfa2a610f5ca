"""Runs that begin with a checkpoint of Megatron, and such checkpoints as model folders."""

import dataclasses
import json
import os
import pickle
import shutil
from argparse import Namespace
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch.distributed.checkpoint.metadata import StorageMeta

from whet.data.model_info import read_model
from whet.errors import CheckpointError
from whet_megatron import foreign
from whet_megatron.architecture import LLAMA3
from whet_megatron.cli import import_, to_megatron
from whet_megatron.cpu_shim import on_cpu
from whet_megatron.index import read_index
from whet_testing.reference import Reference
from whet_testing.stored_weights import assert_bitwise, weights_of
from whet_testing.three_steps import steps_of

CASES = [("qwen3", False), ("llama", True), ("qwen2", False), ("qwen3_moe", False), ("mixtral", True)]


def write_checkpoint(folder, config, batch, *, dtype=torch.float32, apart=False):
    """Write a random model as Megatron-LM does, with no code of whet but the shim. Return its logprobs [N] of a batch.

    `apart`: with names for each layer, as Megatron writes models whose layers differ.
    """
    with one_rank():
        model = _model(config, dtype)
        _save(model, folder, apart)
        return _logprobs(model, batch, config["vocab_size"])


def read_checkpoint(folder, config, batch):
    """Load a checkpoint as Megatron-LM does, with its own modules and functions. Return the logprobs [N] of a batch."""
    from megatron.core import dist_checkpointing

    with one_rank():
        common = dist_checkpointing.load_common_state_dict(folder)
        kept = dist_checkpointing.load_content_metadata(preloaded_state_dict=common)
        model = _model(config, torch.float32)
        state = {"model": model.sharded_state_dict(metadata=kept)}
        for part in state["model"].values() if model.config.num_moe_experts else ():  # as Transformer Engine's layers
            part.key = part.key.replace("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight")
        found = dist_checkpointing.load(state, folder, strict="raise_all")
        model.load_state_dict(found["model"], strict=True)
        assert common["args"].num_layers == config["num_hidden_layers"]
        return _logprobs(model, batch, config["vocab_size"])


@contextmanager
def one_rank():
    """Run Megatron's groups of one rank in this process."""
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    with on_cpu():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            parallel_state.initialize_model_parallel()
            model_parallel_cuda_manual_seed(1, force_reset_rng=True)
            with torch.no_grad():
                yield
        finally:
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()


def _model(config, dtype):
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    experts = config.get("num_experts") or config.get("num_local_experts")
    sparse = {
        "num_moe_experts": experts, "moe_router_topk": config["num_experts_per_tok"],
        "moe_ffn_hidden_size": config.get("moe_intermediate_size", config["intermediate_size"]),
        "moe_router_load_balancing_type": "none", "moe_token_dispatcher_type": "alltoall",
    } if experts else {}  # fmt: skip
    normed = config["model_type"].startswith("qwen3")
    made = TransformerConfig(
        num_layers=config["num_hidden_layers"], hidden_size=config["hidden_size"],
        num_attention_heads=config["num_attention_heads"], num_query_groups=config["num_key_value_heads"],
        kv_channels=config["head_dim"], ffn_hidden_size=config["intermediate_size"], normalization="RMSNorm",
        layernorm_epsilon=config["rms_norm_eps"], activation_func=torch.nn.functional.silu, gated_linear_unit=True,
        add_bias_linear=False, add_qkv_bias=config["model_type"] == "qwen2", qk_layernorm=normed, hidden_dropout=0.0,
        attention_dropout=0.0, bias_activation_fusion=False, bias_dropout_fusion=False, masked_softmax_fusion=False,
        gradient_accumulation_fusion=False, params_dtype=dtype, bf16=dtype == torch.bfloat16,
        attention_softmax_in_fp32=True, init_method_std=0.2, **sparse,
    )  # fmt: skip
    rope = config.get("rope_parameters") or config
    return GPTModel(
        made, get_gpt_layer_local_spec(num_experts=experts, normalization="RMSNorm", qk_layernorm=normed),
        vocab_size=-(-config["vocab_size"] // 256) * 256,  # --make-vocab-size-divisible-by 128, two ranks
        max_sequence_length=512, position_embedding_type="rope", rotary_base=rope["rope_theta"],
        share_embeddings_and_output_weights=config.get("tie_word_embeddings", False),
    ).to(dtype).to(dtype).eval()  # fmt: skip


def _save(model, folder, apart):
    from megatron.core import dist_checkpointing

    place = folder / "iter_0000007"
    place.mkdir(parents=True)
    document = {
        "args": Namespace(num_layers=model.config.num_layers), "checkpoint_version": 3.0, "iteration": 7,
        "model": model.sharded_state_dict(metadata={"non_homogeneous_layers": apart}),
    }  # fmt: skip
    dist_checkpointing.save(document, str(place))
    (folder / "latest_checkpointed_iteration.txt").write_text(str(7))


def _logprobs(model, batch, vocabulary):
    """Return the logprobs of each token, 0 where `loss_mask` is false."""
    found, begin = torch.zeros(batch.tokens), 0
    for i in range(batch.sequences):
        one = batch.take([i])
        tokens, mask = torch.from_numpy(one["tokens"]).long()[None], torch.from_numpy(one["loss_mask"])
        size = tokens.shape[1]
        hidden = torch.ones(1, 1, size, size, dtype=torch.bool).triu(1)
        logits = model(tokens, torch.arange(size)[None], hidden)[0, :, :vocabulary]
        logprobs = torch.log_softmax(logits.float(), -1)[:-1].gather(1, tokens[0, 1:, None])[:, 0]
        found[begin + 1 : begin + size] = torch.where(mask[1:], logprobs, 0.0)
        begin += size
    return found.numpy()


@pytest.fixture(scope="session")
def written(tmp_path_factory, folders, make_batch):
    """Return a function that returns the folder of a checkpoint, the folder of its config, and its logprobs."""
    known = {}

    def checkpoint(name, apart=False, dtype=torch.float32):
        key = name, apart, dtype
        if key not in known:
            folder, model = tmp_path_factory.mktemp("megatron-lm"), tmp_path_factory.mktemp("config") / "model"
            shutil.copytree(folders(name), model, ignore=shutil.ignore_patterns("*.safetensors*"))
            config = json.loads((model / "config.json").read_text())
            found = write_checkpoint(folder, config, make_batch(), dtype=dtype, apart=apart)
            known[key] = folder, model, found
        return known[key]

    return checkpoint


@pytest.mark.parametrize(("name", "apart"), CASES, ids=str)
def test_a_run_begins_with_the_model_that_megatron_computes(build, written, make_batch, name, apart):
    folder, model, expected = written(name, apart)
    backend = build(model, load=str(folder), reference=True)
    batch = make_batch()
    for weights in ("policy", "reference"):
        np.testing.assert_allclose(backend.score(batch, ("logprobs",), weights)["logprobs"], expected, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "ranks", "sizes"),
    [
        ("llama", 2, {"tensor": 2}),
        ("qwen3", 2, {"pipeline": 2}),
        ("qwen3_moe", 2, {"expert": 2}),
        ("mixtral", 4, {"tensor": 2, "sequence": True, "pipeline": 2, "expert": 2}),
    ],
    ids=str,
)
def test_every_parallelism_begins_with_the_same_model(build, written, make_batch, name, ranks, sizes):
    folder, model, expected = written(name, dict(CASES)[name])
    backend, batch = build(model, ranks, sizes, load=str(folder / "iter_0000007")), make_batch()
    np.testing.assert_allclose(backend.score(batch, ("logprobs",))["logprobs"], expected, atol=2e-5)


@pytest.mark.parametrize(("name", "apart"), CASES, ids=str)
def test_an_imported_folder_is_the_model_that_megatron_computes(written, make_batch, tmp_path, name, apart):
    folder, model, expected = written(name, apart)
    result = CliRunner().invoke(import_, [str(folder), str(tmp_path / "out"), "--model", str(model)])
    assert result.exit_code == 0, result.output
    batch = make_batch()
    reference, parts = Reference(tmp_path / "out"), (batch.take([i]) for i in range(batch.sequences))
    found = np.concatenate([np.where(one["loss_mask"], reference.logprobs(one["tokens"]), 0) for one in parts])
    np.testing.assert_allclose(found, expected, atol=2e-5)


@pytest.mark.slow
def test_bfloat16_weights_keep_their_bits_through_a_checkpoint_and_back(build, folders, written, make_batch, tmp_path):
    folder, model, _ = written("qwen3", dtype=torch.bfloat16)
    result = CliRunner().invoke(import_, [str(folder), str(tmp_path / "out"), "--model", str(model)])
    assert result.exit_code == 0, result.output
    imported = weights_of(tmp_path / "out")
    assert {tensor.dtype for tensor in imported.values()} == {torch.bfloat16}
    assert read_model(tmp_path / "out").config["dtype"] == "bfloat16"
    for sizes in ({"tensor": 2}, {"pipeline": 2}):
        backend = build(model, 2, sizes, "bfloat16", load=str(folder))
        backend.export(tmp_path / f"export-{next(iter(sizes))}")
        backend.close()
        assert_bitwise(weights_of(tmp_path / f"export-{next(iter(sizes))}"), imported)


@pytest.mark.slow
def test_a_checkpoint_of_a_run_of_two_ranks_is_imported_as_it_is_exported(build, folders, make_batch, tmp_path):
    for name, sizes in (("llama", {"tensor": 2}), ("qwen3_moe", {"tensor": 2, "sequence": True, "expert_tensor": 2})):
        backend = build(name, 2, sizes)
        steps_of(backend, [make_batch(0)])
        backend.save(tmp_path / name / "backend").result()
        backend.export(tmp_path / name / "export")
        backend.close()
        found = dict(foreign.stored(str(tmp_path / name), read_model(folders(name))))
        assert_bitwise(found, weights_of(tmp_path / name / "export"))


@pytest.mark.parametrize("name", [name for name, _ in CASES])
def test_megatron_begins_with_a_folder_that_is_written_for_it(folders, make_batch, tmp_path, name):
    result = CliRunner().invoke(to_megatron, [str(folders(name)), str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "out" / foreign.TRACKER).read_text() == "release"
    assert_bitwise(dict(foreign.stored(str(tmp_path / "out"), read_model(folders(name)))), weights_of(folders(name)))
    batch, reference = make_batch(), Reference(folders(name))
    parts = (batch.take([i]) for i in range(batch.sequences))
    expected = np.concatenate([np.where(one["loss_mask"], reference.logprobs(one["tokens"]), 0) for one in parts])
    config = json.loads((folders(name) / "config.json").read_text())
    found = read_checkpoint(str(tmp_path / "out" / "release"), config, batch)
    np.testing.assert_allclose(found, expected, atol=2e-5)


def test_arguments_that_megatron_does_not_read_from_a_checkpoint_are_printed(folders, tmp_path):
    other = shutil.copytree(folders("llama"), tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    scaled = {"rope_type": "llama3", "factor": 32.0, "rope_theta": 10000.5, **LLAMA3}
    (other / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-5, "rope_parameters": scaled}))
    result = CliRunner().invoke(to_megatron, [str(other), str(tmp_path / "out")])
    assert "--norm-epsilon 1e-05 --use-rope-scaling --rope-scaling-factor 32\n" in result.output
    common = torch.load(tmp_path / "out/release/common.pt", weights_only=False)
    assert common["args"].rotary_base == 10000.5
    result = CliRunner().invoke(to_megatron, [str(folders("qwen3")), str(tmp_path / "qwen3")])
    assert " --qk-layernorm\n" in result.output


def test_a_folder_with_other_weights_than_its_config_says_is_not_written_for_megatron(folders, tmp_path):
    other = shutil.copytree(folders("qwen3"), tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "num_attention_heads": 8}))
    result = CliRunner().invoke(to_megatron, [str(other), str(tmp_path / "out")])
    assert result.exit_code == 1
    assert "q_proj" in result.output
    assert not list(tmp_path.glob("out*"))


def test_a_folder_of_quantised_weights_is_not_written_for_megatron_and_gives_its_config_to_others(
    written, folders, tmp_path
):
    folder, model, _ = written("qwen3")
    other = shutil.copytree(folders("qwen3"), tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "fp8"}}))
    result = CliRunner().invoke(to_megatron, [str(other), str(tmp_path / "out")])
    assert result.exit_code == 1
    assert "has quantised weights (quantization_config)" in result.output
    assert not list(tmp_path.glob("out*"))
    for name in (model, other):
        result = CliRunner().invoke(import_, [str(folder), str(tmp_path / f"out-{name.name}"), "--model", str(name)])
        assert result.exit_code == 0, result.output
    plain, found = (tmp_path / f"out-{name.name}" for name in (model, other))
    assert read_model(found).config == read_model(plain).config
    assert_bitwise(weights_of(found), weights_of(plain))


def test_commands_do_not_promise_names_of_the_hub(written, tmp_path):
    folder, _, _ = written("qwen3")
    out = str(tmp_path / "out")
    for command, given in ((import_, [str(folder), out, "--model", "maker/none"]), (to_megatron, ["maker/none", out])):
        result = CliRunner().invoke(command, given)
        assert result.exit_code == 1
        assert "there is no model folder 'maker/none'; names of the hub are not looked up here" in result.output


def test_a_tensor_without_a_place_in_the_index_is_not_made_up(written, tmp_path):
    folder, model, _ = written("qwen3")
    other = shutil.copytree(folder / "iter_0000007", tmp_path / "iter_0000007")
    index, name = read_index(other), "decoder.final_layernorm.weight"
    index.storage_data = {at: part for at, part in index.storage_data.items() if at.fqn != name}
    (other / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(CheckpointError, match=rf"\.metadata has no place for \d+ numbers of {name}"):
        list(foreign.stored(str(other), read_model(model)))


def test_norms_are_found_under_the_names_of_transformer_engines_layers_too(build, written, make_batch, tmp_path):
    """There the norm before experts is a module of its own. Without the engine Megatron saves it as of their matrix."""
    folder, model, expected = written("qwen3_moe")
    other = tmp_path / "iter_0000007"
    shutil.copytree(folder / "iter_0000007", other)
    index = read_index(other)
    old, new = (f"decoder.layers.{name}" for name in ("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"))
    index.state_dict_metadata[new] = index.state_dict_metadata.pop(old)
    index.storage_data = {
        dataclasses.replace(at, fqn=new) if at.fqn == old else at: part for at, part in index.storage_data.items()
    }
    (other / ".metadata").write_bytes(pickle.dumps(index))
    backend = build(model, load=str(other))
    np.testing.assert_allclose(backend.score(make_batch(), ("logprobs",))["logprobs"], expected, atol=2e-5)


class Evil:
    """Makes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def test_an_index_that_names_code_is_refused_and_not_run(build, written, tmp_path):
    folder, model, _ = written("qwen3")
    bad = tmp_path / "bad"
    shutil.copytree(folder / "iter_0000007", bad)
    (bad / ".metadata").write_bytes(pickle.dumps(Evil(tmp_path / "evil")))
    with pytest.raises(CheckpointError, match=r"it names (posix|nt)\.system"):
        read_index(bad)
    with pytest.raises(Exception, match=r"it names (posix|nt)\.system"):
        build(model, load=str(bad))
    assert not (tmp_path / "evil").exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_hidden_layers": 3}, r"decoder\.layers|holds 2 of 3"),
        ({"num_attention_heads": 8}, r"linear_qkv|linear_proj"),
        ({"vocab_size": 5000}, "word_embeddings"),
        ({"tie_word_embeddings": False}, r"output_layer\.weight"),
    ],
    ids=str,
)
def test_a_checkpoint_of_another_model_is_refused_by_name(build, written, tmp_path, change, words):
    folder, model, _ = written("qwen3")
    other = tmp_path / "other"
    shutil.copytree(model, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(Exception, match=words):
        build(other, load=str(folder))
    with pytest.raises(CheckpointError, match=words):
        list(foreign.stored(str(folder), read_model(other)))
    result = CliRunner().invoke(import_, [str(folder), str(tmp_path / "out"), "--model", str(other)])
    assert result.exit_code == 1
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("qwen2", {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, "linear_qkv.bias"),
        ("qwen2", {"num_hidden_layers": 1}, r"decoder\.layers\.1\."),
        ("llama", {"tie_word_embeddings": True}, r"output_layer\.weight"),
    ],
    ids=str,
)
def test_a_checkpoint_that_has_more_than_the_model_is_refused_by_name(build, folders, tmp_path, name, change, words):
    written, other = tmp_path / "out", shutil.copytree(folders(name), tmp_path / "other")
    assert CliRunner().invoke(to_megatron, [str(other), str(written)]).exit_code == 0
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(CheckpointError, match=words):
        list(foreign.stored(str(written), read_model(other)))
    with pytest.raises(Exception, match=words):
        build(other, load=str(written))


def test_an_index_may_note_where_it_was_written(written, tmp_path):
    folder, model, _ = written("qwen3")
    other = shutil.copytree(folder / "iter_0000007", tmp_path / "other")
    index = read_index(other)
    index.storage_meta = StorageMeta(checkpoint_id=Path("/data/run"))
    (other / ".metadata").write_bytes(pickle.dumps(index))
    assert read_index(other).storage_meta.checkpoint_id.lstrip("/") == "data/run"
    assert list(foreign.stored(str(other), read_model(model)))


def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="is no checkpoint of Megatron"):
        foreign.tensors_of(tmp_path)
