"""One copy of the weights for trainer and generator: `generator.weights: shared` with the backend `fsdp2`."""

from pathlib import Path

import numpy as np
import pytest
import torch

from whet.component import resolve
from whet.errors import WhetError, WorkerError
from whet_hf.config import HfConfig
from whet_hf.fused import FusedDecoder
from whet_hf.generator import HfGenerator
from whet_testing.role_context import make_context
from whet_training.lora_config import LoraConfig

make_pair = resolve(f"file:{Path(__file__).parent / 'shared_pair.py'}:Pair")
ADAPTERS = LoraConfig(rank=2)
SECTIONS = {
    "an adapter": ("qwen3", {"lora": ADAPTERS}),
    "an adapter, untied": ("llama", {"lora": ADAPTERS}),
    "checkpointing": ("qwen3", {"lora": ADAPTERS, "gradient_checkpointing": True}),
    "padded": ("qwen2", {"lora": ADAPTERS, "layout": "padded"}),
    "experts without adapters": ("qwen3_moe", {"lora": ADAPTERS}),
    "adapters of experts": ("qwen3_moe", {"lora": LoraConfig(rank=2, experts=True)}),
    "all weights": ("qwen3", {}),
}


@pytest.fixture
def pair(tiny_models, tmp_path):
    made = []

    def make(family="qwen3", **section):
        made.append(make_pair(tmp_path / str(len(made)), tiny_models(family, tied=family != "llama"), **section))
        return made[-1]

    yield make
    for one in made:
        one.close()


def places(model):
    return {name: weight.data_ptr() for name, weight in model.named_parameters(remove_duplicate=False)}


@pytest.mark.parametrize("case", SECTIONS)
def test_after_each_step_the_sampler_s_logprobs_are_the_trainer_s(pair, case):
    family, section = SECTIONS[case]
    one = pair(family, **section)
    one.sync(0)
    before = one.ask()
    for version in (1, 2):
        one.train(before)
        one.sync(version)
        after = one.ask()
        assert one.gap(after) < 1e-4
        assert {completion.versions for _, completion in after} == {((0, version),)}
        assert one.gap(before) > 1e-2, "the step changed too little to see which weights were used"
        before = after


@pytest.mark.parametrize("case", SECTIONS)
def test_the_sampler_s_weights_are_the_trainer_s_memory(pair, case):
    family, section = SECTIONS[case]
    one = pair(family, **section)
    model = one.trainer._root.model
    held, before = places(model), {name: weight.clone() for name, weight in model.named_parameters()}
    assert places(one.sampler._model) == held
    one.sync(0, "trial" if "lora" in section else "policy")
    one.train(one.ask())
    one.sync(1)
    one.ask()
    assert places(one.sampler._model) == places(model) == held
    frozen = [torch.equal(weight, before[name]) for name, weight in model.named_parameters()]
    assert all(frozen) if "lora" in section else not any(frozen)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_a_trial_adapter_is_used_until_the_next_weight_sync(pair, family):
    one = pair(family, lora=LoraConfig(rank=2, experts=family == "qwen3_moe"))
    one.sync(0, "trial")
    trial = one.ask()
    assert one.gap(trial, "trial") < 1e-4
    assert one.gap(trial) > 1e-2
    one.train(trial)
    one.sync(1)
    after = one.ask()
    assert one.gap(after) < 1e-4
    assert one.gap(after, "base") > 1e-3


def test_until_a_weight_sync_the_adapter_is_that_of_the_last_one(pair):
    one = pair(lora=ADAPTERS)
    one.sync(0)
    before = one.ask()
    one.train(before)
    again = one.ask()
    assert [c.logprobs.tolist() for _, c in again] == [c.logprobs.tolist() for _, c in before]
    one.sync(1)
    assert one.gap(one.ask()) < 1e-4


@pytest.mark.parametrize("section", [{"lora": ADAPTERS}, {}], ids=["an adapter", "all weights"])
def test_while_the_backend_sleeps_the_weights_stay_and_the_optimizer_goes(pair, section):
    one = pair(**section)
    one.sync(0)
    found = one.ask()
    one.train(found)
    one.sync(1)
    before, held = one.ask(), places(one.trainer._root.model)
    weights = {name: weight.clone() for name, weight in one.trainer._root.model.named_parameters()}
    one.backend.sleep()
    asleep = one.ask()
    assert [c.logprobs.tolist() for _, c in asleep] == [c.logprobs.tolist() for _, c in before]
    assert all(torch.equal(weight, weights[n]) for n, weight in one.trainer._root.model.named_parameters())
    one.backend.wake()
    assert isinstance(one.sampler._decoder, FusedDecoder)
    cache = sum(buffer.nbytes for buffer in one.sampler._decoder._buffers.values())
    assert one.generator.sleep() == cache > 0, "the weights are the trainer's"
    one.train(found)
    one.sync(2)
    one.generator.wake()
    assert places(one.sampler._model) == held
    assert one.gap(one.ask()) < 1e-4


@pytest.mark.parametrize("section", [{"lora": ADAPTERS}, {}], ids=["an adapter", "all weights"])
def test_a_turn_after_a_step_is_computed_with_the_new_weights(pair, section):
    one = pair(prefix_caching=True, **section)
    one.sync(0)
    turns = one.ask()
    for version in (1, 2):
        longer = [np.concatenate([request.tokens, done.tokens, [9, 11]]) for request, done in turns]
        known = one.sampler._decoder.prefixes.find
        one.ask(prompts=longer)  # sequences are kept from the first that goes on
        assert known(longer[-1])[1] > 0
        assert one.gap(one.ask(prompts=longer)) < 1e-4
        one.train(turns)
        one.sync(version)
        assert known(longer[-1])[1] == 0, "keys and values of the old weights are still there"
        turns = one.ask(prompts=longer)
        assert one.gap(turns) < 1e-4


@pytest.mark.parametrize("section", [{"lora": ADAPTERS}, {}], ids=["an adapter", "all weights"])
def test_threads_of_the_generator_decode_parts_of_a_batch(pair, section):
    one = pair(threads=2, **section)
    assert one.sampler._lanes is not None
    one.sync(0)
    for version in (1, 2):
        found = one.ask(count=40)
        assert one.gap(found) < 1e-4
        one.train(found)
        one.sync(version)
    assert one.gap(one.ask(count=40)) < 1e-4


def test_a_generator_that_starts_while_the_backend_sleeps_brings_the_weights_back(pair):
    one = pair(lora=ADAPTERS, asleep=True)
    found = one.ask()
    one.backend.wake()
    assert one.gap(found, "base") < 1e-4
    assert one.backend.sleep() < one.released, "the weights were released although the generator computes with them"
    one.backend.wake()


def test_after_the_generator_is_closed_the_weights_sleep_too(pair):
    one = pair(lora=ADAPTERS)
    few = one.backend.sleep()
    one.backend.wake()
    one.generator.close()
    one.generator = None
    assert one.backend.sleep() > few
    one.backend.wake()


def test_bfloat16_is_computed_with_the_trainer_s_tensors(pair):
    one = pair(lora=ADAPTERS, dtype="bfloat16")
    one.sync(0, "trial")
    trial = one.ask()
    assert {weight.dtype for weight in one.sampler._model.parameters()} == {torch.bfloat16}
    assert places(one.sampler._model) == places(one.trainer._root.model)
    assert one.gap(trial, "trial") < 0.1 * one.gap(trial, "base")


def test_a_weight_sync_that_the_backend_did_not_take_part_in_is_refused(pair):
    one = pair(lora=ADAPTERS)
    one.backend.send_weights(one.spec(1, session="first")).result()
    for spec in (one.spec(1, session="other"), one.spec(2, session="first")):
        with pytest.raises(WorkerError, match="sent session first of version 1"):
            one.generator.receive_weights(spec, spec.version).result()
        with pytest.raises(WhetError, match="no weights to use"):
            one.ask(count=1)
    one.sync(3)
    assert one.ask(count=1)[0][1].versions == ((0, 3),)


def test_without_a_backend_that_lends_it_says_what_to_change(tiny_model_folder, tmp_path):
    context = make_context(tmp_path, "generator", tiny_model_folder, transport="in-place")
    with pytest.raises(WorkerError, match=r"holds no weights of a backend.*set\s+generator\.weights: own"):
        HfGenerator(HfConfig(weights="shared"), context)


def test_weights_of_another_model_are_refused(tiny_models, pair, tmp_path):
    one = pair(lora=ADAPTERS)
    one.generator.close()
    context = make_context(tmp_path / "other", "generator", tiny_models("qwen2"), transport="in-place")
    with pytest.raises(WorkerError, match=r"are not those of Qwen2ForCausalLM .* set generator\.weights: own"):
        HfGenerator(HfConfig(weights="shared"), context)
    one.generator = HfGenerator(
        HfConfig(weights="shared"),
        make_context(tmp_path / "again", "generator", tiny_models("qwen3"), transport="in-place"),
    )
    one.sync(1)
    assert one.gap(one.ask()) < 1e-4


def test_two_generators_cannot_share_one_backend(pair, tiny_model_folder, tmp_path):
    pair(lora=ADAPTERS)
    context = make_context(tmp_path / "second", "generator", tiny_model_folder, transport="in-place")
    with pytest.raises(WorkerError, match="another generator computes with the backend's weights already"):
        HfGenerator(HfConfig(weights="shared"), context)


def test_where_no_weights_are_synced_the_generator_loads_its_own(tiny_model_folder, tmp_path):
    generator = HfGenerator(HfConfig(weights="shared"), make_context(tmp_path, "generator", tiny_model_folder))
    try:
        assert generator.sleep() > 0
    finally:
        generator.close()
