import subprocess
import sys

import attrs
import pytest

from whet.model import ModelInfo
from whet_fsdp2.config import Fsdp2Config, facts

MODEL = ModelInfo(
    "model",
    {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 384, "vocab_size": 378},
)


def test_the_memory_of_adam_in_float32_is_16_bytes_a_parameter():
    assert facts(Fsdp2Config(), MODEL).memory_bytes == 16 * MODEL.parameters
    assert facts(Fsdp2Config(reference=True), MODEL).memory_bytes == 20 * MODEL.parameters


def test_bfloat16_adds_its_copies():
    low = attrs.evolve(MODEL, dtype="bfloat16")
    assert facts(Fsdp2Config(reference=True), low).memory_bytes == 20 * MODEL.parameters


def test_the_reference_is_given_where_a_copy_is_held():
    assert facts(Fsdp2Config(), MODEL).weights_given == {"policy"}
    assert facts(Fsdp2Config(reference=True), MODEL).weights_given == {"policy", "reference"}


def test_a_model_of_unknown_size_has_no_estimate():
    assert facts(Fsdp2Config(), ModelInfo("model", {})).memory_bytes is None


def test_hooks_and_facts_import_no_torch():
    code = "import sys, whet_fsdp2.hooks, whet_fsdp2.config, whet_fsdp2.backend; print('torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"micro_batch_tokens": 0}, "backend.micro_batch_tokens"),
        ({"max_grad_norm": -1.0}, "backend.max_grad_norm"),
        ({"logprob_chunk": -1}, "backend.logprob_chunk"),
    ],
)
def test_numbers_that_cannot_be_meant_are_problems(change, path):
    from types import SimpleNamespace

    from whet_fsdp2.hooks import whet_check_config

    config = SimpleNamespace(backend=SimpleNamespace(config=Fsdp2Config(**change)))
    assert [problem.path for problem in whet_check_config(config)] == [path]
    config.backend.config = Fsdp2Config()
    assert list(whet_check_config(config)) == []
