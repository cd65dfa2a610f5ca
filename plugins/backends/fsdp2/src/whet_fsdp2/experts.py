"""Mixtures of experts in training: balance of the load, replay of the sampler's routing, and metrics.

    balance loss   E * sum over experts of f * P        f = chosen / tokens, P = mean probability
    z-loss         mean of logsumexp(logits)^2

A token counts once for each sequence that it is part of, if it enters the forward pass. So a shared prompt counts as
often as it would without sharing, and the numbers do not depend on the layout. Sequences that cannot change the loss
are not computed, and do not count.

P is differentiable, f is not. With f of the whole batch known before the first backward pass, the loss is a sum over
tokens, as every other term is:

    E / T * sum over tokens and experts of f * p
"""

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from attrs import define, frozen
from torch import Tensor

from whet.data import metrics
from whet.data.batch import Batch, from_sequences
from whet.data.metrics import Metric
from whet.errors import ConfigError, WhetError
from whet_fsdp2.config import ExpertsConfig
from whet_fsdp2.feed import Feed, feed
from whet_fsdp2.ranks import Ranks
from whet_fsdp2.root import AnyRoot
from whet_ops.routing import COLUMN, Routed, Routers, find_routers, problem_of
from whet_training.layout import Layout, pack, places, used_lengths


@frozen(eq=False)
class Entered:
    """The tokens of one forward pass."""

    weights: Tensor
    """[T] float32: the number of sequences that each token of the pass stands for, 0 for padding."""
    sampled: Tensor | None = None
    """[U, layers, k] the sampler's experts of each token of each sequence, -1 where they are not known."""
    at: Tensor | None = None
    """[U] where these tokens lie in the pass."""


@define(eq=False)
class _Sums:
    """Sums over the tokens of this rank."""

    chosen: Tensor
    """[layers, E] tokens of each expert."""
    chances: Tensor
    """[layers, E] probabilities of each expert."""
    scalars: Tensor
    """[6]: tokens; entropies and squares of logsumexp, as means over layers; tokens of all layers that the sampler's
    experts are known of, and the shares of those experts that did not compute, and that the router would not choose."""


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

    def enter(self, part: Batch | None, one: Feed) -> None:
        """Prepare the next forward pass, of a micro-batch."""
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
        weights = torch.from_numpy(np.bincount(at, minlength=rows).astype(np.float32)).to(device)
        if COLUMN not in part:
            if self.config.replay and self.counting:  # a score of tokens that nobody recorded is the router's own
                raise WhetError(
                    f"backend.experts.replay: the batch has no column {COLUMN!r}; a generator that records the experts "
                    "must have sampled it"
                )
            self._entered = Entered(weights)
            return
        sampled = self._by_layer(part)[where]
        if self.config.replay:
            replayed = np.full((rows, *sampled.shape[1:]), -1, np.int16)
            replayed[at] = sampled
            self._routers.replay(torch.from_numpy(replayed).to(device))
        self._entered = Entered(weights, torch.from_numpy(sampled).to(device), torch.from_numpy(at).to(device))

    def _by_layer(self, part: Batch) -> Any:
        """Return the recorded experts [N, routers, k]. An engine may have recorded layers without experts, too."""
        column, routers, k = np.asarray(part[COLUMN]), len(self._routers), self._routers.chosen
        every = int(self._root.model.config.get_text_config().num_hidden_layers)
        if column.ndim == 2 and column.shape[1] == routers * k:
            return column.reshape(-1, routers, k)
        if column.ndim == 2 and column.shape[1] == every * k:
            return column.reshape(-1, every, k)[:, self._layers]
        raise WhetError(
            f"the column {COLUMN!r} has shape {list(column.shape)}, wanted [tokens, {routers * k}]: {k} experts of "
            f"each of {routers} layers; does the generator run the same model?"
        )

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
            used, lengths = used_lengths(batch), np.asarray(batch["lengths"])
            position = np.arange(batch.tokens) - np.repeat(np.cumsum(lengths) - lengths, lengths)
            ids = self._by_layer(batch)[position < np.repeat(used, lengths)]
            complete = bool((ids >= 0).all())
            if complete and counts:
                layers = range(len(chosen))
                chosen = np.stack([np.bincount(ids[:, i].ravel(), minlength=chosen.shape[1]) for i in layers])
        if self._ranks.max(int(not complete)):
            return None
        return self._shares(self._ranks.sum(chosen.ravel().tolist()), tokens)

    def loads(self, chosen: Tensor, tokens: float) -> Tensor:
        """Return the share of tokens of each expert over all ranks [layers, E], of each layer or of the whole model."""
        return self._shares(self.sum(chosen), tokens)

    def _shares(self, chosen: list[float], tokens: float) -> Tensor:
        found = torch.tensor(chosen, dtype=torch.float32, device=self._ranks.device) / tokens
        return self.pooled(found.view(len(self._routers), self._routers.experts))

    def pooled(self, loads: Tensor) -> Tensor:
        """Return loads [layers, E] of each layer, or of the whole model if the config takes the layers together."""
        return loads if self.config.balance_of == "layer" else loads.mean(0, keepdim=True).expand_as(loads)

    def routed(self) -> list[Routed]:
        """Return the routing of the last forward pass, of each layer."""
        return self._routers.take()

    @property
    def entered(self) -> "Entered":
        """Return the tokens of the last forward pass."""
        assert self._entered is not None
        return self._entered

    def sum(self, numbers: Tensor) -> list[float]:
        """Return sums over the tokens of forward passes, summed over all ranks."""
        return self._ranks.sum_tokens(numbers.flatten().tolist())

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
        self._sums: _Sums | None = None

    @torch.no_grad()
    def count(self, passes: Iterable[None]) -> None:
        """Count the loads of all micro-batches. `passes` runs the forward pass of one after the other."""
        chosen = [self._chosen(self._experts.routed()) for _ in passes]
        self.loads = self._experts.loads(torch.stack(chosen).sum(0), self._tokens)

    def _weights(self) -> Tensor:
        weights = self._experts.entered.weights
        return weights if self._counts else torch.zeros_like(weights)

    def _chosen(self, routed: list[Routed]) -> Tensor:
        """Return the tokens of each expert [layers, E], in float64."""
        weights = self._weights().double()
        found = []
        for one in routed:
            room = weights.new_zeros(one.logits.shape[1])
            spread = weights[:, None].expand(one.chosen.shape).reshape(-1)
            found.append(room.index_add_(0, one.chosen.reshape(-1), spread))
        return torch.stack(found)

    def add_to(self, objective: Tensor, output: Tensor) -> Tensor:
        """Count the last forward pass, and return the objective of its micro-batch with the weighted terms.

        output: an output of the pass.
        """
        config, weights, routed = self._config, self._weights(), self._experts.routed()
        wanted = (config.balance > 0 or config.z_loss > 0) and self._tokens > 0
        with torch.set_grad_enabled(wanted):
            logits = [one.logits.float() if wanted else one.logits.detach().float() for one in routed]
            logprobs = [each.log_softmax(-1) for each in logits]
            chances = torch.stack([weights @ each.exp() for each in logprobs])
            squares = torch.stack([weights @ each.logsumexp(-1).square() for each in logits]).sum() / len(logits)
        chosen = self._chosen(routed)
        self._add(routed, chosen, chances.detach(), squares.detach(), [each.detach() for each in logprobs])
        if not wanted:
            return objective
        # FSDP2 gathers the weights of a layer when a gradient reaches the layer's output, which these terms go past.
        through = output.nan_to_num().sum() * 0.0
        tokens = float(self._experts.joined(weights.sum()))
        term = self._weighted(chosen, chances, squares, tokens)
        # Each of the ranks that share sequences has the gradient of its own tokens, and the value of all.
        elsewhere = self._experts.joined(term) - term.detach()
        return objective + term + elsewhere + through

    def _weighted(self, chosen: Tensor, chances: Tensor, squares: Tensor, tokens: float) -> Tensor:
        config = self._config
        term = squares * (config.z_loss / self._tokens)
        if not config.balance:
            return term
        if config.balance_over == "batch":
            if self.loads is None:  # there is one micro-batch on each rank, and this is its forward pass
                self.loads = self._experts.loads(chosen, self._tokens)
            loads, scale = self.loads, 1 / self._tokens
        else:
            loads = self._experts.pooled((self._experts.joined(chosen) / max(tokens, 1.0)).float())
            scale = 1 / (max(tokens, 1.0) * self._parts)
        layers, experts = chances.shape
        return term + (loads * chances).sum() * (config.balance * scale * experts / layers)

    @torch.no_grad()
    def _add(
        self, routed: list[Routed], chosen: Tensor, chances: Tensor, squares: Tensor, logprobs: list[Tensor]
    ) -> None:
        weights = self._weights()
        entropy = torch.stack([weights @ -(each.exp() * each).sum(-1) for each in logprobs]).sum() / len(logprobs)
        compared, different, overruled = self._disagreement(routed)
        scalars = torch.stack([weights.sum(), entropy, squares, compared, different, overruled]).double()
        if self._sums is None:
            self._sums = _Sums(chosen, chances.double(), scalars)
        else:
            self._sums.chosen += chosen
            self._sums.chances += chances.double()
            self._sums.scalars += scalars

    def _disagreement(self, routed: list[Routed]) -> Tensor:
        """Return [3]: compared tokens, and the sums of the shares of their experts that did not compute, or that the
        router itself would not choose. Tokens of all layers are added up.
        """
        entered = self._experts.entered
        total = entered.weights.new_zeros(3)
        if entered.sampled is None or entered.at is None or not self._counts:
            return total
        for layer, one in enumerate(routed):
            sampled = entered.sampled[:, layer].long()
            known = (sampled[:, 0] >= 0).float()
            shares = [_share_missing(chosen[entered.at], sampled) for chosen in (one.chosen, one.own)]
            total += torch.stack([known.sum(), *(known @ share for share in shares)])
        return total

    def metrics(self) -> dict[str, Metric]:
        """Return the metrics of the step over all ranks, on rank 0."""
        self._experts.counting = False
        if self._sums is None:  # no sequence has a target, on any rank
            return {}
        sums, shape = self._sums, self._sums.chosen.shape
        parts = (sums.chosen, sums.chances, sums.scalars)
        whole = np.asarray(self._experts.sum(torch.cat([part.flatten() for part in parts])))
        if not self._experts.first:
            return {}
        size = sums.chosen.numel()
        chosen, chances, scalars = whole[:size].reshape(shape), whole[size : 2 * size].reshape(shape), whole[2 * size :]
        tokens, entropy, squares, compared, different, overruled = scalars
        if not tokens:
            return {}
        loads = chosen / chosen.sum(1, keepdims=True) * shape[1]  # 1: as many tokens as every other expert
        balance = shape[1] * (chosen / tokens * chances / tokens).sum(1).mean()
        found = {
            "experts/load_max": metrics.mean(loads.max(1).mean()),
            "experts/load_min": metrics.mean(loads.min(1).mean()),
            "experts/idle": metrics.mean(float((chosen == 0).mean())),
            "experts/entropy": metrics.mean(entropy / tokens),
            "experts/balance_loss": metrics.mean(balance),
            "experts/z_loss": metrics.mean(squares / tokens),
        }
        if compared:
            found["routing/disagreement"] = metrics.mean(different / compared)
            if self._config.replay:
                found["routing/overruled"] = metrics.mean(overruled / compared)
        return found


def _share_missing(chosen: Tensor, sampled: Tensor) -> Tensor:
    """Return the share of the sampler's experts that were not chosen. chosen, sampled [T, k] -> [T]."""
    return 1 - (chosen[:, :, None] == sampled[:, None]).any(1).float().mean(1)


def _layer_numbers(model: Any, routers: Routers) -> list[int]:
    """Return the layer of each router: the first number in its name."""
    names = {id(module): name for name, module in model.named_modules()}
    numbers = []
    for router in routers.routers:
        numbers.append(next((int(part) for part in names[id(router.module)].split(".") if part.isdigit()), 0))
    return numbers
