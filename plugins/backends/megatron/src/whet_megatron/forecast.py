"""Closed formulas for the peaks of a rank of each pipeline stage, and what can be changed to lower them. No torch.

One layer keeps for the backward pass, for each token of a rank, with hidden size H, queries Q and keys K of all heads,
feed-forward size I, and bytes b of a number in the forward pass (counted in plain layers, and read from the code of
Transformer Engine, whose kernels no CPU has):

                    Transformer Engine                    plain layers, a test vehicle
    norms           2 x 2 b H                             2 x (8 + b) H, computed in float32
    attention       b (2 Q + 3 K) + 4 heads               b Q more, rotations, and a mask of all tokens of a sequence
    feed-forward    3 b I                                 5 b I
    experts         b k (H + 4 I), k experts a token      b k (H + 6 I)

    with adapters   the weights are frozen: a layer keeps its input for its adapters alone, a norm what it turns, and
                    where an adapter follows, the norm is computed for it once more; experts keep their inputs only if
                    they have adapters

    selective       without the mask and the sums of attention
    checkpointing   b H

A pipeline rank keeps the activations of several passes: stage p of P of P - p passes (1F1B, Narayanan et al. 2021,
arXiv:2104.04473, section 2.2), with v virtual stages of 2 (P - p - 1) + (v - 1) P + 1 runs of layers.
"""

from collections.abc import Iterator
from math import ceil

from attrs import frozen

from whet.config.structure import structure
from whet.data.model_info import DTYPE_BYTES
from whet_megatron import memory
from whet_megatron.architecture import Architecture, read
from whet_megatron.config import MegatronConfig
from whet_megatron.lora_targets import Adapted, adapted
from whet_megatron.parallel import ParallelConfig, padded_rows
from whet_memory.case import Case, Peak, Peaks, Saving, Sizes
from whet_training.heads import known_teacher
from whet_training.lora_config import computed

CHUNK_BYTES = 128 << 20
"""See `whet_ops.logprobs`, which imports torch."""
BUCKET_BYTES = 256 << 20
"""See `whet_weights.bucket_stream`."""
PROCESS_BYTES = 16 << 20
"""What allocator and libraries of a process on a CPU take beside tensors: 8 to 49 MiB were measured."""


def sizes_of(config: MegatronConfig, ranks: int) -> Sizes:
    """Return the sizes of the parallel axes for a number of ranks."""
    of = config.parallel
    data = max(1, ranks // (of.tensor * of.context * of.pipeline))
    return Sizes(data, of.tensor, of.context, of.expert, pipeline=of.pipeline)


@frozen
class Stage:
    """A rank of a pipeline stage: what the formulas count with."""

    case: Case
    config: MegatronConfig
    model: Architecture

    @property
    def of(self) -> ParallelConfig:
        """Return the sizes of the parallel axes."""
        return self.config.parallel

    @property
    def number(self) -> int:
        """Return the bytes of a number in the forward pass."""
        return DTYPE_BYTES[self.case.model.dtype]

    @property
    def low(self) -> bool:
        """Return whether the forward pass computes in 16 bits."""
        return self.number < 4

    @property
    def plain(self) -> bool:
        """Return whether layers are plain PyTorch modules."""
        return self.case.device == "cpu" or self.config.layers == "test"

    @property
    def layers(self) -> int:
        """Return the decoder layers of this stage."""
        return self.model.layers // self.of.pipeline

    @property
    def rank(self) -> int:
        """Return the rank of each adapter. 0: there is none."""
        return self.config.lora.rank if self.config.lora is not None else 0

    @property
    def last(self) -> bool:
        """Return whether this is the last stage, which has the head."""
        return self.case.stage == self.of.pipeline - 1

    @property
    def adapted(self) -> tuple[Adapted, ...]:
        """Return the layers with adapters. Of a model that is not trained, there are none without `lora.adapter`."""
        lora = computed(self.config.lora, self.case.trained)
        return tuple(adapted(lora, self.case.model, self.of, self.case.stage)) if lora else ()

    @property
    def linears(self) -> tuple[Adapted, ...]:
        """Return the linear layers with adapters."""
        return tuple(one for one in self.adapted if not one.experts)

    @property
    def stacks(self) -> tuple[Adapted, ...]:
        """Return the layers of experts with adapters."""
        return tuple(one for one in self.adapted if one.experts)

    @property
    def full(self) -> bool:
        """Return whether all weights are trained."""
        return self.case.trained and self.config.lora is None

    @property
    def trained(self) -> tuple[int, int]:
        """Return the trained parameters of this rank: those that all data-parallel ranks share, and those of experts
        that are over ranks.
        """
        if not self.case.trained:
            return 0, 0
        if self.config.lora is not None:
            dense = sum(one.parameters for one in self.linears) + self.value * self.last * self.model.hidden
            return dense, sum(one.parameters for one in self.stacks)
        return self.held

    @property
    def held(self) -> tuple[int, int]:
        """Return the parameters of this rank outside of experts, and those of experts. Adapters do not count."""
        return memory.held(self.of, self.model, self.config.vocabulary_multiple, self.case.stage, value=self.value)

    @property
    def value(self) -> bool:
        """Return whether the head gives one number for each token."""
        return self.config.head == "value"

    @property
    def tokens(self) -> int:
        """Return the tokens of a pass on one rank."""
        return ceil(self.case.tokens / self.of.context)

    @property
    def rows(self) -> int:
        """Return the rows of embedding and head on one rank."""
        return padded_rows(self.model.vocabulary, self.of.tensor, self.config.vocabulary_multiple)

    @property
    def outer(self) -> int:
        """Return the ranks between which the tokens of norms and residuals are split."""
        return self.of.tensor if self.of.sequence else 1


def formulas(case: Case) -> Peaks:
    """Return the peaks of each phase on a rank of the stage `case.stage`."""
    config = structure(dict(case.settings), MegatronConfig, None)
    model = read(case.model)
    stage = Stage(case, config, model)
    copies = 1 + (config.reference and config.lora is None)
    frozen = stage.number * copies * sum(stage.held) + _teacher(stage)
    if config.lora is not None:  # in float32, so that AdamW has no copies
        frozen += 4 * (sum(stage.trained) if case.trained else sum(one.parameters for one in stage.adapted))
    gradients = 4 * sum(stage.trained)
    shared = memory.state(config.parallel, case.sizes.ranks, *stage.trained, sharded=config.optimizer.distributed)
    state = (12 if stage.low and stage.full else 8) * shared
    gpu = case.device == "gpu"
    idle = frozen + gradients + state + PROCESS_BYTES * (not gpu)
    matrix = stage.rows * config.parallel.tensor * model.hidden
    whole = 4 * max(matrix, 3 * model.hidden * model.mlp)  # gathered, and beside it that of other stages
    peaks: dict[str, Peak] = {
        # Trained weights are copied into Megatron's buffer, beside which that of gradients is there already.
        "loading": Peak(frozen + gradients + stage.number * sum(stage.trained)),
        "idle": Peak(idle),
        "weight_sync": Peak(idle + whole * (case.sizes.ranks > 1 or bool(stage.adapted)) + BUCKET_BYTES * gpu),
        "asleep": Peak(0, frozen + state if gpu else 0),
    }
    if case.trained:
        peaks["train"] = Peak(idle + max(_training(stage), _copied(stage, 4)))
        number = stage.number if stage.full else 4
        peaks["optimizer"] = Peak(idle + max(_stepping(stage, shared), _copied(stage, number)))
    else:
        peaks["score"] = Peak(idle + max(_passing(stage), _head(stage, backward=False)))
    return peaks  # type: ignore[return-value]  # the keys are phases


def _teacher(stage: Stage) -> int:
    """Return the bytes of a teacher's weights, and of its hidden states at all tokens of a step."""
    config = stage.config
    if not config.teacher:
        return 0
    found = known_teacher(config.teacher, stage.case.model)
    model = stage.model if found is None else read(found)
    weights = sum(memory.held(config.parallel, model, config.vocabulary_multiple, stage.case.stage))
    hidden = max(1, stage.case.passes) * stage.tokens * model.hidden if stage.last else 0
    return stage.number * (weights + hidden)


def in_flight(stage: Stage) -> int:
    """Return the runs of layers whose activations a rank keeps at a time."""
    of, passes = stage.of, stage.case.passes
    after = of.pipeline - 1 - stage.case.stage
    if of.virtual == 1:
        return min(after + 1, passes or after + 1)
    runs = 2 * after + (of.virtual - 1) * of.pipeline + 1
    return min(runs, ceil(passes / of.pipeline) * of.pipeline * of.virtual if passes else runs)


def _training(stage: Stage) -> int:
    """Return the most bytes of forward and backward passes, beyond what is held between them."""
    run = _run(stage)
    # The backward pass of a layer begins while all of its own activations are there.
    kept = in_flight(stage) * run + (_recomputed(stage) if stage.config.gradient_checkpointing else 0)
    begins = in_flight(stage) * run + (_final(stage) if stage.last else 0)
    return max(kept + _gradients(stage), begins + (_head(stage, backward=True) if stage.last else 0))


def _copied(stage: Stage, number: int) -> int:
    """Return the bytes of the copy that gloo makes where the distributed optimizer adds gradients up, and where it
    gathers weights: of all at once that the same ranks share. `number`: bytes of one of them.
    """
    if stage.case.device != "cpu" or not stage.config.optimizer.distributed:
        return 0
    return number * (sum if stage.of.expert == 1 else max)(stage.trained)


def _run(stage: Stage) -> int:
    """Return the bytes that one run of layers keeps of one pass."""
    of, hidden = stage.of, stage.number * stage.tokens * stage.model.hidden // stage.outer
    layers = stage.model.layers // of.stages
    kept = _kept(stage)
    # What came from the stage before and, where nothing frees it, what goes to the next one.
    sent = hidden * ((of.pipeline > 1) + (of.pipeline > 1 and stage.plain))
    return layers * kept + sent


def _kept(stage: Stage) -> int:
    """Return the bytes that one layer keeps of one pass for its backward pass."""
    if stage.config.gradient_checkpointing is True:
        return stage.number * stage.tokens * stage.model.hidden // stage.outer
    whole = _layer(stage)
    return whole - _attention_sums(stage) if stage.config.gradient_checkpointing == "selective" else whole


def _recomputed(stage: Stage) -> int:
    """Return the bytes that are computed again for the backward pass of one layer."""
    return _layer(stage) if stage.config.gradient_checkpointing is True else _attention_sums(stage)


def _layer(stage: Stage) -> int:
    """Return the bytes of the activations of one layer that its backward pass needs."""
    model, number, tensor = stage.model, stage.number, stage.of.tensor
    query, key = model.heads * model.head_dim, model.kv_heads * model.head_dim
    per_token = _norms(stage) * model.hidden / stage.outer
    # Of all heads: queries, keys and values as one tensor, both rotated, the result, which the next product keeps.
    per_token += number * (2 * query + 3 * key) / tensor
    if model.qk_norm:
        per_token += ((4 + number) * query + (4 + number * stage.low) * key) / tensor
    if stage.plain:
        per_token += 4 * number * model.head_dim  # sines and cosines
    if stage.of.context > 1:  # keys and values of all ranks
        per_token += 2 * number * key * stage.of.context / tensor
    per_token += _feed_forward(stage)
    per_token += number * stage.rank * sum(one.count for one in stage.linears) / stage.layers
    return round(per_token * stage.tokens) + _attention_sums(stage) + _adapters(stage)


def _norms(stage: Stage) -> float:
    """Return the bytes that both norms of a layer keep of a number of a token."""
    number = stage.number
    if stage.full or not stage.case.trained:
        return 2 * ((8 + number) if stage.plain else 2 * number)
    again = sum(one.rule.cut != "columns" for one in stage.linears) / stage.layers
    if stage.plain:
        return 2 * 4 + again * (number + 4 * stage.low)
    return (2 + again) * number


def _adapters(stage: Stage) -> int:
    """Return the bytes of the matrices that the adapters of one layer multiply with."""
    numbers = sum(one.count * (one.inputs + one.outputs) for one in stage.linears)
    # Of experts, A is in its own dtype where the model computes in float32, and is not copied.
    numbers += sum(one.experts * (one.inputs * stage.low + one.outputs) for one in stage.stacks)
    return round(stage.number * stage.rank * numbers / stage.layers)


def _feed_forward(stage: Stage) -> float:
    """Return the bytes that a token's feed-forward layer keeps."""
    model, number = stage.model, stage.number
    fused: float = 0 if stage.plain else 2
    if not model.experts:
        if stage.config.lora is not None:  # the input of the last matrix is kept for its adapter alone
            fused += 1 - sum(one.rule.name.endswith("linear_fc2.weight") for one in stage.linears) / stage.layers
        return number * (5 - fused) * model.mlp / stage.of.tensor
    # Tokens of all tensor parallel ranks meet at the experts of one of them, each as often as it has experts there.
    copies = model.experts_per_token / stage.of.tensor if stage.outer > 1 else model.experts_per_token
    kept = (5 - fused) * model.expert_mlp  # without what the gradients of weights need
    if stage.full or stage.stacks or not stage.case.trained:
        kept += model.hidden + model.expert_mlp
    kept += stage.rank * len(stage.stacks) / stage.layers
    return number * copies * kept + 5 * model.experts


def _attention_sums(stage: Stage) -> int:
    """Return the bytes of attention that `selective` computes again: sums of each head, and of plain layers results by
    sequence and a mask, in which each token of a rank has a number for each token of its sequence.
    """
    sums = 4 * stage.model.heads // stage.of.tensor
    if stage.plain:
        results = stage.model.heads * stage.model.head_dim // stage.of.tensor
        sums += stage.number * (results + (stage.case.longest or stage.case.tokens))
    return stage.tokens * sums


def _final(stage: Stage) -> int:
    """Return the bytes that the last norm keeps, and the hidden states that the head reads."""
    norm = (8 * stage.full + 4 * (not stage.full) + stage.number) if stage.plain else 2 * stage.number
    return stage.tokens * stage.model.hidden * norm // stage.outer + stage.number * stage.tokens * stage.model.hidden


def _gradients(stage: Stage) -> int:
    """Return the bytes of gradients that live a moment in the backward pass of one layer."""
    model, tensor = stage.model, stage.of.tensor
    width = model.experts_per_token * model.expert_mlp if model.experts else model.mlp / tensor
    one = 3 * model.hidden * model.expert_mlp if model.experts else 2 * model.hidden * model.mlp / tensor
    tied = stage.rows * model.hidden if model.tied and stage.of.pipeline == 1 and not stage.value else 0
    one, tied = (one, tied) if stage.full else (0, 0)
    return round(stage.number * (stage.tokens * (2 * model.hidden + 3 * width) + one + tied))


def _passing(stage: Stage) -> int:
    """Return the bytes of a forward pass of which nothing is kept."""
    return _layer(stage) // 2


def _head(stage: Stage, *, backward: bool) -> int:
    """Return the most bytes of the head: logits of one chunk of tokens, and gradients of its weight."""
    if stage.value or not stage.last:
        return 0
    rows = ceil(stage.model.vocabulary / stage.of.tensor)
    divergence = any(name.startswith(("kl_", "jensen")) for name in stage.case.outputs)
    chunk = stage.config.logprob_chunk or max(1, CHUNK_BYTES // ((8 if divergence else 4) * rows))
    whole = 4 * rows * min(stage.tokens, chunk)
    several, split = stage.tokens > chunk, stage.of.tensor > 1
    # Logits, logprobs and, of a shared vocabulary, exponentials; and what the chunk before has left.
    first = (3 if split else 2) * whole
    forward, again = first + several * whole, first + stage.number * whole // 4 if several else 2 * whole
    if stage.low and not several:
        again += whole // 2
    if divergence:
        forward, again = 2 * forward, 2 * forward
    weight = stage.rows * stage.model.hidden
    if not backward:
        return forward
    if not stage.full:
        return max(forward, stage.number * stage.tokens * stage.model.hidden + again)
    gradient = 4 * weight + stage.number * stage.tokens * stage.model.hidden
    # The padding of the vocabulary is cut off, so the gradient is copied in the end.
    least = stage.low * (again - whole + 2 * weight)
    return max(forward, gradient + max(again, least, stage.number * weight))


def _stepping(stage: Stage, state: int) -> int:
    """Return the bytes of an optimizer step: two copies of the largest weight in plain PyTorch, none in a kernel."""
    if not stage.plain:
        return 0
    model, ends = stage.model, (0, stage.of.pipeline - 1)
    width = model.expert_mlp if model.experts else model.mlp // stage.of.tensor
    largest = max(2 * width, stage.rows if stage.case.stage in ends else 0) * model.hidden
    if not stage.full:
        sides = (max(one.inputs, one.outputs) * max(1, one.experts) for one in stage.adapted)
        largest = stage.rank * max(sides, default=0)
    return 8 * min(largest, state)


def savings(case: Case) -> tuple[Saving, ...]:
    """Return the changes of this section that can lower the peak, the cheapest first."""
    return tuple(_savings(case, structure(dict(case.settings), MegatronConfig, None)))


def _savings(case: Case, config: MegatronConfig) -> Iterator[Saving]:
    of, experts = config.parallel, case.model.experts
    if case.trained and config.lora is None and not config.optimizer.distributed:
        yield Saving("optimizer.distributed", True, "weights are gathered after each step", new_run=True)
    if of.tensor > 1 and not of.sequence:
        yield Saving("parallel.sequence", True, "nothing")
    if case.trained and config.gradient_checkpointing is False and Stage(case, config, read(case.model)).plain:
        yield Saving("gradient_checkpointing", "selective", "attention is computed again")
    if case.trained and config.gradient_checkpointing is not True:
        yield Saving("gradient_checkpointing", True, "a third more time of each training step")
    least = max(512, case.longest if case.longest < case.tokens else 0)
    for part in (2, 4):
        if (fewer := config.micro_batch_tokens // part) >= least:
            yield Saving("micro_batch_tokens", fewer, "smaller passes, which use a device less well")
    default = max(1, CHUNK_BYTES // (4 * max(1, case.model.vocab_size)))
    if config.head == "lm" and (config.logprob_chunk or default) > 64:
        yield Saving("logprob_chunk", 64, "more and smaller products with the head")
    if case.sizes.data % 2 == 0:  # ranks that had other data share the model
        if experts and experts % (2 * of.expert) == 0:
            yield Saving("parallel.expert", 2 * of.expert, "tokens travel to the ranks of their experts")
        yield Saving("parallel.tensor", 2 * of.tensor, "sums over ranks in every layer")
        yield Saving("parallel.context", 2 * of.context, "keys and values travel in every layer")
        yield Saving("parallel.pipeline", 2 * of.pipeline, "ranks wait for each other at the ends of a step")
