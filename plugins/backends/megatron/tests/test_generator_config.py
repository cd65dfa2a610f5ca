"""What a plan says and refuses of the generator, without torch and without Megatron."""

from types import SimpleNamespace
from typing import Any

import pytest

from whet.data.model_info import ModelInfo
from whet_megatron.config import MegatronConfig
from whet_megatron.config import facts as backend_facts
from whet_megatron.generator.config import MegatronGeneratorConfig, SplitConfig, checked, facts
from whet_megatron.parallel import ParallelConfig

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 128, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16, "intermediate_size": 384, "vocab_size": 375,
    "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
}  # fmt: skip
MIXED = {**QWEN3, "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
OWN = MegatronGeneratorConfig(weights="own")


def model(**changes: Any) -> ModelInfo:
    return ModelInfo("model", {**QWEN3, **changes})


def test_shared_weights_take_no_memory_and_no_way_but_in_place() -> None:
    shared, own = facts(MegatronGeneratorConfig(), model()), facts(OWN, model())
    assert shared.transports == ("in-place",)
    assert "in-place" in backend_facts(MegatronConfig(), model()).transports
    assert "in-place" not in own.transports
    assert shared.memory is not None
    assert own.memory is not None
    terms = {term.what: term.bytes for term in own.memory(1, False)}
    assert {term.what for term in shared.memory(1, False)} == {"keys and values"}
    assert [term.woken for term in own.memory(1, False)] == ["weights", ""], "they wake for a weight sync"
    # embedding with 384 rows, final norm; of each layer queries, keys, values and their output, three matrices, norms
    attention, norms = 128 * 16 * (2 * 8 + 2 * 4), 2 * 128 + 2 * 16
    assert terms["weights in float32"] == 4 * (384 * 128 + 128 + 4 * (attention + 3 * 128 * 384 + norms))
    assert terms["keys and values"] == 4 * 2**30


@pytest.mark.parametrize(
    ("sizes", "ranks", "path", "words"),
    [
        ({"tensor": 3}, 3, "parallel.tensor", "does not divide the model's 8 heads"),
        ({"expert": 4}, 4, "parallel.expert", "over more ranks than the 1 of parallel.tensor"),
    ],
    ids=str,
)
def test_what_does_not_divide_or_is_for_training_is_refused_by_its_key(
    sizes: dict[str, Any], ranks: int, path: str, words: str
) -> None:
    found = facts(MegatronGeneratorConfig(parallel=SplitConfig(**sizes)), ModelInfo("model", MIXED))
    assert found.problems is not None
    assert words in {problem.path: problem.message for problem in found.problems(ranks)}[path]


def test_a_model_that_megatron_cannot_compute_is_refused() -> None:
    found = facts(OWN, model(hidden_act="gelu"))
    assert found.memory is None
    assert found.problems is not None
    assert "has the activation gelu" in {one.path: one.message for one in found.problems(1)}["use"]


@pytest.mark.parametrize(
    ("generator", "backend", "staleness", "path", "words"),
    [
        ({}, None, 0, "generator.weights", "is shared, and the backend is other"),
        ({}, MegatronConfig(parallel=ParallelConfig(context=2)), 0, "generator.parallel", "is not backend.parallel"),
        ({}, MegatronConfig(), 1, "generator.weights", "weights change under requests"),
    ],
    ids=["another backend", "other ranks", "staleness"],
)
def test_weights_that_cannot_be_shared_are_refused(
    generator: dict[str, Any], backend: Any, staleness: int, path: str, words: str
) -> None:
    def problems(**more: Any) -> dict[str, str]:
        made: Any = SimpleNamespace(
            generator=SimpleNamespace(config=MegatronGeneratorConfig(**generator, **more)),
            backend=SimpleNamespace(config=backend, name="other"),
            rollout=SimpleNamespace(max_staleness=staleness),
        )
        return {problem.path: problem.message for problem in checked(made)}

    assert words in problems()[path]
    assert not problems(weights="own")
