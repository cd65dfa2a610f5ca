import math
import subprocess
import sys

import attrs
import pytest

from whet.config.structure import structure
from whet.data.model_info import ModelInfo
from whet.errors import ConfigError
from whet_fsdp2.config import Fsdp2Config, facts

MODEL = ModelInfo(
    "model",
    {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 384, "vocab_size": 378},
)


def held(config, model, ranks=1, trained=True):
    """Add up what a rank on a CPU holds while it works."""
    terms = facts(config, model).memory(ranks, trained)
    return sum(term.bytes for term in terms if term.when == "working")


def test_the_memory_of_adam_in_float32_is_16_bytes_a_parameter():
    assert held(Fsdp2Config(), MODEL) == 16 * MODEL.parameters
    assert held(Fsdp2Config(reference=True), MODEL) == 20 * MODEL.parameters


def test_a_frozen_model_has_no_gradients_and_no_optimizer():
    assert held(Fsdp2Config(), MODEL, trained=False) == 4 * MODEL.parameters
    assert held(Fsdp2Config(), attrs.evolve(MODEL, dtype="bfloat16"), trained=False) == 2 * MODEL.parameters


def test_bfloat16_adds_its_copies():
    low = attrs.evolve(MODEL, dtype="bfloat16")
    assert held(Fsdp2Config(reference=True), low) == 20 * MODEL.parameters


def test_ranks_share_out_all_but_the_weights_that_they_gather_to_compute():
    gathered = 4 * (MODEL.outer_parameters + MODEL.layer_parameters)
    assert held(Fsdp2Config(), MODEL, ranks=4) == 4 * MODEL.parameters + gathered
    keeping = Fsdp2Config(reshard_after_forward=False)
    assert held(keeping, MODEL, ranks=4) == 4 * MODEL.parameters + 4 * MODEL.parameters


def test_what_is_predicted_of_a_rank_lies_just_below_what_a_trace_of_it_found():
    """Traced under FakeTensorMode on rank 0 of 8, Qwen2-7B's shape, 4096 tokens with checkpointing: the peak of a step.

    Float32 masters, computing in bfloat16: 17,987 MiB; in float32: 21,862 MiB.
    """
    shape = {
        "model_type": "qwen2", "tie_word_embeddings": False,
        "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
        "intermediate_size": 18944, "vocab_size": 152064,
    }  # fmt: skip
    for dtype, traced in (("bfloat16", 17_987), ("float32", 21_862)):
        predicted = held(Fsdp2Config(), ModelInfo("qwen", shape, dtype), ranks=8) / 2**20
        assert 0.85 * traced < predicted < traced, (dtype, predicted)


def test_every_rank_loads_the_whole_model_before_it_is_shared_out():
    def loading(stored):
        model = attrs.evolve(MODEL, config={**MODEL.config, "torch_dtype": stored})
        return {t.place: t.bytes for t in facts(Fsdp2Config(), model).memory(8, True) if t.when == "loading"}

    assert loading("bfloat16") == {"host": 4 * MODEL.parameters, "gpu": 4 * MODEL.parameters}
    assert loading("float32") == {"gpu": 4 * MODEL.parameters}, "the file is mapped"


def test_the_reference_is_given_where_a_copy_is_held():
    assert facts(Fsdp2Config(), MODEL).weights_given == {"policy"}
    assert facts(Fsdp2Config(reference=True), MODEL).weights_given == {"policy", "reference"}


def test_a_model_of_unknown_size_has_no_estimate():
    assert facts(Fsdp2Config(), ModelInfo("model", {})).memory is None


def test_hooks_and_facts_import_no_torch():
    code = "import sys, whet_fsdp2.hooks, whet_fsdp2.config, whet_fsdp2.backend; print('torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"


@pytest.mark.parametrize(
    "change",
    [
        {"micro_batch_tokens": 0},
        {"max_grad_norm": -1.0},
        {"logprob_chunk": -1},
        {"optimizer": {"lr": 0.0}},
        {"optimizer": {"lr": math.inf}},
        {"optimizer": {"weight_decay": math.inf}},
        {"optimizer": {"weight_decay": -1.0}},
        {"optimizer": {"betas": [0.9, 1.0]}},
        {"schedule": {"warmup_steps": -5}},
        {"schedule": {"min_ratio": 1.5}},
    ],
    ids=str,
)
def test_numbers_that_cannot_be_meant_are_refused_in_every_section_that_holds_the_backend(change):
    with pytest.raises(ConfigError):
        structure(change, Fsdp2Config, None)
