"""The plugin registers, plans and checks its section without SGLang, and says what is missing."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from whet.model import read_model
from whet.named_environments import recipe_of
from whet.testing.contracts.component import ComponentContract
from whet.testing.models import make_model
from whet.testing.site import make_site
from whet_sglang.arguments import PASSTHROUGH, cache_tokens, engine_arguments, installed_arguments
from whet_sglang.config import SglangConfig
from whet_sglang.facts import facts


class TestPlugin(ComponentContract):
    hooks = "whet_sglang.hooks"


def test_memory_counts_weights_and_cache(tmp_path: Path, tiny_tokenizer: object) -> None:
    model = read_model(make_model(tmp_path, tiny_tokenizer), "bfloat16")
    assert facts(SglangConfig(cache_gib=0.5), model).memory_bytes == 2 * model.parameters + 2**29
    assert facts(SglangConfig(dtype="float32"), model).memory_bytes == 4 * model.parameters + 2**30
    assert facts(SglangConfig(), evolve(model, config={})).memory_bytes is None


@pytest.mark.parametrize(
    "wrong",
    [{"max_batch": 0}, {"cache_gib": 0.0}, {"memory_fraction": 1.5}, {"tensor_parallel": 0}, {"max_context": -1}],
)
def test_settings_that_leave_no_room_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        SglangConfig(**wrong)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("chunked_prefill_sise", "is no argument of the installed SGLang (did you mean 'chunked_prefill_size'?)"),
        ("tp_size", "is set by `generator.tensor_parallel`; write it there"),
        ("weight_version", "cannot be changed: it says which weights made a token"),
    ],
)
def test_an_argument_that_cannot_be_passed_on_is_named(name: str, message: str) -> None:
    ((found, said),) = PASSTHROUGH.wrong({name: 1, "page_size": 1}, {"chunked_prefill_size", "page_size"})
    assert (found, said) == (name, message)


def test_all_that_this_plugin_sets_or_forbids_are_arguments_of_the_installed_engine(
    tmp_path: Path, tiny_model_folder: Path
) -> None:
    if not installed_arguments():
        pytest.skip("SGLang is not installed")
    site = make_site(tmp_path, "generator", tiny_model_folder)
    ours = {name for device in ("cpu", "cuda") for name in engine_arguments(SglangConfig(), site, device)}
    assert ours | set(PASSTHROUGH.ours) | set(PASSTHROUGH.fixed) <= installed_arguments()


def test_arguments_are_those_of_the_config_the_model_and_the_run(tmp_path: Path, tiny_model_folder: Path) -> None:
    site = make_site(tmp_path, "generator", tiny_model_folder, seed=7, max_context=100)
    found = engine_arguments(SglangConfig(max_batch=8, engine={"page_size": 4}), site, "cpu")
    assert found["model_path"] == str(tiny_model_folder)
    assert (found["random_seed"], found["context_length"], found["max_running_requests"]) == (7, 106, 8)
    assert (found["page_size"], found["dtype"], found["skip_tokenizer_init"]) == (4, "float32", False)
    assert (found["disable_cuda_graph"], found["enable_memory_saver"]) == (True, False)
    on_gpu = engine_arguments(SglangConfig(memory_fraction=0.5, prefix_caching=False), site, "cuda")
    assert (on_gpu["mem_fraction_static"], on_gpu["disable_cuda_graph"], on_gpu["enable_memory_saver"]) == (
        0.5,
        False,
        True,
    )
    assert on_gpu["disable_radix_cache"]
    assert not {"max_total_tokens", "attention_backend", "max_running_requests"} & set(on_gpu)


def test_the_context_is_never_longer_than_the_model_was_made_for(tmp_path: Path, tiny_model_folder: Path) -> None:
    site = make_site(tmp_path, "generator", tiny_model_folder)
    assert engine_arguments(SglangConfig(), site, "cpu")["context_length"] == 256
    assert engine_arguments(SglangConfig(max_context=253), site, "cpu")["context_length"] == 256
    assert engine_arguments(SglangConfig(max_context=64), site, "cpu")["context_length"] == 70


def test_a_cache_is_said_in_tokens(tiny_model_folder: Path) -> None:
    model = read_model(tiny_model_folder, "bfloat16")
    assert cache_tokens(SglangConfig(cache_gib=1.0), model, False) == 2**30 // (model.token_cache_bytes // 2)
    assert cache_tokens(SglangConfig(dtype="float32"), model, True) == 2**30 // model.token_cache_bytes
    assert cache_tokens(SglangConfig(), model, False) is None


def test_an_environment_for_it_gets_the_engine() -> None:
    assert recipe_of("whet-sglang").install == ("sglang==0.5.23",)


RECIPE = """
run: {{folder: {folder}, steps: 1}}
model: {{path: {model}}}
algorithm: {{use: grpo}}
backend: {{use: fsdp2}}
generator: {{use: sglang, engine: {{page_sise: 4}}}}
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
        wanted = "generator.engine.page_sise: is no argument of the installed SGLang (did you mean 'page_size'?)"
        assert (done.returncode, wanted in done.stderr.replace("\n", " ")) == (1, True)
    else:
        wanted = "This interpreter has no SGLang; that of the generator needs it: pip install 'whet-sglang[gpu]'"
        assert (done.returncode, wanted in " ".join(done.stdout.split())) == (0, True), done.stdout + done.stderr
