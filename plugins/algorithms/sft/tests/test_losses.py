import numpy as np
import pytest
import torch

from whet.data.batch import Batch, from_sequences
from whet_sft.config import NllConfig
from whet_sft.losses import Nll


def test_the_loss_is_that_of_transformers(tiny_model_folder):
    """One batch of two sequences, against the model's own loss with labels of -100 where nothing is trained."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model_folder, dtype=torch.float32)
    rng = np.random.default_rng(0)
    rows = [{"tokens": rng.integers(3, 300, n), "loss_mask": np.arange(n) >= 3} for n in (9, 6)]
    width = 9
    ids, labels = torch.zeros(2, width, dtype=torch.long), torch.full((2, width), -100)
    attention = torch.zeros(2, width, dtype=torch.long)
    for i, row in enumerate(rows):
        n = len(row["tokens"])
        ids[i, :n], attention[i, :n] = torch.from_numpy(row["tokens"]), 1
        labels[i, 3:n] = ids[i, 3:n]
    with torch.no_grad():
        wanted = model(input_ids=ids, attention_mask=attention, labels=labels).loss
        logits = model(input_ids=ids, attention_mask=attention).logits.log_softmax(-1)
    batch = from_sequences(rows, prompt_lengths=[3, 3]).map(torch.from_numpy)
    logprobs = torch.cat(
        [
            torch.cat([torch.zeros(1), logits[i, : n - 1].gather(1, ids[i, 1:n, None])[:, 0]])
            for i, n in enumerate((9, 6))
        ]
    )
    loss = Nll(NllConfig())
    result, counts = loss({"logprobs": logprobs}, batch), loss.counts(batch)
    assert float(result.terms["nll"] / counts["nll"]) == pytest.approx(float(wanted), rel=1e-5)
    assert result.metrics["nll"].number() == pytest.approx(float(wanted), rel=1e-5)


def test_sequences_without_a_trained_token_are_dead():
    rows = [{"tokens": np.arange(4), "loss_mask": np.array(mask, bool)} for mask in ([0, 0, 1, 1], [0, 0, 0, 0])]
    batch: Batch = from_sequences(rows, prompt_lengths=[2, 2]).map(torch.from_numpy)
    assert Nll(NllConfig()).live(batch).tolist() == [True, False]


def test_the_weight_of_a_token_is_its_probability_without_a_gradient():
    """TRL's `dft`: minus logprob times its exponential, which is detached, over the number of tokens; in float64."""
    rows = [
        {"tokens": np.arange(n), "loss_mask": np.arange(n) >= n - trained} for n, trained in ((7, 4), (5, 2), (3, 0))
    ]
    batch: Batch = from_sequences(rows, prompt_lengths=[1, 1, 1]).map(torch.from_numpy)
    logprobs = torch.log(torch.rand(15, generator=torch.Generator().manual_seed(0)))
    logprobs[6] = -torch.inf  # a token that cannot occur is not learnt
    mine = logprobs.clone().requires_grad_()
    loss = Nll(NllConfig(weighting="probability"))
    result = loss({"logprobs": mine}, batch)
    value = result.terms["nll"] / loss.counts(batch)["nll"]
    trained = batch["loss_mask"] & logprobs.isfinite()
    theirs = logprobs.double().requires_grad_()
    expected = torch.where(trained, -theirs * theirs.exp().detach(), 0.0).sum() / 6
    assert float(value.detach()) == pytest.approx(float(expected.detach()), rel=1e-6)
    wanted = torch.autograd.grad(expected, theirs)[0].nan_to_num()
    torch.testing.assert_close(torch.autograd.grad(value, mine)[0].double(), wanted, rtol=1e-6, atol=0.0)
    assert result.metrics["nll"].number() == float("inf")
