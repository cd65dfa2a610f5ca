"""What a model gives beside logprobs: values, the likeliest tokens, divergences to a teacher."""

import math

import numpy as np
import pytest
import torch

from whet.component import Spec
from whet.data.batch import from_sequences
from whet.data.model_info import read_model
from whet.errors import ConfigError, WhetError
from whet.interfaces.workers import WorkerRank
from whet.rollout.scorer import whole
from whet_fsdp2.worker import Worker
from whet_start.small_models import make_model, make_tokenizer

LAYOUTS = ["shared", "packed", "padded"]


def distributions(folder, batch, temperature=1.0):
    """Return log_softmax of the logits before each token [N, V], a sequence at a time."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    found = []
    for row in np.split(batch["tokens"], np.cumsum(batch["lengths"])[:-1]):
        logits = model(input_ids=torch.from_numpy(row)[None]).logits[0] / temperature
        found.append(torch.cat([torch.zeros(1, logits.shape[1]), torch.log_softmax(logits[:-1], -1)]))
    return model, torch.cat(found)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_likeliest_tokens_and_logprobs_at_them_are_those_of_transformers(make_worker, folders, batch, layout):
    cold = np.full(batch.sequences, 0.5, np.float32)
    worker, batch = make_worker(layout=layout), batch.with_columns(temperature=cold)
    _, expected = distributions(folders(), batch, 0.5)
    mask = batch["loss_mask"]
    found = worker.score(batch, ("topk_ids:4", "topk_logprobs:4"))
    top = expected.topk(4)
    np.testing.assert_array_equal(found["topk_ids:4"][mask], top.indices.numpy()[mask])
    np.testing.assert_allclose(found["topk_logprobs:4"][mask], top.values.detach().numpy()[mask], atol=1e-5)
    assert not found["topk_ids:4"][~mask].any()
    ids = np.random.default_rng(0).integers(0, 200, (batch.tokens, 3))
    at = worker.score(batch.with_columns(topk_ids=ids), ("logprobs", "logprobs_at"))
    np.testing.assert_allclose(
        at["logprobs_at"][mask], expected.gather(1, torch.from_numpy(ids)).detach().numpy()[mask], atol=1e-5
    )
    np.testing.assert_allclose(at["logprobs"], worker.score(batch, ("logprobs",))["logprobs"], atol=1e-6)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_divergences_to_a_teacher_in_the_same_workers_are_those_of_transformers(
    make_worker, folders, batch, gradients, layout
):
    worker = make_worker("qwen3", layout=layout, teacher=str(folders("llama")), micro_batch_tokens=40)
    model, log_p = distributions(folders("qwen3"), batch)
    _, log_q = distributions(folders("llama"), batch)
    mask, log_q = torch.from_numpy(batch["loss_mask"]), log_q.detach()
    forward = (log_q.exp() * (log_q - log_p)).sum(-1) * mask
    reverse = (log_p.exp() * (log_p - log_q)).sum(-1) * mask
    found = worker.score(batch, ("kl_forward", "kl_reverse"))
    np.testing.assert_allclose(found["kl_forward"], forward.detach(), atol=2e-5)
    np.testing.assert_allclose(found["kl_reverse"], reverse.detach(), atol=2e-5)
    mixed = torch.logaddexp(log_p + math.log(0.7), log_q + math.log(0.3))
    both = 0.3 * log_q.exp() * (log_q - mixed) + 0.7 * log_p.exp() * (log_p - mixed)
    jensen_shannon = worker.score(batch, ("jensen_shannon:0.3",))["jensen_shannon:0.3"]
    np.testing.assert_allclose(jensen_shannon, (both.sum(-1) * mask).detach(), atol=2e-5)
    taught = worker.score(batch, ("logprobs",), "teacher")["logprobs"]
    at = log_q.gather(1, torch.from_numpy(batch["tokens"])[:, None])[:, 0] * mask
    np.testing.assert_allclose(taught, at, atol=1e-5)
    ((forward + 2 * reverse).sum() / int(mask.sum())).backward()
    ours = gradients(worker, batch, Spec("whet_testing.losses:Divergence"))
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(ours[name], parameter.grad, atol=5e-6, rtol=1e-3)


def test_a_teacher_with_another_vocabulary_is_refused(make_worker, tmp_path):
    other = make_model(tmp_path, make_tokenizer(["a few words and 123"], vocab_size=270))
    with pytest.raises(ConfigError, match=r"has a vocabulary of 2\d\d tokens, the model that is trained"):
        make_worker(teacher=str(other))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_are_those_of_a_sequence_classifier(make_worker, batch, tmp_path, layout):
    from transformers import AutoModelForSequenceClassification

    worker = make_worker(layout=layout, head="value")
    worker.export(str(tmp_path))
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path, dtype=torch.float32)
    assert model.num_labels == 1
    found = worker.score(batch, ("values",))["values"]
    ends = np.cumsum(batch["lengths"])[:-1]
    columns = (np.split(column, ends) for column in (batch["tokens"], found, batch["loss_mask"]))
    for row, values, mask in zip(*columns, strict=True):
        states = model.base_model(input_ids=torch.from_numpy(row)[None]).last_hidden_state[0]
        expected = np.append(0, model.score(states)[:-1, 0].detach().numpy()) * mask
        np.testing.assert_allclose(values, expected, atol=1e-5)
        one = from_sequences([whole(row)], prompt_lengths=[len(row)])
        last = worker.score(one, ("values",))["values"][-1]
        assert last == pytest.approx(model(input_ids=torch.from_numpy(row)[None]).logits.item(), abs=1e-5)


def test_a_new_head_depends_on_the_seed_alone_and_a_saved_one_is_kept(folders, batch, tmp_path):
    def worker(seed, folder):
        config = {"head": "value", "optimizer": {"lr": 1e-3}}
        return Worker(WorkerRank("critic", 0, 1), config, read_model(folder), total_steps=3, seed=seed, scratch="")

    first, second, other = (worker(seed, folders()).score(batch, ("values",))["values"] for seed in (0, 0, 1))
    assert np.array_equal(first, second)
    assert not np.allclose(first, other)
    trained = worker(0, folders())
    losses = [trained.train(batch, Spec("whet_testing.losses:Regression"))["loss"].number() for _ in range(3)]
    assert losses[2] < losses[0]
    trained.export(str(tmp_path))
    kept = worker(5, tmp_path).score(batch, ("values",))["values"]
    np.testing.assert_allclose(kept, trained.score(batch, ("values",))["values"], atol=1e-6)


def test_a_frozen_model_scores_and_refuses_to_train(folders, batch):
    worker = Worker(WorkerRank("teacher", 0, 1), {}, read_model(folders(), "bfloat16"), trained=False, scratch="")
    assert worker.score(batch, ("logprobs",))["logprobs"].any()
    with pytest.raises(WhetError, match="frozen"):
        worker.train(batch, Spec("whet_testing.losses:Likelihood"))


def test_outputs_that_the_model_does_not_give_are_named(make_worker, batch):
    with pytest.raises(WhetError, match="needs values, which this model does not give: it gives entropy, logprobs"):
        make_worker().score(batch, ("values",))
    with pytest.raises(WhetError, match="no teacher weights are held"):
        make_worker().score(batch, ("logprobs",), "teacher")
    with pytest.raises(WhetError, match="the column topk_ids"):
        make_worker().evaluate(batch, Spec("whet_testing.losses:AtTokens"))
