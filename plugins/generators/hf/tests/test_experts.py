"""Mixtures of experts: weights under stored names, and the experts of every token."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from whet.data.model_info import read_model
from whet.data.records import Sampling
from whet.errors import WeightSyncError, WhetError
from whet_generation.stopping import StopStrings
from whet_hf.config import HfConfig
from whet_hf.decode import Aborts, Job, decode
from whet_hf.facts import facts
from whet_hf.loading import choose_decoder, load_model, take_weights
from whet_hf.swap import Weights
from whet_weights.stored_names import StoredNames

LAYERS, K = 2, 2


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_weights_come_under_stored_names_or_those_of_memory(tiny_models: Any, family: str, tied: bool) -> None:
    model = load_model(str(tiny_models(family, tied=tied)), "float32", "cpu", False)
    other = load_model(str(tiny_models(family, tied=tied, seed=7)), "float32", "cpu", False)
    first = [(name, p.detach().clone()) for name, p in model.named_parameters()]
    sent = list(StoredNames(other).stored(other.named_parameters()))
    take_weights(model, sent)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    take_weights(model, first)
    assert all(torch.equal(a, b) for a, (_, b) in zip(model.parameters(), first, strict=True))
    less = [(name, tensor) for name, tensor in sent if ".experts.3." not in name]
    with pytest.raises(WeightSyncError, match=rf"{3 * LAYERS} parameters were not sent: model\.layers\.0.*experts\.3"):
        take_weights(model, less)
    with pytest.raises(WeightSyncError, match="was sent with shape"):
        take_weights(model, [(name, tensor.T if "experts.1." in name else tensor) for name, tensor in sent])


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_the_experts_of_each_token_are_those_of_a_full_forward(tiny_models: Any, requests_of: Any, family: str) -> None:
    folder = tiny_models(family)
    model = load_model(str(folder), "float32", "cpu", False)
    decoder = choose_decoder(model, fused=True, experts=True)
    requests = requests_of(9)
    jobs = sorted((Job(r, r.sampling.max_tokens) for r in requests), key=lambda job: job.place)
    found = decode(decoder, jobs, StopStrings(folder), Weights(), Aborts(), torch.device("cpu"))
    by_id = {request.id: request for request in requests}
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_router_logits=True)
    for completion in found:
        tokens = np.concatenate([by_id[completion.id].tokens, completion.tokens])
        column = completion.columns["routed_experts"]
        assert column.shape == (len(tokens), LAYERS * K)
        assert column.dtype == np.int16
        assert (column[-1] == -1).all()
        with torch.no_grad():
            logits = plain(input_ids=torch.from_numpy(tokens[:-1])[None], use_cache=False).router_logits
        expected = torch.cat([each.topk(K).indices for each in logits], 1).numpy()
        assert np.array_equal(column[:-1], expected)


def test_recording_changes_no_token(tiny_models: Any, requests_of: Any) -> None:
    folder = tiny_models("qwen3_moe")
    model = load_model(str(folder), "float32", "cpu", False)
    made = []
    for experts in (False, True):
        jobs = sorted((Job(r, r.sampling.max_tokens) for r in requests_of(6)), key=lambda job: job.place)
        decoder = choose_decoder(model, fused=True, experts=experts)
        made.append(decode(decoder, jobs, StopStrings(folder), Weights(), Aborts(), torch.device("cpu")))
    for without, recorded in zip(*made, strict=True):
        assert np.array_equal(without.tokens, recorded.tokens)
        assert np.array_equal(without.logprobs, recorded.logprobs)
        assert not without.columns


def test_a_completion_of_one_token_has_the_experts_of_its_prompt(tiny_models: Any, requests_of: Any) -> None:
    folder = tiny_models("mixtral")
    model = load_model(str(folder), "float32", "cpu", False)
    decoder = choose_decoder(model, fused=True, experts=True)
    (request,) = requests_of(1, max_tokens=1)
    assert request.sampling == Sampling(max_tokens=1, temperature=1.0)
    (found,) = decode(decoder, [Job(request, 1)], StopStrings(folder), Weights(), Aborts(), torch.device("cpu"))
    assert (found.columns["routed_experts"][:-1] >= 0).all()
    assert len(found.columns["routed_experts"]) == len(request.tokens) + 1


def test_only_mixtures_of_experts_offer_the_column(tiny_models: Any) -> None:
    config = HfConfig()
    for family, given in {"qwen3_moe": {"routed_experts"}, "mixtral": {"routed_experts"}, "llama": set()}.items():
        assert facts(config, read_model(tiny_models(family))).columns_given == given
    model = load_model(str(Path(tiny_models("llama"))), "float32", "cpu", False)
    with pytest.raises(WhetError, match="the generator cannot record experts: LlamaForCausalLM has no routers"):
        choose_decoder(model, fused=True, experts=True)
