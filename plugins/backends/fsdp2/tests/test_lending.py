"""What the backend lends to a generator of its process, and what it keeps in memory meanwhile."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from whet.errors import WeightSyncError, WhetError
from whet.interfaces.weights import TransferSpec
from whet_fsdp2.worker import Worker
from whet_weights import lent

SYNC = TransferSpec("in-place", "", "one", 1)
LORA = {"rank": 2}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("config", [{"lora": LORA}, {}], ids=["an adapter", "all weights"])
def test_what_is_lent_are_the_tensors_that_the_forward_pass_uses(
    make_worker: Callable[..., Worker], config: dict[str, object], dtype: str
) -> None:
    worker = make_worker(dtype=dtype, **config)
    found = lent.borrow(lent.TRANSFORMERS).held
    own = dict(worker._root.model.named_parameters(remove_duplicate=False))
    assert {name: found.named[name].data_ptr() for name in own} == {name: one.data_ptr() for name, one in own.items()}
    assert {found.named[name].dtype for name in own} == {getattr(torch, dtype)}
    assert found.named["lm_head.weight"] is found.named["model.embed_tokens.weight"]
    if "lora" not in config:
        assert found.adapter is None
    else:
        assert worker._adapters is not None
        assert found.adapter("policy") is worker._adapters.pairs
        assert found.adapter("base") is None
        assert found.scaling == worker._adapters.scaling
    worker.close()


def test_one_generator_borrows_at_a_time_and_only_in_this_form(make_worker: Callable[..., Worker]) -> None:
    worker = make_worker(lora=LORA)
    with pytest.raises(WeightSyncError, match="no generator computes with this process's weights"):
        worker.send_weights(SYNC)
    with pytest.raises(WhetError, match="in the form transformers, wanted the form other"):
        lent.borrow("other")
    one = lent.borrow(lent.TRANSFORMERS)
    with pytest.raises(WhetError, match="another generator"):
        lent.borrow(lent.TRANSFORMERS)
    worker.send_weights(SYNC)
    one.taken(SYNC)
    worker.close()
    with pytest.raises(WhetError, match="holds no weights of a backend"):
        lent.borrow(lent.TRANSFORMERS)


@pytest.mark.parametrize("config", [{"head": "value"}, {"role": "critic"}], ids=["a value head", "another role"])
def test_other_models_are_not_lent(make_worker: Callable[..., Worker], config: dict[str, str]) -> None:
    worker = make_worker(**config)
    with pytest.raises(WhetError, match="are not lent"):
        worker.send_weights(SYNC)
    with pytest.raises(WhetError, match="holds no weights of a backend"):
        lent.borrow(lent.TRANSFORMERS)
    worker.close()


def test_borrowed_weights_stay_while_the_backend_sleeps(
    make_worker: Callable[..., Worker], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where the file of what sleeps is written
    worker = make_worker(lora=LORA)
    weights = sum(one.nbytes for one in worker._root.model.parameters())
    before = {name: one.clone() for name, one in worker._root.model.named_parameters()}
    alone = worker.sleep()
    worker.wake()
    lent.borrow(lent.TRANSFORMERS)
    assert worker.sleep() < alone - weights / 2
    assert all(torch.equal(one, before[name]) for name, one in worker._root.model.named_parameters())
    worker.wake()
    worker.close()
