"""What a backend leaves behind when it closes: nothing that only the end of its process would free."""

import gc
import weakref

import pytest

from whet.component import Spec
from whet_megatron.backend import MegatronBackend
from whet_megatron.config import MegatronConfig
from whet_testing.batches import random_batch
from whet_testing.role_context import make_context

LIKELIHOOD = Spec("whet_testing.losses:Likelihood")


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_a_model_that_trained_is_freed_when_its_backend_closes(tmp_path, folders, family):
    from megatron.core.models.gpt import GPTModel

    gc.collect()
    before = [weakref.ref(one) for one in gc.get_objects() if isinstance(one, GPTModel)]
    backend = MegatronBackend(MegatronConfig(), make_context(tmp_path, "backend", folders(family)))
    backend.train(random_batch(0, vocabulary=200), LIKELIHOOD)
    backend.close()
    del backend
    gc.collect()
    known = {id(one()) for one in before}
    assert not [one for one in gc.get_objects() if isinstance(one, GPTModel) and id(one) not in known]
