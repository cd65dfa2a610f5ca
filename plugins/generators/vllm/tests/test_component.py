"""The plugin registers, plans and checks its section without vLLM, and says what is missing."""

import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from whet.model import read_model
from whet.named_environments import recipe_of
from whet.testing.contracts.component import ComponentContract
from whet.testing.models import make_model
from whet.testing.site import make_site
from whet_vllm.arguments import PASSTHROUGH, engine_arguments, installed_arguments
from whet_vllm.config import VllmConfig
from whet_vllm.facts import facts

PLUGIN = Path(__file__).parents[1]
KNOWN = frozenset({"block_size", "max_num_batched_tokens", "dtype", "model", "logprobs_mode"})


class TestPlugin(ComponentContract):
    hooks = "whet_vllm.hooks"


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


def test_memory_counts_weights_and_cache(tmp_path: Path, tiny_tokenizer: object) -> None:
    model = read_model(make_model(tmp_path, tiny_tokenizer), "bfloat16")
    assert facts(VllmConfig(cache_gib=0.5), model).memory_bytes == 2 * model.parameters + 2**29
    assert facts(VllmConfig(dtype="float32"), model).memory_bytes == 4 * model.parameters + 2**30
    assert facts(VllmConfig(), evolve(model, config={})).memory_bytes is None


@pytest.mark.parametrize(
    "wrong",
    [{"max_batch": 0}, {"cache_gib": 0.0}, {"memory_fraction": 1.5}, {"tensor_parallel": 0}, {"max_context": -1}],
)
def test_settings_that_leave_no_room_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        VllmConfig(**wrong)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("max_num_batch_tokens", "is no argument of the installed vLLM (did you mean 'max_num_batched_tokens'?)"),
        (
            "qqq",
            "is no argument of the installed vLLM (`python -m vllm.entrypoints.openai.api_server",
        ),
        ("dtype", "is set by `generator.dtype`; write it there"),
        ("logprobs_mode", "cannot be changed: logprobs are of log_softmax(logits / temperature), which the trainer"),
    ],
)
def test_an_argument_that_cannot_be_passed_on_is_named(name: str, message: str) -> None:
    ((found, said),) = PASSTHROUGH.wrong({name: 1, "block_size": 16}, KNOWN)
    assert found == name
    assert said.startswith(message)


def test_arguments_are_those_of_the_config_the_model_and_the_run(tmp_path: Path, tiny_model_folder: Path) -> None:
    site = make_site(tmp_path, "generator", tiny_model_folder, seed=7, max_context=100)
    found = engine_arguments(VllmConfig(max_batch=8, cache_gib=0.25, engine={"block_size": 32}), site, "cpu")
    assert found["model"] == str(tiny_model_folder)
    assert (found["seed"], found["max_model_len"], found["max_num_seqs"]) == (7, 100, 8)
    assert (found["kv_cache_memory_bytes"], found["block_size"], found["dtype"]) == (2**28, 32, "float32")
    assert (found["enforce_eager"], found["enable_sleep_mode"], found["skip_tokenizer_init"]) == (True, False, False)
    on_gpu = engine_arguments(VllmConfig(memory_fraction=0.5), site, "cuda")
    assert (on_gpu["gpu_memory_utilization"], on_gpu["enforce_eager"], on_gpu["enable_sleep_mode"]) == (
        0.5,
        False,
        True,
    )
    assert "kv_cache_memory_bytes" not in on_gpu


RECIPE = """
run: {{folder: {folder}, steps: 1}}
model: {{path: {model}}}
algorithm: {{use: grpo}}
backend: {{use: fsdp2}}
generator: {{use: vllm, engine: {{block_sise: 32}}}}
rollout: {{max_tokens: 8}}
environments: [{{use: arithmetic}}]
loggers: []
"""


def test_whet_check_names_a_wrong_argument_or_the_missing_engine(tmp_path: Path, tiny_model_folder: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(RECIPE.format(folder=tmp_path / "run", model=tiny_model_folder))
    command = [sys.executable, "-m", "whet.cli", "check", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if installed_arguments():
        assert done.returncode == 1
        wanted = "generator.engine.block_sise: is no argument of the installed vLLM (did you mean 'block_size'?)"
        assert wanted in done.stderr.replace("\n", " ")
    else:
        assert (
            "This interpreter has no vLLM; that of the generator needs it: pip install 'whet-vllm[gpu]'" in done.stdout
        )
