"""Stored weights to parts of ranks and back, by the rules of each family; and the shim that Megatron runs with."""

import json
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from whet.data.model_info import read_model
from whet.errors import WhetError
from whet_megatron import architecture, cuts
from whet_megatron.architecture import FAMILIES, Architecture
from whet_megatron.cpu_shim import on_cpu
from whet_megatron.cuts import Place
from whet_megatron.release import write_release
from whet_megatron.rules import DENSE, Rule
from whet_megatron.stored import stored_weights
from whet_training.whole import whole

ARCH = Architecture(
    layers=2, hidden=12, heads=4, kv_heads=2, head_dim=5, mlp=8, vocabulary=21, tied=False, epsilon=1e-6, rope_theta=1e4
)
SHAPES = {
    "whole": [(12,)],
    "rows": [(8, 12)],
    "columns": [(12, 8)],
    "gated": [(8, 12), (8, 12)],
    "qkv": [(20, 12), (10, 12), (10, 12)],
    "vocabulary": [(21, 12)],
}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("cut", SHAPES)
def test_parts_of_all_ranks_are_the_stored_weights_again(cut, ranks):
    stored = [torch.randn(shape) for shape in SHAPES[cut]]
    whole = (sum(len(one) for one in stored), *stored[0].shape[1:])
    if cut == "vocabulary":
        whole = (24, 12)
    part = (whole[0], whole[1] // ranks) if cut == "columns" else (whole[0] // ranks, *whole[1:])
    shape = whole if cut == "whole" else part
    parts = [cuts.take(cut, stored, shape, Place(rank, ranks), ARCH) for rank in range(ranks)]
    assert all(tuple(part.shape) == shape for part in parts)
    again = cuts.join(cut, parts, ARCH)
    assert all(torch.equal(mine, one) for mine, one in zip(again, stored, strict=True))
    assert cuts.stored_shapes(cut, shape, Place(0, ranks), ARCH) == [tuple(one.shape) for one in stored]


def test_queries_keys_and_values_of_a_group_of_heads_follow_each_other():
    heads = torch.arange(4)[:, None].expand(4, 5).reshape(20, 1)  # the number of the head
    fused = cuts.take("qkv", [heads, 10 + heads[:10] // 1, 20 + heads[:10]], (40, 1), Place(0, 1), ARCH)
    assert fused[::5, 0].tolist() == [0, 1, 10, 20, 2, 3, 11, 21]


def test_padding_of_the_vocabulary_is_zero_on_the_last_rank_alone():
    stored = torch.ones(21, 3)
    first, last = (cuts.take("vocabulary", [stored], (12, 3), Place(rank, 2), ARCH) for rank in range(2))
    assert first.all()
    assert last.sum() == 9 * 3
    assert not last[9:].any()


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "qwen3_moe", "mixtral"])
def test_rules_name_every_stored_weight_of_their_family_once(folders, name):
    from safetensors import safe_open

    folder = folders(name)
    arch = architecture.read(read_model(folder))
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        there = set(file.keys())
    named = []
    for rule in FAMILIES[name].rules:
        for layer in range(arch.layers if "{layer}" in rule.name else 1):
            for expert in range(arch.experts if "{expert}" in rule.name else 1):
                named += [one.format(layer=layer, expert=expert) for one in rule.stored]
    assert there <= set(named)
    assert len(set(named)) == len(named)


def copy_of(folder, tmp_path, **more):
    """Copy a model folder, with more tensors."""
    from safetensors.torch import load_file, save_file

    file = shutil.copytree(folder, tmp_path / "model") / "model.safetensors"
    save_file({**load_file(file), **more}, file, {"format": "pt"})
    return file.parent


def test_stored_weights_that_no_parameter_is_made_of_are_told_of(build, folders, tmp_path, caplog):
    for name in ("llama", "qwen2"):
        build(folders(name))
        build(folders(name), head="value")
    assert "no place" not in caplog.text
    build(copy_of(folders("llama"), tmp_path, a=torch.ones(2)))
    assert "1 tensor that LlamaForCausalLM has no place for: a; left out, also of exports" in caplog.text
    caplog.clear()
    write_release(str(tmp_path / "model"), str(tmp_path / "out"))
    assert "1 tensor that LlamaForCausalLM has no place for: a; left out, also of exports" in caplog.text


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.q_proj.bias", "model.layers.2.mlp.up_proj.weight"])
def test_stored_weights_that_show_another_config_are_refused(build, folders, tmp_path, name):
    folder = copy_of(folders("llama"), tmp_path, **{name: torch.ones(2)})
    with pytest.raises(Exception, match=f"hold {name}, and config.json describes LlamaForCausalLM without"):
        build(folder)
    with pytest.raises(WhetError, match=f"hold {name}, and config.json"):
        write_release(str(folder), str(tmp_path / "out"))
    assert not list(tmp_path.glob("out*"))


def test_a_checkpoint_is_written_by_one_process(folders, tmp_path):
    with whole(tmp_path / "out"), pytest.raises(WhetError, match="out is being written by another process"):
        write_release(str(folders("llama")), str(tmp_path / "out"))


def test_a_whole_file_is_read_before_an_index_and_a_tensor_that_a_file_lacks_is_named(tmp_path):
    from safetensors.torch import save_file

    for value, file in enumerate(("model-1.safetensors", "model.safetensors")):
        save_file({"a": torch.full((2,), float(value))}, tmp_path / file)
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-1.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with stored_weights(tmp_path) as weights:
        assert weights.names == {"a"}
        assert weights.slices("a")[:].tolist() == [1.0, 1.0]
    (tmp_path / "model.safetensors").unlink()
    with stored_weights(tmp_path) as weights:
        assert weights.slices("a")[:].tolist() == [0.0, 0.0]
        with pytest.raises(WhetError, match=r"model-1\.safetensors lacks b, which the index .* says"):
            weights.slices("b")


def test_a_rule_reads_numbers_from_a_name():
    rule = Rule("decoder.layers.{layer}.a.{expert}.weight", ("model.{layer}.e.{expert}",))
    assert rule.match("decoder.layers.12.a.7.weight") == ("model.12.e.7",)
    assert rule.match("decoder.layers.x.a.7.weight") is None
    assert DENSE[0].match("embedding.word_embeddings.weight") == ("model.embed_tokens.weight",)


def test_weights_that_are_missing_or_of_another_shape_are_refused_by_name(build, folders, tmp_path):
    import shutil

    from safetensors.torch import load_file, save_file

    folder = tmp_path / "model"
    shutil.copytree(folders("qwen3"), folder)
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    save_file({**weights, name: weights[name][:-1]}, folder / "model.safetensors")
    with pytest.raises(WhetError, match=r"hold model\.layers\.1\.mlp\.up_proj\.weight as \[143, 48\]"):
        build(folder)
    del weights[name]
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(WhetError, match=r"lack model\.layers\.1\.mlp\.up_proj\.weight"):
        build(folder)
    build(folders("qwen3"))  # a failed start leaves nothing behind


def test_the_shim_leaves_torch_as_it_was():
    import megatron.core.transformer.moe.token_dispatcher as dispatcher

    def look():
        return [torch.cuda.current_device, torch.cuda.Stream, torch.nn.Module.cuda, torch.Tensor.type,
                dispatcher.maybe_move_tensor_to_cpu]  # fmt: skip

    before = look()
    with on_cpu(), on_cpu():
        assert torch.cuda.current_device() == torch.device("cpu")
        assert torch.empty(1, device="cuda").device.type == "cpu"
        assert torch.empty(1).to("cuda:0").device.type == "cpu"
    assert look() == before
    with pytest.raises((RuntimeError, AssertionError)):
        torch.empty(1, device="cuda")


def test_the_shim_serves_threads_that_enter_and_leave_it_at_any_time():
    before, entered, leave = torch.cuda.current_device, threading.Event(), threading.Event()

    def outer():
        with on_cpu():
            entered.set()
            assert leave.wait(60)

    with ThreadPoolExecutor() as pool:
        first = pool.submit(outer)
        assert entered.wait(60)
        with on_cpu():  # while the other thread is in it
            assert torch.empty(1, device="cuda").device.type == "cpu"
            leave.set()
            first.result()
            assert torch.cuda.current_device() == torch.device("cpu")  # after the other thread has left it
    assert torch.cuda.current_device is before
