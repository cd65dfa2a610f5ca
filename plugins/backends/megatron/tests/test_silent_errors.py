"""Errors that raise nothing: numbers would only be a little wrong. Each test fails if its error comes back."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from whet.data.model_info import read_model
from whet_megatron import architecture
from whet_megatron.config import MegatronConfig, OptimizerConfig
from whet_megatron.model import transformer_config
from whet_megatron.parallel import ParallelConfig
from whet_testing.three_steps import LIKELIHOOD, steps_of

FEW = {"micro_batch_tokens": 40}


@pytest.mark.parametrize("sizes", [{}, {"tensor": 2}], ids=str)
def test_padding_of_the_vocabulary_takes_no_part_in_the_softmax(build, make_batch, sizes):
    """Rows of zeros have logit 0: loss and gradients would be off by 10 %, and logits right."""
    ranks, batch = sizes.get("tensor", 1), make_batch(0)
    plain = build("llama", vocabulary_multiple=1)
    expected = plain.score(batch, ("logprobs", "entropy"))
    steps = steps_of(plain, [batch, make_batch(1)])
    for multiple in (64, 250):  # 375 tokens: 384 rows, or 500
        padded = build("llama", ranks, sizes, vocabulary_multiple=multiple // ranks)
        for name, values in padded.score(batch, ("logprobs", "entropy")).items():
            np.testing.assert_allclose(values, expected[name], atol=1e-5, err_msg=name)
        np.testing.assert_allclose(steps_of(padded, [batch, make_batch(1)]), steps, rtol=1e-5)


@pytest.mark.parametrize("distributed", [True, False])
def test_the_second_and_third_step_after_a_resume_are_as_right_as_the_first(build, make_batch, tmp_path, distributed):
    """With one counter of steps for all weights, AdamW's second step is off by 1 %."""
    optimizer = OptimizerConfig(lr=1e-3, weight_decay=0.1, distributed=distributed)
    first, again = build(optimizer=optimizer), build(optimizer=optimizer)
    steps_of(first, [make_batch(0), make_batch(1)])
    first.save(tmp_path / "saved").result()
    again.load(tmp_path / "saved")
    later = [make_batch(seed) for seed in (2, 3, 4)]
    assert np.array_equal(steps_of(again, later), steps_of(first, later))


@pytest.mark.slow
def test_interleaved_stages_give_the_same_bits_in_every_run(build, folders, make_batch):
    """Megatron frees tensors that gloo still sends: gradients would change from run to run."""
    found = []
    for _ in range(3):
        backend = build(folders("llama", layers=4), 2, {"pipeline": 2, "virtual": 2}, **FEW)
        found.append(steps_of(backend, [make_batch(0), make_batch(1)]))
        backend.close()
    assert np.array_equal(found[0], found[1])
    assert np.array_equal(found[0], found[2])


def test_a_tensor_that_gloo_still_sends_is_not_freed(folders):
    """On few passes the race is seldom lost, so that equal bits alone prove little."""
    arch = architecture.read(read_model(folders("llama", layers=4), "float32"))
    config = MegatronConfig(parallel=ParallelConfig(pipeline=2, virtual=2))
    for device, freed in (("cpu", False), ("cuda", True)):
        ranks = SimpleNamespace(sizes=config.parallel, device=torch.device(device))
        made = transformer_config(arch, config, ranks, torch.float32, "test")
        assert made.deallocate_pipeline_outputs is freed


def test_sequences_of_a_packed_row_do_not_see_each_other(build, make_batch):
    batch = make_batch(3)
    together = build("qwen3").score(batch, ("logprobs",))["logprobs"]
    alone = build("qwen3", micro_batch_tokens=1).score(batch, ("logprobs",))["logprobs"]
    np.testing.assert_allclose(together, alone, atol=1e-5)


def test_gradients_of_the_head_are_not_rounded(build, folders, make_batch):
    """Megatron's fused cross entropy rounds its gradient to bfloat16: that of each weight would be off by 1e-3."""
    from transformers import AutoModelForCausalLM

    batch, backend = make_batch(0), build("llama", max_grad_norm=None)
    net = AutoModelForCausalLM.from_pretrained(folders("llama"), dtype=torch.float32, attn_implementation="eager")
    for i in range(batch.sequences):
        one = batch.take([i])
        tokens, mask = torch.from_numpy(one["tokens"]), torch.from_numpy(one["loss_mask"])
        logprobs = net(input_ids=tokens[None, :-1]).logits[0].log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
        (-logprobs[mask[1:]].sum() / batch["loss_mask"].sum()).backward()
    expected = {name: parameter.grad for name, parameter in net.named_parameters()}
    backend.train(batch, LIKELIHOOD)
    (worker,) = backend._workers._workers
    singles = [one for one in worker._model.weights.ruled.values() if len(one.stored) == 1]
    assert (
        len(singles) == 11
    )  # of two layers two norms, two matrices and the fused ones' norms, and what is around them
    for one in singles:
        wanted = expected[one.stored[0]]
        found = one.parameter.main_grad[: len(wanted)]  # without padding of the vocabulary
        assert (found - wanted).norm() < 1e-5 * wanted.norm(), one.stored


@pytest.mark.slow
def test_the_gradient_does_not_grow_with_ranks_that_share_sequences(build, make_batch):
    """Megatron multiplies a loss by the number of context ranks unless it is told how its counts are taken."""
    batches = [make_batch(0), make_batch(1)]
    one, two = build("llama", **FEW), build("llama", 2, {"context": 2}, **FEW)
    np.testing.assert_allclose(steps_of(two, batches), steps_of(one, batches), rtol=1e-5)


@pytest.mark.slow
def test_the_norm_counts_every_rank_that_splits_a_matrix(build, make_batch):
    """Megatron marks split parameters when it draws them at random. Else the norm is that of one rank's part."""
    batches = [make_batch(0)]
    one, two = build("llama"), build("llama", 2, {"tensor": 2})
    np.testing.assert_allclose(steps_of(two, batches), steps_of(one, batches), rtol=1e-5)


def test_saving_before_the_first_step_changes_no_weight(build, make_batch, tmp_path):
    """Megatron makes the state of an optimizer by a step, which decays the weights."""
    backend, batch = build("qwen3"), make_batch(0)
    before = backend.score(batch, ("logprobs",))["logprobs"]
    backend.save(tmp_path / "saved").result()
    assert np.array_equal(backend.score(batch, ("logprobs",))["logprobs"], before)
