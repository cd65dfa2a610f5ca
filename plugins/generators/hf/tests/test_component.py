"""The plugin registers without torch, and its facts are true."""

import subprocess
import sys
from pathlib import Path

import pytest

from whet.data.model_info import read_model
from whet_hf.config import HfConfig
from whet_hf.facts import facts
from whet_start.small_models import make_model


def test_hooks_and_facts_import_no_torch() -> None:
    code = (
        "import sys, whet_hf.hooks, whet_hf.facts\n"
        "assert [c.name for c in whet_hf.hooks.whet_generators()] == ['hf']\n"
        "assert not {'torch', 'transformers', 'ray'} & set(sys.modules), 'imported early'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_memory_counts_weights_and_cache(tmp_path: Path, tiny_tokenizer: object) -> None:
    model = read_model(make_model(tmp_path, tiny_tokenizer), "bfloat16")

    def held(config: HfConfig) -> list[int]:
        memory = facts(config, model).memory
        return [term.bytes for term in memory(1, False)] if memory else []

    assert held(HfConfig(cache_gib=2**-10)) == [2 * model.parameters, 2**20]
    assert held(HfConfig(cache_gib=2**-10, dtype="float32")) == [4 * model.parameters, 2**20]
    # Keys and values of 256 sequences of 256 positions: 2 layers, 2 heads of 16, four bytes each.
    assert held(HfConfig(cache_gib=64.0)) == [2 * model.parameters, 256 * 256 * (2 * 2 * 2 * 16 * 4)]
    assert facts(HfConfig(), model).transports == ("shared", "broadcast", "shared-memory", "disk")


@pytest.mark.parametrize("wrong", [{"max_batch": 0}, {"cache_gib": 0.0}])
def test_settings_that_leave_no_room_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        HfConfig(**wrong)  # type: ignore[arg-type]
