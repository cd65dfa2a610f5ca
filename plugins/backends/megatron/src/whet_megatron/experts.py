"""Mixtures of experts in training: balance of the load, replay of the sampler's routing, and metrics.

`whet_training.routing` has the formulas. Here are the routers of a rank, which are those of its stages, and see its
share of the tokens. The last stage alone computes the objective, so each router attaches its own part of the losses to
its probabilities, and the backward pass adds their gradient on whichever stage that is.

    forward pass      load of the layer -> its part of both losses, attached; sums for the metrics
    recomputed pass   the same part again, for now there is a graph; nothing is counted twice

Passes are recomputed in the order in which they came, so what each of them needs waits in a queue.
"""

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from attrs import define, field
from torch import Tensor

from whet.data.batch import Batch
from whet.data.metrics import Metric
from whet_megatron.config import MegatronConfig
from whet_megatron.feed import Entered
from whet_megatron.groups import Ranks
from whet_training import routing
from whet_training.experts import COLUMN
from whet_training.layout import used_lengths
from whet_training.routing import Sums


def _let_go(layer: Any, given: Any, result: Any) -> None:
    """Forget the probabilities of a pass that has run: with them Megatron's dispatcher keeps the pass's whole graph.

    The graph would live until the next pass, and a model whose last pass it is would never be freed.
    """
    layer.token_dispatcher.probs = None


@define(eq=False)
class Pass:
    """The tokens of one forward pass, as this rank's routers see them."""

    weights: Tensor
    """[T] float32: 1 for tokens that count, 0 for padding."""
    sampled: Tensor | None = None
    """[U, layers, k] the sampler's experts, -1 where they are not known."""
    at: Tensor | None = None
    """[U] the places of these tokens among the T."""
    replayed: Tensor | None = None
    """[T, layers, k] experts to compute with, -1 where the router chooses."""
    shares: dict[int, tuple[Tensor, float]] = field(factory=dict)
    """By layer: the shares of tokens of each expert in the balance loss, and the scale of the probabilities."""


@define(eq=False)
class Step:
    """One optimizer step on this rank."""

    tokens: float
    """Tokens of the batch over all ranks."""
    parts: float
    """Micro-batches of the batch over all ranks."""
    counts: bool
    """Whether this rank's tokens count."""
    sums: Sums
    value: Tensor
    """[] float64, the weighted losses of this rank's layers and tokens."""
    counted: Tensor | None = None
    """[layers, E] float64: while loads are counted before the step, the tokens of each expert."""
    loads: Tensor | None = None
    """[layers, E] the share of tokens of each expert over the whole batch. None: each layer finds its own."""


class Experts:
    """The routers that a rank holds of the trained model."""

    def __init__(self, stages: list[Any], architecture: Any, config: MegatronConfig, ranks: Ranks) -> None:
        self.config, self.architecture = config.experts, architecture
        self.recomputes = config.gradient_checkpointing is True
        self._ranks = ranks
        self.step: Step | None = None
        """The step that is computed. None: passes are scores."""
        self.current = Pass(torch.zeros(0))
        for stage in stages:
            for layer in stage.decoder.layers:
                layer.mlp.register_forward_hook(_let_go)
        self._watches = [
            LayerWatch(self, layer.mlp.router, layer.layer_number - 1)
            for stage in stages
            for layer in stage.decoder.layers
        ]

    def enter(self, entered: Entered) -> None:
        """Prepare the next forward pass of a stage."""
        device = self._ranks.device
        weights = np.zeros(entered.rows, np.float32)
        weights[entered.at] = 1.0
        self.current = Pass(torch.from_numpy(weights).to(device))
        if entered.sampled is None or not len(entered.sampled):
            return
        self.current.sampled = torch.from_numpy(entered.sampled).to(device)
        self.current.at = torch.from_numpy(entered.at).to(device)
        if self.config.replay:
            replayed = np.full((entered.rows, *entered.sampled.shape[1:]), -1, np.int16)
            replayed[entered.at] = entered.sampled
            self.current.replayed = torch.from_numpy(replayed).to(device)

    def leave(self) -> None:
        """Forget the last forward pass. Whoever runs the model next, to sample from it, has other tokens."""
        self.current = Pass(torch.zeros(0))

    def begin(self, batch: Batch, parts: int, counts: bool, passes: Callable[[], None]) -> None:
        """Begin a step on this rank's share of a batch, in `parts` micro-batches. `counts`: whether its tokens do.

        `passes` runs all forward passes without gradient. It is called if the balance loss needs loads that are not
        known yet.
        """
        arch, config, device = self.architecture, self.config, self._ranks.device
        if config.replay and batch.sequences and COLUMN not in batch:
            routing.refuse_unrecorded()
        for watch in self._watches:
            watch.waiting.clear()
        own = float(used_lengths(batch).sum()) if batch.sequences and counts else 0.0
        tokens, total = self._ranks.sum([own, float(parts)])
        sums = Sums(arch.layers, arch.experts, device, config)
        step = Step(tokens, total, counts, sums, torch.zeros((), dtype=torch.float64, device=device))
        # A single pass of each rank finds the loads of its layers by itself.
        early = config.balance_of == "model" or self._ranks.max(parts) > 1
        if config.balance and config.balance_over == "batch" and tokens and early:
            step.loads = self._recorded_loads(batch, step) if config.replay else None
            if step.loads is None:
                step.counted = torch.zeros(arch.layers, arch.experts, dtype=torch.float64, device=device)
                self.step = step
                passes()
                found = self._ranks.sum_all(step.counted.flatten().tolist())
                step.loads, step.counted = self._shares(found, tokens), None
        self.step = step

    def _recorded_loads(self, batch: Batch, step: Step) -> Tensor | None:
        """Return the loads [layers, E] that a replay will have. None: the trainer will choose some of the experts."""
        arch, complete = self.architecture, True
        chosen = np.zeros((arch.layers, arch.experts))
        if batch.sequences:
            ids = routing.by_layer(batch, range(arch.layers), arch.experts_per_token, arch.layers)
            found = routing.recorded_tokens(batch, ids, arch.experts)
            complete = found is not None
            if complete and step.counts:
                chosen = found
        if self._ranks.max(int(not complete)):
            return None
        return self._shares(self._ranks.sum(chosen.ravel().tolist()), step.tokens)

    def _shares(self, chosen: list[float], tokens: float) -> Tensor:
        arch = self.architecture
        found = torch.tensor(chosen, dtype=torch.float32, device=self._ranks.device)
        return routing.shares_of(self.config, found.view(arch.layers, arch.experts), tokens)

    def end(self, reports: bool) -> tuple[float, dict[str, Metric]]:
        """End the step. Returns the weighted losses over all ranks, and the metrics where the rank `reports`."""
        step, self.step = self.step, None
        assert step is not None
        value, *whole = self._ranks.sum_all([float(step.value), *step.sums.numbers()])
        return value, step.sums.metrics(whole, step.tokens, replay=self.config.replay) if reports else {}


class LayerWatch:
    """Sees the passes of the router of one layer. Implements `whet_megatron.router.Watch`."""

    def __init__(self, experts: Experts, router: Any, layer: int) -> None:
        self._experts, self._router, self._layer = experts, router, layer
        self.waiting: deque[Pass] = deque()
        """Passes that will be recomputed."""
        self._pass = experts.current
        self._again = False
        self._chosen = self._own = torch.zeros(0)
        router.watch_by(self)

    def begin(self) -> None:
        """Find out whether the pass is recomputed, and which one it is."""
        experts = self._experts
        learns = experts.recomputes and experts.step is not None and experts.step.counted is None
        self._again = learns and torch.is_grad_enabled()
        self._pass = self.waiting.popleft() if self._again else experts.current
        if learns and not self._again:
            self.waiting.append(self._pass)

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: Any, group_topk: Any, default_compute_topk: Any
    ) -> tuple[Tensor, Tensor]:
        """Return scores and numbers of the recorded experts, where there are any, else of the best."""
        values, self._own = default_compute_topk(scores, topk, num_groups, group_topk)
        self._chosen = self._own
        if self._pass.replayed is None:
            return values, self._own
        recorded = self._pass.replayed[:, self._layer].long()
        self._chosen = torch.where(recorded >= 0, recorded, self._own)
        return scores.gather(1, self._chosen), self._chosen

    def end(self, logits: Tensor, probs: Tensor) -> Tensor:
        """Count the pass in the step, and return the probabilities with the losses of the layer attached."""
        step, config = self._experts.step, self._experts.config
        if step is None:
            return probs
        weights = self._pass.weights if step.counts else torch.zeros_like(self._pass.weights)
        if step.counted is not None:
            step.counted[self._layer] += routing.tokens_of(self._chosen, weights, logits.shape[1])
            return probs
        wanted = (config.balance > 0 or config.z_loss > 0) and step.tokens > 0
        with torch.set_grad_enabled(wanted and torch.is_grad_enabled()):
            load = routing.load(logits, self._chosen, weights)
        if not self._again:
            step.sums.add(self._layer, load, self._compared() if step.counts else None)
            if wanted:
                self._pass.shares[self._layer] = self._shares(step, load)
            if wanted and config.balance:
                step.sums.add_balance(load, *self._pass.shares[self._layer])
        if not wanted:
            return probs
        shares, scale = self._pass.shares[self._layer]
        term = routing.term(config, load, shares, step.tokens, scale, self._experts.architecture.layers)
        if not self._again:
            step.value += term.detach()
        if not term.requires_grad:
            return probs
        from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

        attached: Tensor = MoEAuxLossAutoScaler.apply(probs, term)
        return attached

    @torch.no_grad()
    def _compared(self) -> Tensor | None:
        """Return how far the experts of the pass differ from the sampler's. None: these are not known."""
        if self._pass.sampled is None or self._pass.at is None:
            return None
        return routing.disagreement(self._chosen, self._own, self._pass.sampled[:, self._layer], self._pass.at)

    def _shares(self, step: Step, load: routing.Load) -> tuple[Tensor, float]:
        """Return the shares of tokens of each expert [E], over the batch or the micro-batch, and the scale."""
        if self._experts.config.balance_over == "batch":
            if step.loads is not None:
                return step.loads[self._layer], 1 / step.tokens
            return (_joined(load.chosen, self._router.tp_dp_cp_group) / step.tokens).float(), 1 / step.tokens
        chosen = _joined(load.chosen, self._router.tp_cp_group)
        tokens = max(float(chosen.sum()) / self._chosen.shape[1], 1.0)
        return (chosen / tokens).float(), 1 / (tokens * step.parts)


def _joined(chosen: Tensor, group: Any) -> Tensor:
    """Return the sum of a tensor over the ranks of a group."""
    if group.size() == 1:
        return chosen
    found = chosen.clone()
    torch.distributed.all_reduce(found, group=group)
    return found
