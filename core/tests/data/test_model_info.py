import json
import shutil
import sys
import tracemalloc
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from whet.data.model_info import ModelInfo, check_weights, fingerprint, locate, read_model, weight_files
from whet.errors import ConfigError


@pytest.mark.parametrize("tied", [True, False])
def test_the_number_of_parameters_is_that_of_transformers(tiny_models: Callable[..., Path], tied: bool) -> None:
    from transformers import AutoModelForCausalLM

    folder = tiny_models(tied=tied, hidden=96)
    real = AutoModelForCausalLM.from_pretrained(folder)
    counted = sum(parameter.numel() for parameter in real.parameters())
    assert read_model(folder).parameters == pytest.approx(counted, rel=0.01)


MIXTURES = {
    "qwen3_moe": {"num_experts": 8, "moe_intermediate_size": 48, "mlp_only_layers": [1], "head_dim": 32},
    "qwen2_moe": {"num_experts": 8, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 96},
    "mixtral": {"num_local_experts": 4, "head_dim": 32},
    "olmoe": {"num_experts": 8},
}


@pytest.mark.parametrize("family", MIXTURES)
def test_all_experts_of_a_mixture_count(family: str) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = {
        "model_type": family, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "vocab_size": 500,
        "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False, **MIXTURES[family],
    }  # fmt: skip
    with torch.device("meta"):
        real = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    counted = sum(parameter.numel() for parameter in real.parameters())
    assert ModelInfo("x", config).parameters == pytest.approx(counted, rel=0.01)


LATENT = {
    "kv_lora_rank": 32, "q_lora_rank": 32, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 32,
    "n_routed_experts": 4, "n_shared_experts": 1, "moe_intermediate_size": 96,
}  # fmt: skip
LAYOUTS = {
    "jamba": {"num_experts": 4},
    "falcon": {"multi_query": True, "num_kv_heads": 4, "ffn_hidden_size": 256},
    "falcon of 40 B": {"new_decoder_architecture": True, "num_kv_heads": 2, "ffn_hidden_size": 256},
    "deepseek_v3": {**LATENT, "first_k_dense_replace": 2, "n_group": 1, "topk_group": 1},
    "glm4_moe_lite": {**LATENT, "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]},
    "afmoe": {"num_dense_layers": 2, "num_experts": 16, "moe_intermediate_size": 96},
    "recurrent_gemma": {},
    "doge": {},
}  # fmt: skip


@pytest.mark.parametrize("family", LAYOUTS)
def test_no_more_parameters_are_counted_than_are_there(family: str) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        family.split()[0], hidden_size=128, intermediate_size=256, num_hidden_layers=4, vocab_size=200, pad_token_id=0,
        num_attention_heads=4, **LAYOUTS[family],
    )  # fmt: skip
    with torch.device("meta"):
        real = AutoModelForCausalLM.from_config(config)
    counted = sum(parameter.numel() for parameter in real.parameters())
    found = ModelInfo("x", config.to_dict()).parameters
    assert found == 0 if family in ("doge", "recurrent_gemma") else 0.75 * counted < found <= counted


def test_a_model_folder_says_what_it_holds(tiny_model_folder: Path) -> None:
    info = read_model(tiny_model_folder, dtype="bfloat16")
    assert (info.architecture, info.vocab_size, info.max_positions) == ("Qwen3ForCausalLM", 384, 256)
    assert (info.path, info.dtype, info.trust_remote_code) == (str(tiny_model_folder), "bfloat16", False)


def test_the_text_part_of_a_multimodal_config_counts() -> None:
    info = ModelInfo("x", {"text_config": {"vocab_size": 7, "max_position_embeddings": 9}})
    assert (info.vocab_size, info.max_positions) == (7, 9)


@pytest.mark.parametrize("name", ["n_positions", "n_ctx", "max_seq_len", "seq_length"])
def test_older_configs_state_their_positions_by_other_names(name: str) -> None:
    assert ModelInfo("x", {name: 64}).max_positions == 64
    assert ModelInfo("x", {name: 64, "max_position_embeddings": 32}).max_positions == 32


CACHES = {
    "qwen3": {"head_dim": 24},
    "deepseek_v3": {
        "kv_lora_rank": 8, "q_lora_rank": None, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
        "first_k_dense_replace": 2,
    },
    "gemma4_text": {
        "head_dim": 8, "layer_types": ["sliding_attention", "full_attention"], "vocab_size_per_layer_input": 50,
        "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0,
        "per_layer_config": {"1": {"head_dim": 16, "num_key_value_heads": 1}},
    },
}  # fmt: skip


@pytest.mark.parametrize("family", CACHES)
def test_the_cache_of_a_token_is_that_of_transformers(family: str) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = {
        "model_type": family, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 50,
        "num_attention_heads": 4, "num_key_value_heads": 4 if family == "deepseek_v3" else 2, **CACHES[family],
    }  # fmt: skip
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.float32)
    cache = model(input_ids=torch.arange(3, 13)[None], use_cache=True).past_key_values
    counted = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert ModelInfo("x", config).token_cache_bytes == counted / 10


def test_what_a_config_does_not_say_is_0() -> None:
    info = ModelInfo("x", {})
    assert (info.vocab_size, info.max_positions, info.parameters, info.architecture) == (0, 0, 0, "")


def test_what_a_config_leaves_open_counts_as_the_smaller_number() -> None:
    shape = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 1000}
    sizes = {
        name: ModelInfo("x", {**shape, **config}).parameters
        for name, config in {
            "tied": {"model_type": "gemma2"},  # its class ties them, so its config does not say so
            "untied": {"model_type": "gemma2", "tie_word_embeddings": False},
            "plain": {"model_type": "starcoder2", "tie_word_embeddings": True},
        }.items()
    }
    assert sizes["untied"] - sizes["tied"] == 64 * 1000
    assert sizes["tied"] - sizes["plain"] == 2 * 64 * 4 * 64


def test_a_config_of_nonsense_has_no_parameters() -> None:
    info = ModelInfo("x", {"hidden_size": "many", "num_hidden_layers": None, "vocab_size": "x", "text_config": 5})
    assert (info.parameters, info.vocab_size, info.max_positions, info.token_cache_bytes) == (0, 0, 0, 0)
    assert ModelInfo("x", {"max_position_embeddings": None}).max_positions == 0
    assert ModelInfo("x", {"per_layer_config": [5], "num_attention_heads": "4"}).token_cache_bytes == 0
    assert ModelInfo("x", {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 0}).parameters == 0


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no folder .*nowhere"):
        read_model(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "holds no config.json"), ("{", "cannot be read as JSON"), ("[]", "holds list, wanted a JSON object")],
)
def test_a_folder_that_is_no_model_is_explained(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=message):
        read_model(tmp_path)


def test_whole_weights_are_accepted(tiny_model_folder: Path) -> None:
    check_weights(tiny_model_folder)


def header(text: bytes, times: int = 1) -> bytes:
    """Return a safetensors file that begins as such, and then has this for a header."""
    return (times * len(text)).to_bytes(8, "little") + text * times


def test_a_hostile_header_costs_little_memory(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(header(b"[],", 8_000_000))
    tracemalloc.start()
    try:
        with pytest.raises(ConfigError, match="wanted at most 2,097,152"):
            check_weights(tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 100 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("model.safetensors", None, "holds no weights"),
        ("model.safetensors", lambda whole: whole[:-1], r"has 495,\d+ bytes, its header tells of 495"),
        ("model.safetensors", lambda whole: whole + b"x", "fetch it again"),
        ("model.safetensors", lambda whole: whole[:100], "is no safetensors file"),
        ("model.safetensors", lambda whole: b"", "is no safetensors file"),
        ("model.safetensors", lambda _: header(b"[" * 100_000), "is no safetensors file: it nests too deeply"),
        ("model.safetensors", lambda _: header(b"[],"), "is no safetensors file"),
        ("model.safetensors", lambda _: header(b"[],", 8_000_000), "is no safetensors file: it has about 16,000,000"),
        ("model.safetensors", lambda whole: b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        ("model.safetensors.index.json", lambda _: b'{"weight_map": {"a": "model-2.safetensors"}}', "lacks model-2"),
        ("model.safetensors.index.json", lambda _: b'{"weight_map": []}', "index.json cannot be read"),
    ],
)
def test_broken_weights_are_explained(
    tmp_path: Path, tiny_model_folder: Path, name: str, content: Any, message: str
) -> None:
    whole = (tiny_model_folder / "model.safetensors").read_bytes()
    (tmp_path / ("model.safetensors" if name == "model.safetensors" else "model-1.safetensors")).write_bytes(whole)
    if content is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_bytes(content(whole))
    with pytest.raises(ConfigError, match=message):
        check_weights(tmp_path)


def test_a_whole_file_counts_and_an_index_beside_it_does_not(tmp_path: Path, tiny_model_folder: Path) -> None:
    """`transformers` reads `model.safetensors` first. A folder to which it saved twice may have both."""
    whole = Path(shutil.copy(tiny_model_folder / "model.safetensors", tmp_path))
    (tmp_path / "model-1.safetensors").write_bytes(b"old")
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-1.safetensors"}}')
    assert weight_files(tmp_path) == [whole]
    check_weights(tmp_path)
    whole.unlink()
    assert weight_files(tmp_path) == [tmp_path / "model-1.safetensors"]


def test_a_fingerprint_tells_what_differs(
    tmp_path: Path, tiny_models: Callable[..., Path], tiny_model_folder: Path
) -> None:
    other = Path(shutil.copytree(tiny_models(seed=1), tmp_path / "other"))
    one, two = fingerprint(tiny_model_folder), fingerprint(other)
    assert {name for name in one if one[name] != two[name]} == {"weights"}
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "rope_theta": 5}))
    assert fingerprint(other)["config"] != two["config"]
    assert fingerprint(other)["weights"] == two["weights"]


def test_a_fingerprint_sees_both_ends_of_large_weights(tmp_path: Path) -> None:
    file, size = tmp_path / "model.safetensors", 3 << 20
    found = set()
    for changed in (None, 0, size - 1):
        content = bytearray(size)
        if changed is not None:
            content[changed] = 1
        file.write_bytes(content)
        found.add(fingerprint(tmp_path)["weights"])
    assert len(found) == 3


def test_a_copy_has_the_same_fingerprint(tmp_path: Path, tiny_model_folder: Path) -> None:
    for file in tiny_model_folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    assert fingerprint(tmp_path) == fingerprint(tiny_model_folder)


@pytest.mark.parametrize(
    ("options", "wanted", "unwanted"),
    [
        ({"config_only": True}, "config.json", "model.safetensors"),
        ({}, "model.safetensors", "modeling_x.py"),
        ({}, "model-00001-of-00002.safetensors", "consolidated.safetensors"),
        ({"code": True}, "modeling_x.py", "model.bin"),
    ],
)
def test_of_a_hub_model_only_what_is_needed_is_downloaded(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, bool], wanted: str, unwanted: str
) -> None:
    asked = []

    def download(name: str, revision: str | None, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        asked.append((name, revision))
        left = [file for file in (wanted, unwanted) if any(fnmatch(file, pattern) for pattern in allow_patterns)]
        assert [file for file in left if not any(fnmatch(file, pattern) for pattern in ignore_patterns)] == [wanted]
        return "/cache"

    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(snapshot_download=download))
    assert locate("maker/model", "v1", **options) == Path("/cache")
    assert asked == [("maker/model", "v1")]


def test_a_hub_out_of_reach_is_told_from_a_name_that_it_does_not_know(monkeypatch):
    pytest.importorskip("huggingface_hub")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="cannot be reached and the cache holds no model of that name"):
        locate("nobody/nothing")
