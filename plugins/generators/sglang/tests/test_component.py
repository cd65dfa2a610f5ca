"""The plugin registers, plans and checks its section without SGLang."""

from pathlib import Path

from whet.data.model_info import read_model
from whet_sglang.arguments import ENGINE, cache_tokens, engine_arguments
from whet_sglang.config import SglangConfig
from whet_testing.contracts.engine import EngineContract
from whet_testing.role_context import make_context
from whet_venv.venvs import recipe_of


class TestPlugin(EngineContract):
    hooks = "whet_sglang.hooks"
    engine = ENGINE
    arguments = staticmethod(engine_arguments)


def test_arguments_are_those_of_the_config_the_model_and_the_run(tmp_path: Path, tiny_model_folder: Path) -> None:
    context = make_context(tmp_path, "generator", tiny_model_folder, seed=7, max_context=100)
    found = engine_arguments(SglangConfig(max_batch=8, engine={"page_size": 4}), context, "cpu")
    assert found["model_path"] == str(tiny_model_folder)
    assert (found["random_seed"], found["context_length"], found["max_running_requests"]) == (7, 106, 8)
    assert (found["page_size"], found["dtype"], found["skip_tokenizer_init"]) == (4, "float32", False)
    assert (found["disable_cuda_graph"], found["enable_memory_saver"]) == (True, False)
    on_gpu = engine_arguments(SglangConfig(memory_fraction=0.5, prefix_caching=False), context, "cuda")
    assert (on_gpu["mem_fraction_static"], on_gpu["disable_cuda_graph"], on_gpu["enable_memory_saver"]) == (
        0.5,
        False,
        True,
    )
    assert on_gpu["disable_radix_cache"]
    assert not {"max_total_tokens", "attention_backend", "max_running_requests"} & set(on_gpu)


def test_the_context_is_never_longer_than_the_model_was_made_for(tmp_path: Path, tiny_model_folder: Path) -> None:
    context = make_context(tmp_path, "generator", tiny_model_folder)
    assert engine_arguments(SglangConfig(), context, "cpu")["context_length"] == 256
    assert engine_arguments(SglangConfig(max_context=253), context, "cpu")["context_length"] == 256
    assert engine_arguments(SglangConfig(max_context=64), context, "cpu")["context_length"] == 70


def test_a_cache_is_said_in_tokens(tiny_model_folder: Path) -> None:
    model = read_model(tiny_model_folder, "bfloat16")
    assert cache_tokens(SglangConfig(cache_gib=1.0), model, False) == 2**30 // (model.token_cache_bytes // 2)
    assert cache_tokens(SglangConfig(dtype="float32"), model, True) == 2**30 // model.token_cache_bytes
    assert cache_tokens(SglangConfig(), model, False) is None


def test_an_environment_for_it_gets_the_engine() -> None:
    assert recipe_of("whet-sglang").install == ("sglang==0.5.23",)
