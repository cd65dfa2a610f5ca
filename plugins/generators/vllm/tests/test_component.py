"""The plugin registers, plans and checks its section without vLLM."""

import tomllib
from pathlib import Path

from whet_testing.contracts.engine import EngineContract
from whet_testing.role_context import make_context
from whet_venv.venvs import recipe_of
from whet_vllm.arguments import ENGINE, engine_arguments
from whet_vllm.config import VllmConfig

PLUGIN = Path(__file__).parents[1]


class TestPlugin(EngineContract):
    hooks = "whet_vllm.hooks"
    engine = ENGINE
    arguments = staticmethod(engine_arguments)


def test_its_environment_is_that_of_the_extras_and_of_the_tested_versions() -> None:
    project = tomllib.loads((PLUGIN / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    tested = (PLUGIN.parents[2] / "constraints" / "vllm-cpu.txt").read_text(encoding="utf-8").splitlines()
    for variant in ("gpu", "cpu"):
        recipe = recipe_of("whet-vllm", variant)
        assert list(recipe.install) == project["optional-dependencies"][variant]
    assert recipe_of("whet-vllm").constraints is None, "for GPUs the engine's own pins do"
    assert recipe.constraints is not None
    pins = [line for line in recipe.constraints.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    assert set(pins) <= set(tested)


def test_arguments_are_those_of_the_config_the_model_and_the_run(tmp_path: Path, tiny_model_folder: Path) -> None:
    context = make_context(tmp_path, "generator", tiny_model_folder, seed=7, max_context=100)
    found = engine_arguments(VllmConfig(max_batch=8, cache_gib=0.25, engine={"block_size": 32}), context, "cpu")
    assert found["model"] == str(tiny_model_folder)
    assert (found["seed"], found["max_model_len"], found["max_num_seqs"]) == (7, 100, 8)
    assert (found["kv_cache_memory_bytes"], found["block_size"], found["dtype"]) == (2**28, 32, "float32")
    assert (found["enforce_eager"], found["enable_sleep_mode"], found["skip_tokenizer_init"]) == (True, False, False)
    on_gpu = engine_arguments(VllmConfig(memory_fraction=0.5), context, "cuda")
    assert (on_gpu["gpu_memory_utilization"], on_gpu["enforce_eager"], on_gpu["enable_sleep_mode"]) == (
        0.5,
        False,
        True,
    )
    assert "kv_cache_memory_bytes" not in on_gpu


def test_the_cache_is_that_of_a_rank_and_needs_no_share_of_the_gpu(tmp_path: Path, tiny_model_folder: Path) -> None:
    config = VllmConfig(cache_gib=40, tensor_parallel=4)
    found = engine_arguments(config, make_context(tmp_path, "generator", tiny_model_folder), "cuda")
    assert found["kv_cache_memory_bytes"] * 4 == 40 * 2**30, "vLLM counts for each GPU"
    assert found["gpu_memory_utilization"] < 0.05, "vLLM refuses a GPU that has less than this share free"
