import json
import math
import subprocess
import sys
from types import SimpleNamespace

import attrs
import pytest

from whet.config.structure import structure
from whet.data.model_info import ModelInfo
from whet.errors import ConfigError
from whet_fsdp2.checks import problems
from whet_fsdp2.config import Fsdp2Config, OptimizerConfig, facts
from whet_fsdp2.hooks import whet_check_config

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


def test_moments_of_8_bits_are_2_bytes_a_parameter_and_their_scales():
    optimizer = OptimizerConfig("adamw_8bit")
    assert held(Fsdp2Config(optimizer=optimizer), MODEL) == pytest.approx(10 * MODEL.parameters, rel=0.005)


@pytest.mark.parametrize(("dtype", "ranks", "on_host"), [("float32", 1, 8), ("bfloat16", 1, 12), ("bfloat16", 4, 8)])
def test_an_offloaded_optimizer_is_planned_in_the_hosts_memory(dtype, ranks, on_host):
    model = attrs.evolve(MODEL, dtype=dtype)
    terms = list(facts(Fsdp2Config(offload_optimizer=True), model).memory(ranks, True))
    host = sum(term.bytes for term in terms if term.when == "working" and term.place == "host")
    assert host == pytest.approx(on_host * MODEL.parameters / ranks, rel=1e-3)
    assert held(Fsdp2Config(offload_optimizer=True), model, ranks) == held(Fsdp2Config(), model, ranks)


def test_muon_holds_one_moment_of_the_layers_and_adamw_two_of_the_rest():
    inside = MODEL.parameters - MODEL.outer_parameters
    for ranks in (1, 4):
        terms = list(facts(Fsdp2Config(optimizer=OptimizerConfig("muon")), MODEL).memory(ranks, True))
        moments = {t.what.partition(",")[0]: t.bytes for t in terms if "Muon" in t.what or "AdamW" in t.what}
        assert moments == {
            "Muon's momentum in float32": 4 * inside // ranks,
            "AdamW's two moments of the other weights in float32": 8 * MODEL.outer_parameters // ranks,
        }


def test_a_teacher_that_is_not_there_or_has_another_vocabulary_is_refused_by_its_key(tmp_path):
    def teaching(teacher, **changes):
        (tmp_path / "config.json").write_text(json.dumps({**MODEL.config, **changes}))
        return [str(problem) for problem in facts(Fsdp2Config(teacher=str(teacher)), MODEL).problems(1)]

    assert teaching(tmp_path) == []
    (missing,) = teaching(tmp_path / "no")
    assert missing.startswith("teacher: there is no folder '/")
    (other,) = teaching(tmp_path, vocab_size=400)
    assert "has a vocabulary of 400 tokens, the model that is trained 378; they must share one" in other
    assert facts(Fsdp2Config(teacher=str(tmp_path)), MODEL).forecast.teacher is None
    teaching(tmp_path, hidden_size=256)
    assert facts(Fsdp2Config(teacher=str(tmp_path)), MODEL).forecast.teacher.config["hidden_size"] == 256


def test_a_reward_model_is_no_language_model():
    scorer = attrs.evolve(MODEL, config={**MODEL.config, "architectures": ["Qwen3ForSequenceClassification"]})
    (problem,) = facts(Fsdp2Config(), scorer).problems(1)
    assert str(problem).startswith("head: is lm, and the model in model is a Qwen3ForSequenceClassification")
    assert not list(facts(Fsdp2Config(head="value"), scorer).problems(1))


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


def test_every_rank_loads_its_own_share():
    def loading(stored):
        model = attrs.evolve(MODEL, config={**MODEL.config, "torch_dtype": stored})
        return {t.place: t.bytes for t in facts(Fsdp2Config(), model).memory(8, True) if t.when == "loading"}

    share = 4 * MODEL.parameters // 8
    assert loading("bfloat16") == {"host": share, "gpu": share}
    assert loading("float32") == {"gpu": share}, "the file is mapped"


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
        {"schedule": {"decay_ratio": 0.0}},
        {"schedule": {"decay": "cubic"}},
        {"optimizer": {"kind": "sgd"}},
        {"optimizer": {"muon": {"lr": 0.0}}},
        {"optimizer": {"muon": {"momentum": 1.0}}},
        {"optimizer": {"muon": {"iterations": 0}}},
        {"optimizer": {"muon": {"coefficients": [1.0, 2.0]}}},
        {"optimizer": {"muon": {"coefficients": [1.0, 2.0, math.nan]}}},
        {"optimizer": {"groups": [{"match": ""}]}},
        {"optimizer": {"groups": [{"match": "mlp", "lr": 0.0}]}},
        {"optimizer": {"groups": [{"match": "mlp", "lr_factor": -1.0}]}},
        {"optimizer": {"groups": [{"match": "mlp", "weight_decay": -1.0}]}},
        {"optimizer": {"groups": [{"lr": 1.0}]}},
    ],
    ids=str,
)
def test_numbers_that_cannot_be_meant_are_refused_in_every_section_that_holds_the_backend(change):
    with pytest.raises(ConfigError):
        structure(change, Fsdp2Config, None)


WRONG = {
    "schedule.warmup_ratio": {"schedule": {"warmup_ratio": 0.1, "warmup_steps": 5}},
    "schedule.decay_ratio": {"schedule": {"kind": "cosine", "decay_ratio": 0.2}},
    "schedule.decay": {"schedule": {"decay": "1-sqrt"}},
    "optimizer.muon.lr": {"optimizer": {"muon": {"lr": 0.02}}},
    "optimizer.muon.iteration_dtype": {"optimizer": {"muon": {"iteration_dtype": "float32"}}},
    "compile": {"compile": True, "parallel": {"tensor": 2}},
    "optimizer.groups.0.match": {"optimizer": {"groups": [{"match": "layers.(0"}]}},
    "optimizer.groups.1.lr_factor": {
        "optimizer": {"groups": [{"match": "mlp"}, {"match": "norm", "lr": 1e-4, "lr_factor": 2.0}]}
    },
}


@pytest.mark.parametrize("key", WRONG)
def test_settings_that_contradict_each_other_are_problems_of_their_key(key):
    (problem,) = problems(structure(WRONG[key], Fsdp2Config, None), "backend")
    assert problem.path == f"backend.{key}"


@pytest.mark.parametrize(
    "other", [{"lora": {"rank": 4}}, {"gradient_checkpointing": "selective"}, {"kernels": ["liger"]}], ids=str
)
def test_what_compiled_layers_do_not_go_with_is_named(other):
    (problem,) = problems(structure({"compile": True, **other}, Fsdp2Config, None), "backend")
    assert f"does not go with {next(iter(other))}: " in str(problem)


def test_settings_that_fit_are_no_problems():
    muon = {
        "kind": "muon", "muon": {"lr": 0.02, "scale": "original"}, "groups": [{"match": "embed", "lr_factor": 0.1}]
    }  # fmt: skip
    schedule = {"kind": "wsd", "decay_ratio": 0.2, "decay": "1-sqrt", "warmup_ratio": 0.1}
    assert not list(problems(structure({"optimizer": muon, "schedule": schedule}, Fsdp2Config, None), "backend"))


def test_the_sections_of_roles_are_checked_as_well():
    wrong, right = (structure(section, Fsdp2Config, None) for section in (WRONG["optimizer.muon.lr"], {}))
    roles = {"critic": SimpleNamespace(component=SimpleNamespace(config=wrong))}
    config = SimpleNamespace(backend=SimpleNamespace(config=right), roles=roles)
    (problem,) = whet_check_config(config)
    assert str(problem).startswith("roles.critic.optimizer.muon.lr")
