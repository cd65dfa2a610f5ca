"""Decode with the model's own code and `transformers`' cache, whose layers hold keys and values, or states.

A state of a linear-attention or Mamba layer sums up all tokens of a row. A model that keeps something else between its
tokens (RWKV, xLSTM, RecurrentGemma, MiniMax) cannot be decoded here, and is refused when it is loaded.
"""

import inspect
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from whet.data.records import IntArray
from whet_ops.rotary import longest_alone
from whet_ops.routing import Routers


class PlainDecoder:
    """Decodes with an unchanged `transformers` causal language model."""

    def __init__(self, model: Any, routers: Routers | None = None) -> None:
        """Take the model. routers: its routers, if sessions are to record the experts that they choose."""
        self.model, self.routers = model, routers
        taken = inspect.signature(model.forward).parameters
        self._last_only = {"logits_to_keep": 1} if "logits_to_keep" in taken else {}
        self.attends = "cache_params" not in taken
        """Whether the model has attention. Mamba has none, another word for the cache, and masks prompts alone."""
        self.last_position = min(filter(None, (max_positions(model), longest_alone(model))), default=2**31) - 1
        """No request goes beyond it. A row that has ended and is still computed stays there: the model may have no
        later position, or compute all rows otherwise from there on.
        """

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

    def forward(self, cache: Any, **arguments: Any) -> Any:
        """Return the model's output, with the logits of the last position if the model can restrict them."""
        if self.routers is not None:
            self.routers.listen()
        arguments |= {"past_key_values" if self.attends else "cache_params": cache, **self._last_only}
        return self.model(**arguments, use_cache=True, return_dict=True)

    @cached_property
    @torch.inference_mode()
    def cache_bytes(self) -> tuple[int, int]:
        """Return the bytes that the cache takes for each token of a row, and for each row; measured on a few tokens."""
        few = torch.arange(4, device=self.model.device)
        layers = self.begin([few], few[:1], 1).cache.layers
        token = sum(part.nbytes for layer in layers for part in _kept(layer))
        states = [state for layer in layers for states in _states(layer) for state in states.values()]
        return token // len(few), sum(state.nbytes for state in states if state is not None)


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
        self.cache = DynamicCache(config=decoder.model.config)
        output = decoder.forward(
            self.cache,
            input_ids=tokens,
            attention_mask=self._mask,
            position_ids=(self._mask.cumsum(1) - 1).clamp(min=0),
        )
        self.routed: Any = None
        """The experts of the last tokens [B, layers * k] int16, before `keep`. None: they are not recorded."""
        self.prompts_routed: Sequence[Any] = [
            routed[width - len(prompt) :] for prompt, routed in zip(prompts, self._routed(len(prompts)), strict=False)
        ]
        """The experts of each prompt [prompt, layers * k] int16. Empty: they are not recorded."""
        self._position = lengths
        self.logits = output.logits[:, -1]  # [B, V], of the next token
        self.keep(owner)

    def step(self, tokens: Tensor) -> None:
        """Append a token to each row. tokens [B]."""
        self._mask = torch.cat([self._mask, self._mask.new_ones(len(tokens), 1)], 1)
        output = self._decoder.forward(
            self.cache,
            input_ids=tokens[:, None],
            attention_mask=self._mask if self._decoder.attends else None,
            position_ids=self._position[:, None],
        )
        if self._decoder.routers is not None:
            self.routed = self._routed(len(tokens))[:, 0]
        self._position = (self._position + 1).clamp(max=self._decoder.last_position)
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
        select(self.cache, rows)
        self._mask, self._position, self.logits = self._mask[rows], self._position[rows], self.logits[rows]


def max_positions(model: Any) -> int:
    """Return the most tokens of a sequence. 0: the model states no limit."""
    return int(getattr(model.config.get_text_config(), "max_position_embeddings", 0) or 0)


def select(cache: Any, rows: Tensor) -> None:
    """Keep only these rows of a cache of `transformers`, in this order. A row may appear more than once."""
    for layer in cache.layers:
        if hasattr(layer, "batch_select_indices"):  # keys and values
            layer.batch_select_indices(rows)
        for states in _states(layer):
            states |= {i: state.index_select(0, rows) for i, state in states.items() if state is not None}


def _states(layer: Any) -> list[dict[int, Tensor | None]]:
    """Return the states of a layer of a cache by their numbers, as the layer holds them. None: not computed yet."""
    return [getattr(layer, name, {}) for name in ("conv_states", "recurrent_states")]


def _kept(layer: Any) -> list[Tensor]:
    """Return what a layer of a cache keeps of each token: keys and values, and those of an indexer if it has one."""
    return [part for part in vars(layer).values() if isinstance(part, Tensor) and part.is_floating_point()]
