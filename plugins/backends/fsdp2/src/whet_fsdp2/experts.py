"""Mixtures of experts in training: balance of the load, replay of the sampler's routing, and metrics.

`whet_training.routing` has the formulas. Sequences that cannot change the loss are not computed, and do not count.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from whet.data.batch import Batch, from_sequences
from whet.data.metrics import Metric
from whet.errors import ConfigError
from whet_fsdp2.feed import Feed, feed
from whet_fsdp2.ranks import Ranks
from whet_fsdp2.root import AnyRoot
from whet_ops.routing import Routed, Routers, find_routers, problem_of
from whet_training import routing
from whet_training.experts import COLUMN, ExpertsConfig
from whet_training.layout import Layout, pack, places, used_lengths
from whet_training.routing import Load, Sums


@frozen(eq=False)
class Entered:
    """The tokens of one forward pass."""

    weights: Tensor
    """[T] float32: the number of sequences that each token of the pass stands for, 0 for padding."""
    sampled: Tensor | None = None
    """[U, layers, k] the sampler's experts of each token of each sequence, -1 where they are not known."""
    at: Tensor | None = None
    """[U] where these tokens lie in the pass."""


class Experts:
    """The routers of the trained model."""

    def __init__(self, root: AnyRoot, config: ExpertsConfig, ranks: Ranks, layout: Layout) -> None:
        self.config, self._ranks, self._layout = config, ranks, layout
        self._root = root
        self._routers = find_routers(root.model)
        problem = problem_of(self._routers, root.model, self._few_tokens) if len(self._routers) else "it is dense"
        wanted = config.balance or config.z_loss or config.record or config.replay
        if problem and wanted:
            raise ConfigError(f"backend.experts: {type(root.model).__name__} cannot do this: {problem}")
        if problem:
            for router in self._routers.routers:
                router.undo()
            self._routers = Routers(())
        self._layers = _layer_numbers(root.model, self._routers)
        self._entered: Entered | None = None
        self.counting = False
        """Whether a step counts the routing of forward passes."""

    def __bool__(self) -> bool:
        """Return whether the model has routers whose choices can be recorded."""
        return len(self._routers) > 0

    def _few_tokens(self) -> None:
        tokens = np.arange(2, 9)
        row = {"tokens": tokens, "loss_mask": tokens > 2}
        one = feed(from_sequences([row], prompt_lengths=[1]), self._layout, self._ranks.device, self._ranks.context)
        self._root(one, (self._root.probe,))

    def enter(self, part: Batch | None, one: Feed, weights: str = "policy") -> None:
        """Prepare the next forward pass, of a micro-batch. Only the policy replays: the sampler chose with it."""
        if self.counting:
            self._routers.listen()
        device, rows = self._ranks.device, one.arguments["input_ids"].numel()
        self._routers.replay(None)
        if part is None or one.empty:
            self._entered = Entered(torch.zeros(rows, device=device))
            return
        where, at = places(part, pack(part, self._layout))
        if one.piece is not None:  # ranks share the row; this one passes a piece of it
            mine = (at >= one.piece.begin) & (at < one.piece.end)
            where, at = where[mine], at[mine] - one.piece.begin
        counts = torch.from_numpy(np.bincount(at, minlength=rows).astype(np.float32)).to(device)
        if COLUMN not in part:
            if self.config.replay and self.counting:  # a score of tokens that nobody recorded is the router's own
                routing.refuse_unrecorded()
            self._entered = Entered(counts)
            return
        sampled = self._by_layer(part)[where]
        if self.config.replay and weights == "policy":
            replayed = np.full((rows, *sampled.shape[1:]), -1, np.int16)
            # A prompt that sequences share: a record overwrites what another sequence does not know.
            order = np.argsort((sampled >= 0).all((1, 2)), kind="stable")
            replayed[at[order]] = sampled[order]
            self._routers.replay(torch.from_numpy(replayed).to(device))
        self._entered = Entered(counts, torch.from_numpy(sampled).to(device), torch.from_numpy(at).to(device))

    def _by_layer(self, part: Batch) -> Any:
        """Return the recorded experts [N, routers, k]."""
        every = int(self._root.model.config.get_text_config().num_hidden_layers)
        return routing.by_layer(part, self._layers, self._routers.chosen, every)

    # One optimizer step

    def begin(self, batch: Batch, parts: int, counts: bool, passes: Iterable[None]) -> "Step":
        """Begin a step on this rank's share of a batch, in `parts` micro-batches. `counts`: whether its tokens do.

        `passes` runs the forward pass of one micro-batch after the other. It is used if the balance loss needs loads
        that are not known yet.
        """
        own = float(used_lengths(batch).sum()) if batch.sequences and counts else 0.0
        tokens, total = self._ranks.sum([own, float(parts)])
        step = Step(self, tokens, total, counts)
        config, self.counting = self.config, True
        if config.balance and config.balance_over == "batch" and tokens and self._ranks.max(parts) > 1:
            step.loads = self._recorded_loads(batch, tokens, counts) if config.replay else None
            if step.loads is None:
                step.count(passes)
        return step

    def _recorded_loads(self, batch: Batch, tokens: float, counts: bool) -> Tensor | None:
        """Return the loads [layers, E] that a replay will have. None: the trainer will choose some of the experts."""
        chosen = np.zeros((len(self._routers), self._routers.experts))
        complete = True
        if batch.sequences and COLUMN in batch:
            found = routing.recorded_tokens(batch, self._by_layer(batch), self._routers.experts)
            complete = found is not None
            if complete and counts:
                chosen = found
        if self._ranks.max(int(not complete)):
            return None
        return self._shares(self._ranks.sum(chosen.ravel().tolist()), tokens)

    def loads(self, chosen: Tensor, tokens: float) -> Tensor:
        """Return the share of tokens of each expert over all ranks [layers, E], of each layer or of the whole model."""
        return self._shares(self.sum(chosen.flatten().tolist()), tokens)

    def _shares(self, chosen: list[float], tokens: float) -> Tensor:
        found = torch.tensor(chosen, dtype=torch.float32, device=self._ranks.device)
        return routing.shares_of(self.config, found.view(len(self._routers), self._routers.experts), tokens)

    def sums(self) -> Sums:
        """Return new sums for the metrics of a step."""
        return Sums(len(self._routers), self._routers.experts, self._ranks.device, self.config)

    def routed(self) -> list[Routed]:
        """Return the routing of the last forward pass, of each layer."""
        return self._routers.take()

    @property
    def entered(self) -> "Entered":
        """Return the tokens of the last forward pass."""
        assert self._entered is not None
        return self._entered

    def sum(self, numbers: list[float]) -> list[float]:
        """Return sums over the tokens of forward passes, summed over all ranks."""
        return self._ranks.sum_tokens(numbers)

    def joined(self, values: Tensor) -> Tensor:
        """Return sums over the tokens of a micro-batch, of all ranks that share its sequences."""
        return self._ranks.joined(values)

    @property
    def first(self) -> bool:
        """Return whether this rank reports what is equal on all ranks."""
        return self._ranks.rank == 0


class Step:
    """One optimizer step: adds up loads and metrics over its micro-batches."""

    def __init__(self, experts: Experts, tokens: float, parts: float, counts: bool) -> None:
        self._experts, self._config, self._counts = experts, experts.config, counts
        self._tokens, self._parts = tokens, parts
        self.loads: Tensor | None = None
        """[layers, E] the share of tokens of each expert over the whole batch. None: not counted yet."""
        self._sums = experts.sums()

    @torch.no_grad()
    def count(self, passes: Iterable[None]) -> None:
        """Count the loads of all micro-batches. `passes` runs the forward pass of one after the other."""
        chosen = []
        for _ in passes:
            weights, routed = self._weights(), self._experts.routed()
            chosen.append(torch.stack([routing.tokens_of(one.chosen, weights, one.logits.shape[1]) for one in routed]))
        self.loads = self._experts.loads(torch.stack(chosen).sum(0), self._tokens)

    def _weights(self) -> Tensor:
        weights = self._experts.entered.weights
        return weights if self._counts else torch.zeros_like(weights)

    def add_to(self, objective: Tensor, output: Tensor) -> Tensor:
        """Count the last forward pass, and return the objective of its micro-batch with the weighted terms.

        output: an output of the pass.
        """
        config, weights, routed = self._config, self._weights(), self._experts.routed()
        wanted = (config.balance > 0 or config.z_loss > 0) and self._tokens > 0
        with torch.set_grad_enabled(wanted):
            loads = [routing.load(one.logits, one.chosen, weights) for one in routed]
        for layer, (one, load) in enumerate(zip(routed, loads, strict=True)):
            self._sums.add(layer, load, self._compared(layer, one))
        if not wanted:
            return objective
        # FSDP2 gathers the weights of a layer when a gradient reaches the layer's output, which these terms go past.
        through = output.nan_to_num().sum() * 0.0
        term = self._weighted(loads, float(self._experts.joined(weights.sum())))
        # Each of the ranks that share sequences has the gradient of its own tokens, and the value of all.
        elsewhere = self._experts.joined(term) - term.detach()
        return objective + term + elsewhere + through

    def _weighted(self, loads: list[Load], tokens: float) -> Tensor:
        """Return the weighted losses of all layers. tokens: those of the micro-batch."""
        config, layers = self._config, len(loads)
        chosen = torch.stack([load.chosen for load in loads])
        scale = 1 / self._tokens if config.balance_over == "batch" else 1 / (max(tokens, 1.0) * self._parts)
        if not config.balance:
            shares = torch.zeros_like(chosen)
        elif config.balance_over == "batch":
            if self.loads is None:  # there is one micro-batch on each rank, and this is its forward pass
                self.loads = self._experts.loads(chosen, self._tokens)
            shares = self.loads
        else:
            shares = routing.shares_of(config, self._experts.joined(chosen), tokens)
        if config.balance:
            for load, share in zip(loads, shares, strict=True):
                self._sums.add_balance(load, share, scale)
        terms = [
            routing.term(config, load, share, self._tokens, scale, layers)
            for load, share in zip(loads, shares, strict=True)
        ]
        return torch.stack(terms).sum()

    @torch.no_grad()
    def _compared(self, layer: int, one: Routed) -> Tensor | None:
        """Return how far the trainer's experts of a layer differ from the sampler's. None: these are not known."""
        entered = self._experts.entered
        if entered.sampled is None or entered.at is None or not self._counts:
            return None
        return routing.disagreement(one.chosen, one.own, entered.sampled[:, layer], entered.at)

    def metrics(self) -> dict[str, Metric]:
        """Return the metrics of the step over all ranks, on rank 0."""
        self._experts.counting = False
        whole = self._experts.sum(self._sums.numbers())
        if not self._experts.first:
            return {}
        return self._sums.metrics(whole, self._tokens, replay=self._config.replay)


def _layer_numbers(model: Any, routers: Routers) -> list[int]:
    """Return the layer of each router: the first number in its name."""
    names = {id(module): name for name, module in model.named_modules()}
    numbers = []
    for router in routers.routers:
        numbers.append(next((int(part) for part in names[id(router.module)].split(".") if part.isdigit()), 0))
    return numbers
