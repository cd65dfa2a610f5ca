"""An independent source of logprobs: `transformers` itself, computing with a model folder."""

from pathlib import Path
from typing import Any

import numpy as np


class Reference:
    """A model folder, loaded by `transformers` in float32. It computes one sequence at a time."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()

    def likelihoods(self, tokens: Any, temperature: float = 1.0) -> Any:
        """Return the logprob of every token of the vocabulary after each position. tokens [L] -> [L, V] float64."""
        import torch

        with torch.no_grad():
            logits = self.model(torch.as_tensor(np.asarray(tokens))[None]).logits[0].double()
            return torch.log_softmax(logits / temperature, -1).numpy()

    def logprobs(self, tokens: Any, temperature: float = 1.0) -> Any:
        """Return log p(token t | tokens before t) at each position t. tokens [L] -> [L] float64; position 0 holds 0."""
        tokens = np.asarray(tokens)
        follows = self.likelihoods(tokens, temperature)[:-1]
        return np.concatenate([[0.0], np.take_along_axis(follows, tokens[1:, None], -1)[:, 0]])

    def weights(self) -> "list[tuple[str, Any]]":
        """Return (name, tensor) of every parameter, as in the model folder. Tied parameters occur once."""
        from whet_weights.stored_names import StoredNames

        held = ((name, parameter.detach()) for name, parameter in self.model.named_parameters())
        return list(StoredNames(self.model).stored(held))
