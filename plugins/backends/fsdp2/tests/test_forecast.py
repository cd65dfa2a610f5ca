"""Predicted memory of a rank: traces against counted parameters, other traces, and what a worker measures."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import attrs
import pytest

from whet.config.structure import structure
from whet.data.model_info import ModelInfo
from whet_fsdp2 import attention
from whet_fsdp2.config import Fsdp2Config, memory, sizes
from whet_fsdp2.forecast import formulas, savings
from whet_fsdp2.trace import trace
from whet_memory.case import Case
from whet_memory.timelines import peak
from whet_memory.tracing import traced
from whet_training.lora_config import LoraConfig, adapter_parameters

SHAPE: dict[str, Any] = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": 256, "intermediate_size": 768,
    "num_hidden_layers": 7, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 4000,
    "max_position_embeddings": 4096, "tie_word_embeddings": False,
}  # fmt: skip
MOE = {
    **SHAPE, "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8,
    "num_experts_per_tok": 2, "moe_intermediate_size": 128, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip


def case(
    ranks: int = 1, dtype: str = "float32", config: dict[str, Any] = SHAPE, tokens: int = 512, **section: Any
) -> Case:
    made = structure(section, Fsdp2Config, None)
    return Case(attrs.asdict(made), ModelInfo("", config, dtype), sizes(made, ranks), tokens=tokens, longest=256)


def sizes_of(config: dict[str, Any], head: str = "lm") -> list[int]:
    """Return the numbers of values of the parameters that transformers builds."""
    import torch
    import transformers

    kind = transformers.AutoModelForSequenceClassification if head == "value" else transformers.AutoModelForCausalLM
    with torch.device("meta"):
        model = kind.from_config(transformers.AutoConfig.for_model(**config, num_labels=1))
    return [parameter.numel() for parameter in model.parameters()]


def counted(config: dict[str, Any], head: str = "lm") -> int:
    """Return the number of parameters that transformers builds."""
    return sum(sizes_of(config, head))


@pytest.mark.parametrize(("dtype", "number"), [("float32", 4), ("bfloat16", 2)])
@pytest.mark.parametrize("config", [SHAPE, MOE, {**MOE, "vocab_size": 400}], ids=["dense", "vocabulary", "experts"])
def test_ranks_gather_the_largest_tensor_to_send_it(config: dict[str, Any], dtype: str, number: int) -> None:
    peaks = formulas(case(2, dtype, config))
    assert peaks["weight_sync"].device - peaks["idle"].device == number * max(sizes_of(config))


@pytest.mark.parametrize("config", [SHAPE, MOE])
def test_weights_and_moments_of_all_layers_are_12_bytes_a_parameter(config: dict[str, Any]) -> None:
    found = traced(trace, case(config=config))
    assert found["idle"] == pytest.approx(12 * counted(config), rel=0.01)
    assert found["optimizer"] == pytest.approx(16 * counted(config), rel=0.01), "gradients as well"


@pytest.mark.parametrize("head", ["lm", "value"])
@pytest.mark.parametrize("tied", [True, False])
def test_the_plan_counts_the_head_that_is_there(tied: bool, head: str) -> None:
    model = ModelInfo("", {**SHAPE, "tie_word_embeddings": tied})
    made = structure({"head": head}, Fsdp2Config, None)
    held = sum(term.bytes for term in memory(made, model, 1, True) if term.when == "working")
    real = 16 * counted({**model.config}, head)
    assert 0.99 * real < held <= real


@pytest.mark.parametrize(("ranks", "parallel"), [(1, {}), (2, {}), (2, {"tensor": 2}), (4, {"tensor": 2})], ids=str)
def test_a_tied_embedding_is_held_once_however_ranks_share_it(ranks: int, parallel: dict[str, int]) -> None:
    both = traced(trace, case(ranks, parallel=parallel))
    tied = traced(trace, case(ranks, config={**SHAPE, "tie_word_embeddings": True}, parallel=parallel))
    embedding = SHAPE["vocab_size"] * SHAPE["hidden_size"]
    assert both["idle"] - tied["idle"] == pytest.approx(12 * embedding / ranks, rel=0.001)


@pytest.mark.parametrize(
    ("config", "ranks", "parallel", "copies"),
    [
        (SHAPE, 2, {"tensor": 2}, 1),
        (SHAPE, 4, {"tensor": 2}, 1),
        (SHAPE, 2, {"context": 2}, 1),
        (SHAPE, 2, {"replicate": 2}, 2),
        (SHAPE, 4, {"replicate": 2}, 2),
        (MOE, 2, {"expert": 2}, 1),
        (MOE, 2, {"expert": 2, "tensor": 2}, 1),
    ],
)
def test_every_layout_shares_out_the_weights_of_a_copy(
    config: dict[str, Any], ranks: int, parallel: dict[str, int], copies: int
) -> None:
    found = traced(trace, case(ranks, config=config, parallel=parallel))
    assert found["idle"] == pytest.approx(12 * counted(config) * copies / ranks, rel=0.01)


def test_tensor_parallel_ranks_hold_halves_of_copies_in_bfloat16() -> None:
    found = traced(trace, case(2, dtype="bfloat16", parallel={"tensor": 2}))
    assert found["idle"] == pytest.approx(14 * counted(SHAPE) / 2, rel=0.01)


def test_context_parallel_ranks_hold_the_activations_of_their_pieces_of_a_row() -> None:
    whole = traced(trace, case(2, tokens=512))
    shared = traced(trace, case(2, tokens=1024, parallel={"context": 2}))
    assert shared["backward"] == pytest.approx(whole["backward"], rel=0.05)


def test_experts_of_two_ranks_get_the_tokens_of_two_ranks_evenly() -> None:
    apart = traced(trace, case(2, config=MOE, parallel={"expert": 2}, tokens=4096))
    whole = traced(trace, case(2, config=MOE, tokens=4096))
    assert apart["backward"] == pytest.approx(whole["backward"], rel=0.1)


@pytest.mark.parametrize(("config", "experts"), [(SHAPE, False), (MOE, False), (MOE, True)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_adapter_is_held_beside_frozen_weights(config: dict[str, Any], experts: bool, dtype: str) -> None:
    lora = {"rank": 8, "experts": experts}
    found, size = traced(trace, case(dtype=dtype, config=config, lora=lora)), 2 if dtype == "bfloat16" else 4
    adapter = adapter_parameters(LoraConfig(**lora), ModelInfo("", config))
    assert found["idle"] == pytest.approx(size * counted(config) + 12 * adapter, rel=0.01)
    assert found["optimizer"] == pytest.approx(size * counted(config) + 16 * adapter, rel=0.05)


@pytest.mark.parametrize("section", [{}, {"gradient_checkpointing": True}, {"lora": {"rank": 8}}])
@pytest.mark.parametrize("ranks", [1, 2])
def test_few_layers_predict_what_a_trace_of_all_layers_finds(section: dict[str, Any], ranks: int) -> None:
    whole = {phase: peak(line) for phase, line in trace(case(ranks, **section)).items()}
    assert traced(trace, case(ranks, **section)) == pytest.approx(whole, rel=0.02)


def test_on_a_gpu_attention_is_traced_as_the_kernel_that_computes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    real = attention.attend_varlen
    monkeypatch.setattr(attention, "attend_varlen", lambda *arguments: [real(*arguments), calls.append(1)][0])
    for dtype, layers in (("bfloat16", 2), ("float32", 0)):
        calls.clear()
        one = attrs.evolve(case(dtype=dtype, config={**SHAPE, "num_hidden_layers": 2}), device="gpu")
        found = trace(one)
        assert peak(found["backward"]) > peak(found["idle"])
        assert len(calls) == layers


def test_a_trace_leaves_no_process_group() -> None:
    import torch.distributed as dist

    trace(case(2))
    assert not dist.is_initialized(), "processes forked later would take it for their own"


def test_ranks_share_out_weights_and_checkpointing_keeps_fewer_activations() -> None:
    one, two = traced(trace, case()), traced(trace, case(2))
    assert two["idle"] == pytest.approx(one["idle"] / 2, rel=0.02)
    less = traced(trace, case(gradient_checkpointing=True, tokens=4096))
    assert less["backward"] < 0.7 * traced(trace, case(tokens=4096))["backward"]


@pytest.mark.parametrize(("config", "device"), [(SHAPE, "cpu"), (SHAPE, "gpu"), (MOE, "cpu")])
def test_selective_checkpointing_keeps_less_than_none_and_more_than_full(config: dict[str, Any], device: Any) -> None:
    kinds, dtype = (False, "selective", True), "bfloat16" if device == "gpu" else "float32"
    cases = [case(dtype=dtype, config=config, tokens=4096, gradient_checkpointing=kind) for kind in kinds]
    none, some, least = (traced(trace, attrs.evolve(one, device=device))["backward"] for one in cases)
    assert least < 0.95 * some
    assert some < 0.85 * none


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_teacher_of_another_shape_holds_its_own_weights(ranks: int) -> None:
    shape = {**SHAPE, "hidden_size": 512, "num_hidden_layers": 11}
    outputs, teacher = ("kl_forward", "logprobs"), ModelInfo("", shape)
    alone = traced(trace, case(ranks))
    taught = traced(trace, attrs.evolve(case(ranks, teacher="made-up"), outputs=outputs, teacher=teacher))
    head = 4 * shape["vocab_size"] * shape["hidden_size"] * (ranks > 1)  # FSDP2 keeps what a root has gathered
    assert taught["idle"] - alone["idle"] - head == pytest.approx(4 * counted(shape) / ranks, rel=0.01)
    assert taught["backward"] - alone["backward"] >= 4 * counted(shape) / ranks


def test_a_model_is_traced_that_scores_the_likeliest_tokens() -> None:
    few, many = (
        attrs.evolve(case(), trained=False, outputs=(f"topk_ids:{k}", f"topk_logprobs:{k}")) for k in (8, 64)
    )  # fmt: skip
    assert traced(trace, few)["score"] < traced(trace, many)["score"]


def test_a_frozen_model_holds_its_weights_alone() -> None:
    frozen = attrs.evolve(case(), trained=False)
    found = traced(trace, frozen)
    assert found["idle"] == pytest.approx(4 * counted(SHAPE), rel=0.01)
    assert set(found) == {"score", "idle"}


@pytest.mark.parametrize("section", [{"gradient_checkpointing": kind} for kind in (False, "selective", True)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_formulas_come_near_a_trace(section: dict[str, Any], dtype: str) -> None:
    one = case(dtype=dtype, tokens=4096, **section)
    found, closed = traced(trace, one), formulas(one)
    assert closed["train"].device == pytest.approx(max(found["forward"], found["backward"]), rel=0.4)
    assert closed["optimizer"].device == pytest.approx(found["optimizer"], rel=0.05)
    assert closed["idle"].device == pytest.approx(found["idle"], rel=0.05)


def test_an_offloaded_optimizer_leaves_the_gpu_its_weights_gradients_and_one_part_of_the_state() -> None:
    large = {**SHAPE, "num_hidden_layers": 200}
    gpu = attrs.evolve(case(dtype="bfloat16", config=large, offload_optimizer=True), device="gpu")
    found, count = formulas(gpu), counted(large)
    assert found["idle"].device == pytest.approx(2 * count, rel=0.01)
    assert found["optimizer"].device == pytest.approx(6 * count + 12 * 64 * 2**20, rel=0.01)
    assert found["train"].device < formulas(attrs.evolve(gpu, settings=case().settings))["train"].device - 11 * count


def test_every_saving_lowers_the_trace_or_leaves_it_and_none_is_already_set() -> None:
    one = case(tokens=4096)
    before = max(traced(trace, one).values())
    for saving in savings(one):
        key, _, inner = saving.key.partition(".")
        assert one.settings[key] != saving.value
        fewer = saving.value if key == "micro_batch_tokens" else one.tokens
        value = {inner: saving.value} if inner else saving.value
        after = attrs.evolve(one, settings={**one.settings, key: value}, tokens=min(fewer, one.tokens))
        assert max(traced(trace, after).values()) <= before


def test_a_case_travels_as_json_and_leaves_the_folder_behind() -> None:
    one = attrs.evolve(case(2), model=ModelInfo("/home/me/model", SHAPE, "bfloat16"))
    back = Case.from_json(json.loads(json.dumps(one.to_json())))
    assert back == attrs.evolve(one, model=attrs.evolve(one.model, path=""), settings=back.settings)


PROCESS = 48 << 20
"""Bytes that libraries, the allocator and copies within an operation take at the most; a moment has 90 MiB."""


@pytest.mark.slow
def test_workers_measure_what_was_predicted() -> None:
    """Models of 17 to 28 million parameters: peaks of 120 to 470 MiB. One process imports for all workers."""
    file = Path(__file__).parents[4] / "benchmarks" / "memory_prediction.py"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, file, "--small", "--json"], env=environment, check=True, capture_output=True, text=True
    )
    rows = json.loads(done.stdout.splitlines()[-1])
    assert {(ranks, phase) for _, ranks, phase, _, _ in rows} == {
        (ranks, phase) for ranks in (1, 2) for phase in ("train", "optimizer")
    }
    assert any("LoRA" in name for name, *_ in rows)
    assert any("moe" in name for name, *_ in rows)
    for name, _, phase, predicted, measured in rows:
        assert predicted < measured + 0.01 * predicted, (name, phase, "more was predicted than a worker needs")
        assert measured - predicted < PROCESS, (name, phase)
        if phase == "train":
            assert measured == pytest.approx(predicted, rel=0.1), name
