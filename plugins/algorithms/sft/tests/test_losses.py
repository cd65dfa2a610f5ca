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
