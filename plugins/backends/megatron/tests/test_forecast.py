"""Predicted memory of a rank: formulas against tensors that live during a step, and what workers measure."""

import json
import os
import subprocess
import sys
from pathlib import Path

import attrs
import numpy as np
import pytest

from whet.component import Spec
from whet.config.structure import structure
from whet.data.batch import from_sequences
from whet.data.model_info import ModelInfo, read_model
from whet.interfaces.workers import WorkerRank
from whet_megatron.config import MegatronConfig, facts
from whet_megatron.forecast import PROCESS_BYTES, Stage, formulas, in_flight, savings, sizes_of
from whet_megatron.memory import held
from whet_memory import live_bytes
from whet_memory.case import Case
from whet_training.lora_config import LoraConfig, adapter_parameters

LLAMA = {
    "model_type": "llama", "hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 4, "head_dim": 32,
    "num_attention_heads": 6, "num_key_value_heads": 2, "vocab_size": 4000, "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
}  # fmt: skip
QWEN3 = {**LLAMA, "model_type": "qwen3"}
MIXED = {
    **QWEN3, "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 160,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True,
}  # fmt: skip
LONGEST = 256


def case(config=LLAMA, ranks=1, dtype="float32", tokens=1024, device="cpu", passes=0, trained=True, **section):
    made = structure(section, MegatronConfig, None)
    sizes, info = sizes_of(made, ranks), ModelInfo("", config, dtype)
    return Case(attrs.asdict(made), info, sizes, trained, device, tokens, LONGEST, passes)


def stage_of(one):
    from whet_megatron.architecture import read

    return Stage(one, structure(dict(one.settings), MegatronConfig, None), read(one.model))


def peaks(one, phase="train"):
    """Return the peak of each stage, without what a process takes."""
    found = [formulas(attrs.evolve(one, stage=stage))[phase].device for stage in range(one.sizes.pipeline)]
    return [size - PROCESS_BYTES * (one.device == "cpu") for size in found]


def lived(one, folder, monkeypatch):
    """Return the bytes of tensors that live in each phase of the second step of a worker in this process."""
    import torch
    import transformers

    from whet_megatron.worker import Worker

    settings = transformers.AutoConfig.for_model(**one.model.config)
    transformers.AutoModelForCausalLM.from_config(settings, dtype=torch.float32).save_pretrained(folder / "model")
    monkeypatch.setattr(live_bytes, "_VALUE", None)  # these tensors are real: what is read from them is a number
    rows = [
        {"tokens": np.arange(LONGEST + 1), "loss_mask": np.arange(LONGEST + 1) > 0}
        for _ in range(one.tokens // LONGEST)
    ]
    batch = from_sequences(rows, prompt_lengths=[1] * len(rows))
    batch = batch.with_columns(advantages=np.ones(batch.sequences, np.float32))
    loss = Spec(f"whet_testing.losses:{'Regression' if one.settings['head'] == 'value' else 'Weighted'}")
    live = live_bytes.LiveBytes()
    with live:
        worker = Worker(
            rank=WorkerRank("backend", 0, 1, threads=1),
            config={**one.settings, "micro_batch_tokens": one.tokens},
            model=read_model(folder / "model", one.model.dtype),
            scratch=str(folder),
        )
        monkeypatch.setattr(worker._memory, "phase", live.phase)
        try:
            worker.train(batch, loss)
            live.forget()
            worker.train(batch, loss)
        finally:
            worker.close()
    return {phase: max(size for _, size in line) for phase, line in live.timelines.items()}


@pytest.mark.parametrize(
    "one",
    [
        case(),
        case({**QWEN3, "tie_word_embeddings": True}, dtype="bfloat16"),
        case(tokens=2048, gradient_checkpointing=True),
        case(QWEN3, gradient_checkpointing="selective", logprob_chunk=300),
        case(MIXED),
        case({**LLAMA, "vocab_size": 30_000, "num_hidden_layers": 1}, dtype="bfloat16", logprob_chunk=400),
        case(optimizer={"distributed": False}, head="value"),
        case(lora={"rank": 16}),
        case(QWEN3, dtype="bfloat16", lora={"rank": 64, "targets": ["q_proj", "v_proj"]}),
        case(MIXED, lora={"rank": 8}),
        case(MIXED, lora={"rank": 16, "experts": True}),
        case(MIXED, dtype="bfloat16", grouped_experts=True, lora={"rank": 32, "experts": True}),
    ],
    ids=["llama", "tied in bfloat16", "checkpointing", "selective, chunks", "experts", "large head", "value",
         "adapters", "few adapters in bfloat16", "adapters beside experts",
         "adapters of experts", "adapters of grouped experts in bfloat16"],
)  # fmt: skip
def test_formulas_count_the_tensors_that_live_in_a_step(one, tmp_path, monkeypatch):
    found, settings = lived(one, tmp_path, monkeypatch), {**one.settings, "layers": "test"}
    expected = formulas(attrs.evolve(one, settings=settings, device="gpu"))  # without the copies that gloo makes
    assert expected["train"].device == pytest.approx(found["train"], rel=0.04)
    assert expected["optimizer"].device == pytest.approx(found["optimizer"], rel=0.04)


def test_a_stage_keeps_as_many_passes_as_there_are_stages_from_it_on():
    four = case(ranks=4, parallel={"pipeline": 4})
    flights = [in_flight(stage_of(attrs.evolve(four, stage=stage))) for stage in range(4)]
    assert flights == [4, 3, 2, 1]
    assert in_flight(stage_of(attrs.evolve(four, passes=2))) == 2, "no more than a step has"
    runs = case({**LLAMA, "num_hidden_layers": 8}, 4, parallel={"pipeline": 4, "virtual": 2})
    # Megatron's schedule: warm-up of 2 (P - p - 1) + (v - 1) P runs, and one more
    assert [in_flight(stage_of(attrs.evolve(runs, stage=stage))) for stage in range(4)] == [11, 9, 7, 5]


def test_stages_differ_by_embedding_head_and_passes_in_flight():
    many = case({**LLAMA, "vocab_size": 384, "num_hidden_layers": 8}, 4, tokens=8192, parallel={"pipeline": 4})
    whole = peaks(many)
    assert whole[0] > whole[1] > whole[2], "activations of more passes"
    large = case({**LLAMA, "vocab_size": 64_000}, 4, tokens=256, parallel={"pipeline": 4})
    ends = peaks(large, "idle")
    assert ends[0] == pytest.approx(ends[3], rel=1e-3)
    assert ends[1] == ends[2] < 0.4 * ends[0]
    assert peaks(large)[3] > peaks(large)[0], "logits"


def test_parameters_of_all_stages_are_those_that_transformers_builds():
    import torch
    import transformers

    for config in (LLAMA, {**QWEN3, "tie_word_embeddings": True}, MIXED, {**LLAMA, "model_type": "qwen2"}):
        with torch.device("meta"):
            built = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config))
        counted = sum(parameter.numel() for parameter in built.parameters())
        for pipeline in (1, 2, 4):
            stage = stage_of(case(config, pipeline, parallel={"pipeline": pipeline}))
            found = sum(sum(held(stage.of, stage.model, 1, number)) for number in range(pipeline))
            copy = config["vocab_size"] * config["hidden_size"] if built.config.tie_word_embeddings else 0
            assert found == counted + copy * (pipeline > 1)


def test_ranks_share_what_their_axis_splits():
    one = case(tokens=2048)
    (alone,) = peaks(one)
    (idle,) = peaks(one, "idle")
    assert peaks(case(ranks=2), "idle")[0] == pytest.approx(idle * 12 / 16, rel=0.02), "moments, over two ranks"
    assert peaks(case(ranks=2, optimizer={"distributed": False}), "idle")[0] == idle
    split = {"parallel": {"tensor": 2}}
    assert peaks(case(ranks=2, **split), "idle")[0] == pytest.approx(idle / 2, rel=0.02)
    norms = {"parallel": {"tensor": 2, "sequence": True}}
    assert peaks(case(ranks=2, tokens=2048, **norms))[0] < peaks(case(ranks=2, tokens=2048, **split))[0] < alone
    of_gpu = {"device": "gpu", "dtype": "bfloat16", "logprob_chunk": 64}
    sizes = ((1, 2048, {}), (2, 4096, {"context": 2}))
    active = [
        peaks(one)[0] - peaks(one, "idle")[0]
        for one in (case(ranks=ranks, tokens=tokens, parallel=axes, **of_gpu) for ranks, tokens, axes in sizes)
    ]
    assert active[1] == pytest.approx(active[0], rel=0.15), "half of a row that is twice as long, and gathered keys"
    experts = case(MIXED, 2, parallel={"expert": 2})
    assert peaks(experts, "idle")[0] < 0.75 * peaks(case(MIXED), "idle")[0]


def test_recomputation_keeps_less_on_cpus_and_on_gpus():
    for device, dtype in (("cpu", "float32"), ("gpu", "bfloat16")):
        kinds = (False, "selective", True)
        none, some, least = (
            peaks(case(dtype=dtype, device=device, tokens=8192, logprob_chunk=64, gradient_checkpointing=kind))[0]
            for kind in kinds
        )
        assert least < 0.6 * none
        assert least < some < none


def test_transformer_engine_needs_less_than_plain_layers():
    of_gpu = {"dtype": "bfloat16", "device": "gpu", "tokens": 8192, "logprob_chunk": 64}
    plain, engine = (case(layers=kind, **of_gpu) for kind in ("test", "auto"))
    assert peaks(engine)[0] < 0.7 * peaks(plain)[0]
    assert formulas(engine)["asleep"].device == 0
    assert formulas(engine)["asleep"].host == 14 * sum(held(stage_of(engine).of, stage_of(engine).model, 64))


def test_a_frozen_model_needs_its_weights_and_a_moment_of_activations():
    frozen = case(trained=False)
    found = formulas(frozen)
    assert "train" not in found
    assert peaks(frozen, "idle")[0] == pytest.approx(4 * ModelInfo("", LLAMA).parameters, rel=0.02)
    assert found["idle"].device < found["score"].device < peaks(case())[0]


def test_every_saving_lowers_the_peak_or_leaves_it_and_none_is_set_already():
    one = case(ranks=8, dtype="bfloat16", tokens=8192, parallel={"tensor": 2}, optimizer={"distributed": False})
    before, offered = max(peaks(one)), savings(one)
    keys = {saving.key for saving in offered}
    assert {"optimizer.distributed", "parallel.sequence", "parallel.tensor", "parallel.pipeline"} <= keys
    for saving in offered:
        head, _, inner = saving.key.partition(".")
        value = {**one.settings[head], inner: saving.value} if inner else saving.value
        assert one.settings[head] != value
        settings = {**one.settings, head: value}
        made = structure(settings, MegatronConfig, None)
        tokens = min(one.tokens, saving.value) if head == "micro_batch_tokens" else one.tokens
        after = attrs.evolve(one, settings=settings, sizes=sizes_of(made, 8), tokens=tokens)
        assert max(peaks(after)) <= 1.01 * before, saving


def test_tensor_parallel_ranks_and_stages_share_an_adapter():
    lora = {"lora": {"rank": 16}}

    def copies(one):
        return stage_of(one).trained[0]

    alone = copies(case(**lora))
    assert alone == adapter_parameters(LoraConfig(rank=16), ModelInfo("", LLAMA))
    split = case(ranks=2, parallel={"tensor": 2}, **lora)
    assert alone / 2 < copies(split) < alone, "one half of each adapter is on every rank"
    pipes = [attrs.evolve(case(ranks=2, parallel={"pipeline": 2}, **lora), stage=stage) for stage in range(2)]
    assert [copies(one) for one in pipes] == [alone // 2] * 2
    first = case(ranks=2, parallel={"pipeline": 2}, lora={"rank": 16, "targets": [r".*layers\.[01]\..*"]})
    assert copies(first) == alone // 2
    assert copies(attrs.evolve(first, stage=1)) == 0
    assert peaks(case(**lora))[0] < 0.8 * peaks(case())[0]


def test_expert_parallel_ranks_and_stages_share_the_adapters_of_experts():
    lora, of = {"lora": {"rank": 16, "experts": True}}, ModelInfo("", MIXED)
    dense, alone = stage_of(case(MIXED, **lora)).trained
    assert dense + alone == adapter_parameters(LoraConfig(rank=16, experts=True), of)
    assert dense == adapter_parameters(LoraConfig(rank=16), of)
    assert stage_of(case(MIXED, 2, parallel={"expert": 2}, **lora)).trained == (dense, alone // 2)
    assert stage_of(case(MIXED, 2, parallel={"pipeline": 2}, **lora)).trained == (dense // 2, alone // 2)
    split = {"tensor": 2, "sequence": True, "expert_tensor": 2}
    _, halves = stage_of(case(MIXED, 2, parallel=split, **lora)).trained
    assert halves == 16 * 4 * 8 * (192 + 2 * 160 // 2 + 160 // 2 + 192)
    own, found = dense + alone, []
    for ranks, sizes in ((1, {}), (2, {}), (2, {"expert": 2})):
        one = case(MIXED, ranks, parallel=sizes, **lora)
        found.append(peaks(one, "idle")[0] - 4 * sum(stage_of(one).held))
    # Weights and gradients, and moments, which ranks with the same adapters share out.
    assert found == [16 * own, 12 * own, 8 * (dense + alone // 2) + 8 * (dense // 2 + alone // 2)]


def test_the_plan_has_a_forecast_of_models_that_megatron_computes():
    forecast = facts(MegatronConfig(micro_batch_tokens=512), ModelInfo("", LLAMA)).forecast
    assert forecast.tokens == 512
    assert forecast.sizes(4).data == 4
    assert facts(MegatronConfig(), ModelInfo("", {**LLAMA, "hidden_act": "gelu"})).forecast is None


PROCESS = 48 << 20
"""Bytes that libraries and the allocator take at the most."""


@pytest.mark.slow
def test_workers_measure_what_was_predicted_for_their_stage():
    """Models of 23 million parameters on two ranks. One process imports for all workers."""
    file = Path(__file__).parents[4] / "benchmarks" / "memory_prediction.py"
    done = subprocess.run(
        [sys.executable, file, "--megatron", "--small", "--json"], env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    rows = json.loads(done.stdout.splitlines()[-1])
    assert {name.partition("[")[2] for name, *_ in rows} == {"", "0]", "1]"}
    for name, _, phase, predicted, measured in rows:
        assert measured - predicted < PROCESS, (name, phase)
        assert predicted < 1.05 * measured, (name, phase, "more was predicted than a worker needs")
        if phase == "train":
            assert measured == pytest.approx(predicted, rel=0.15), name
