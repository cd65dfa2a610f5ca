"""Decode with the model's own code and `transformers`' cache. Works for every model that can generate."""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from whet.data.records import IntArray
from whet_ops.routing import Routers


class PlainDecoder:
    """Decodes with an unchanged `transformers` causal language model."""

    def __init__(self, model: Any, routers: Routers | None = None) -> None:
        """Take the model. routers: its routers, if sessions are to record the experts that they choose."""
        self.model, self.routers = model, routers
        self._last_only = (
            {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
        )

    @property
    def vocab_size(self) -> int:
        """Return the width of the logits."""
        return int(self.model.get_input_embeddings().weight.shape[0])

    def refresh(self) -> None:
        """Do nothing: no tensor is derived from the weights."""

    def free(self) -> int:
        """Return 0: no memory is kept between batches."""
        return 0

    def begin(self, prompts: list[Tensor], owner: Tensor, room: int, lane: int = 0) -> "PlainSession":
        """Return a session whose prompts are computed. owner [B], ascending: the prompt of each row."""
        return PlainSession(self, prompts, owner)

    def forward(self, **arguments: Any) -> Any:
        """Return the model's output, with the logits of the last position if the model can restrict them."""
        if self.routers is not None:
            self.routers.listen()
        return self.model(**arguments, **self._last_only, use_cache=True, return_dict=True)


class PlainSession:
    """A running batch."""

    def __init__(self, decoder: PlainDecoder, prompts: list[Tensor], owner: Tensor) -> None:
        from transformers import DynamicCache

        self._decoder, device = decoder, owner.device
        lengths = torch.tensor([len(p) for p in prompts], device=device)
        width = int(lengths.max())
        tokens = torch.zeros(len(prompts), width, dtype=torch.int64, device=device)
        for row, prompt in enumerate(prompts):
            tokens[row, width - len(prompt) :] = prompt
        self._mask = (torch.arange(width, device=device) >= (width - lengths)[:, None]).long()
        output = decoder.forward(
            input_ids=tokens,
            attention_mask=self._mask,
            position_ids=(self._mask.cumsum(1) - 1).clamp(min=0),
            past_key_values=DynamicCache(config=decoder.model.config),
        )
        self.routed: Any = None
        """The experts of the last tokens [B, layers * k] int16, before `keep`. None: they are not recorded."""
        self.prompts_routed: Sequence[Any] = [
            routed[width - len(prompt) :] for prompt, routed in zip(prompts, self._routed(len(prompts)), strict=False)
        ]
        """The experts of each prompt [prompt, layers * k] int16. Empty: they are not recorded."""
        self._cache = output.past_key_values
        self._position = lengths
        self.logits = output.logits[:, -1]  # [B, V], of the next token
        self.keep(owner)

    def step(self, tokens: Tensor) -> None:
        """Append a token to each row. tokens [B]."""
        self._mask = torch.cat([self._mask, self._mask.new_ones(len(tokens), 1)], 1)
        output = self._decoder.forward(
            input_ids=tokens[:, None],
            attention_mask=self._mask,
            position_ids=self._position[:, None],
            past_key_values=self._cache,
        )
        if self._decoder.routers is not None:
            self.routed = self._routed(len(tokens))[:, 0]
        self._position = self._position + 1
        self.logits = output.logits[:, -1]

    def ended(self, row: int, tokens: IntArray, prompt: int) -> None:
        """Do nothing: `transformers`' cache is not kept."""

    def _routed(self, rows: int) -> Any:
        """Return the experts that the last forward pass chose [rows, tokens of a row, layers * k] int16, or []."""
        if self._decoder.routers is None:
            return []
        found = torch.cat([routed.chosen for routed in self._decoder.routers.take()], 1)
        return found.view(rows, -1, found.shape[1]).to(torch.int16).cpu().numpy()

    def keep(self, rows: Tensor) -> None:
        """Keep only these rows, in this order. A row may appear more than once."""
        self._cache.batch_select_indices(rows)
        self._mask, self._position, self.logits = self._mask[rows], self._position[rows], self.logits[rows]
