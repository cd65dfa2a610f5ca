"""Load a Hugging Face causal model from a folder, and test which layout and shortcuts it supports."""

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch

from whet.data import randomness
from whet.data.batch import Batch, from_sequences
from whet.data.model_info import ModelInfo
from whet.errors import ConfigError, WhetError
from whet_fsdp2 import attention
from whet_fsdp2.checkpointing import Checkpointing, enable_checkpointing
from whet_fsdp2.compiled import compile_layers
from whet_fsdp2.feed import Feed, feed, spread
from whet_fsdp2.kernels import use_kernels
from whet_fsdp2.loaded import check_loaded
from whet_fsdp2.narrowed import narrow
from whet_fsdp2.norms import hasten_norms
from whet_fsdp2.ranks import Ranks
from whet_fsdp2.root import AnyRoot, Root, ValueRoot
from whet_fsdp2.sharding import local, shard_like, sharding
from whet_fsdp2.sorted_experts import hasten_experts
from whet_fsdp2.varlen import kernel_for
from whet_ops.logprobs import MATRIX, LogitRule
from whet_training.layout import Layout, pack, places

log = logging.getLogger(__name__)

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
"""Largest difference of logprobs between two computations that must agree, relative to the size of the logprobs."""


LOUDER = 64.0
"""Factor of the last hidden states in the test of a head: small logits hide what bounds large ones."""

NEW_HEAD = "score.weight"

SCALES = ("logit_scale", "logits_scaling", "lm_head_multiplier", "output_multiplier")
"""Names in configs of a number by which a model multiplies its logits, or by which it divides them."""

SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap")
"""Names in configs of the bound of the logits."""


def load_model(
    info: ModelInfo, head: str = "lm", seed: int = 0, *, dtype: torch.dtype = torch.float32, ranks: Ranks | None = None,
    reshard_after_forward: bool = True, low_precision: bool = False, draws: bool = True,
) -> Any:  # fmt: skip
    """Return the model of a local folder. Raises `WhetError` if weights are missing, odd, damaged or quantised.

    With several `ranks` each rank reads its shards only, and `low_precision` computes in bfloat16. If the folder has no
    `value` head, a new head is drawn from the seed. Without `draws` that is an error.
    """
    import transformers

    kind, more = (
        (transformers.AutoModelForSequenceClassification, {"num_labels": 1}) if head == "value"
        else (transformers.AutoModelForCausalLM, {})
    )  # fmt: skip
    try:
        with quiet(), ExitStack() as stack:
            if ranks is not None and ranks.size > 1:
                keep = not reshard_after_forward
                more |= {"distributed_config": stack.enter_context(sharding(ranks, low_precision, keep))}
            model, report = kind.from_pretrained(
                info.path,
                **more,
                dtype=dtype,
                local_files_only=True,
                trust_remote_code=info.trust_remote_code,
                use_safetensors=True,
                ignore_mismatched_sizes=True,  # reported, and refused below by name
                output_loading_info=True,
            )
    except ConfigError:
        raise
    except Exception as error:  # safetensors, transformers and remote code each raise their own
        raise WhetError(f"model.path: the model in {info.path} cannot be loaded: {error}") from error
    missing = report.get("missing_keys") or ()
    if head == "value" and NEW_HEAD in missing:
        if not draws:
            raise WhetError(
                f"model.path: the model in {info.path} has no value head ({NEW_HEAD}), and nothing trains a new one "
                "here; give the folder of a reward model, such as the export of a run with the algorithm `rm`"
            )
        _draw_head(model.score.weight, seed)
        report = {**report, "missing_keys": [name for name in missing if name != NEW_HEAD]}
    check_loaded(info, model, report, head, aloud=ranks is None or ranks.rank == 0)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for name, value in list(vars(module).items()):
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)
        if isinstance(module, torch.nn.Embedding):
            module.padding_idx = None  # else a padding token that is part of a sequence would have no gradient
    return model.eval()


@torch.no_grad()
def _draw_head(weight: torch.Tensor, seed: int) -> None:
    """Fill a value head from N(0, 1/(hidden size + 1)): Stiennon et al. 2020 (arXiv:2009.01325), appendix B.1."""
    draw = randomness.generator(seed, "value head").standard_normal(tuple(weight.shape), np.float32)
    value = torch.from_numpy(draw / np.float32(np.sqrt(weight.shape[1] + 1)))
    local(weight).copy_(local(shard_like(value, weight)))


@contextmanager
def quiet() -> Iterator[None]:
    """Switch off progress bars and warnings of transformers. This module reports odd weights itself."""
    from transformers.utils import logging as their_logging

    shown, level = their_logging.is_progress_bar_enabled(), their_logging.get_verbosity()
    their_logging.disable_progress_bar()
    their_logging.set_verbosity_error()
    try:
        yield
    finally:
        their_logging.set_verbosity(level)
        if shown:
            their_logging.enable_progress_bar()


def prepare(
    model: Any, wanted: str, chunk: int, head: str = "lm", context: Any = None, kernels: tuple[str, ...] = (),
    *, compiled: bool = False, checkpointing: Checkpointing = False, float32_head: bool = False,
) -> tuple[AnyRoot, Layout]:  # fmt: skip
    """Return the model as a `Root` or `ValueRoot`, and its layout.

    `context`: the process group of the ranks that share rows. `kernels`: see `whet_fsdp2.kernels`. `compiled`: see
    `whet_fsdp2.compiled`. `checkpointing`: see `whet_fsdp2.checkpointing`. `float32_head`: see `LogitRule.float32`.

    Every shortcut is compared with the model's own logits on a few tokens. Raises `ConfigError` if no known rule makes
    logits of the head, or the head is all that the model names, or if a layout that the config names is not exact.
    """
    if model.base_model is model:
        raise ConfigError(
            f"model.path: {type(model).__name__} does not name the part below its head (base_model_prefix is "
            f"{model.base_model_prefix!r}, which it lacks), so this backend cannot train it"
        )
    batch = _probe(model)

    def difference() -> float:
        return _differ(_plain_outputs(model, batch, head)[0], expected)

    with torch.no_grad():
        expected, loud = _plain_outputs(model, batch, head)
        tolerance = TOLERANCE.get(compute_dtype(model), TOLERANCE[torch.float32])
        use_kernels(model, kernels, difference, tolerance)
        hasten_experts(model, difference, tolerance)
        root: AnyRoot = ValueRoot(model) if head == "value" else Root(model, chunk)
        hasten_norms(model)
        _find_rule(root, batch, loud, float32_head)
        _narrow(root, batch, expected)
        layout = _lay_out(root, batch, wanted, expected, context)
        one = feed(batch, layout, _device(root), context)
        if compiled:
            compile_layers(model, lambda: _differ(_outputs(root, one), expected), tolerance)
        if checkpointing:
            enable_checkpointing(model, checkpointing)
            _refuse_randomness(model, _differ(_outputs(root, one), expected), tolerance)
    return root, layout


def _refuse_randomness(model: Any, off: float, tolerance: float) -> None:
    if not off <= tolerance:
        raise ConfigError(
            f"backend.gradient_checkpointing: {type(model).__name__} computes something else in training mode (outputs "
            f"differ by {off:.2g}); set the rates of dropout in its config.json to 0, or gradient_checkpointing: false"
        )


def _lay_out(root: AnyRoot, batch: Batch, wanted: str, expected: Any, context: Any) -> Layout:
    """Switch the model to the layout that is wanted, and return it."""
    if wanted == "padded":
        return "padded"
    model = root.model
    layout: Layout = "packed" if wanted == "packed" else "shared"
    problem = _try_packed(root, batch, layout, expected, context)
    if problem is None:
        _name_kernel(model)
        return layout
    if context is not None:
        raise ConfigError(f"backend.parallel.context: packed rows do not work for {type(model).__name__}: {problem}")
    if wanted != "auto":
        raise ConfigError(
            f"backend.layout: {wanted!r} does not work for {type(model).__name__}: {problem}; use `layout: padded`"
        )
    log.warning("layout: padded, because packed rows do not work for %s: %s", type(model).__name__, problem)
    return "padded"


def _name_kernel(model: Any) -> None:
    """Print which kernel computes attention on a GPU, and why."""
    device = local(model.get_input_embeddings().weight).device
    if device.type == "cuda":
        settings = model.config.get_text_config()
        layers = getattr(settings, "per_layer_config", None) or [settings]
        sizes = {getattr(one, "head_dim", None) or one.hidden_size // one.num_attention_heads for one in layers}
        for size in sorted(sizes):
            kernel, why = kernel_for(device, compute_dtype(model), size)
            words = why if kernel is not None else f"scaled_dot_product_attention by blocks, because {why}"
            of = f", heads of {size}" if len(sizes) > 1 else ""
            print(f"attention of packed rows{of}: {words}", flush=True)


def _probe(model: Any) -> Batch:
    """Return three short sequences, two of which share a prompt."""
    vocabulary = int(model.get_input_embeddings().weight.shape[0])
    draw = np.random.Generator(np.random.Philox(0))
    prompt = draw.integers(vocabulary, size=5)
    rows = [np.concatenate([prompt, draw.integers(vocabulary, size=n)]) for n in (6, 3)]
    rows.append(draw.integers(vocabulary, size=9))
    masks = [np.arange(len(row)) >= 5 for row in rows]
    return from_sequences(
        [{"tokens": row, "loss_mask": mask} for row, mask in zip(rows, masks, strict=True)],
        prompt_lengths=[5, 5, 5],
        group=[0, 0, 1],
    )


def _plain_outputs(model: Any, batch: Batch, head: str) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return logprobs or values [N] of the model's own forward pass, one sequence at a time, and those that `LOUDER`
    hidden states have.

    Tokens after its end give all sequences one length. They change nothing before them, and under tensor parallelism
    PyTorch plans each operator once for each length.
    """
    device = local(model.get_input_embeddings().weight).device
    longest = int(batch["lengths"].max()) - 1

    def values(tokens: torch.Tensor) -> torch.Tensor:
        hidden = model.base_model(input_ids=tokens, use_cache=False).last_hidden_state
        return model.score(hidden)[..., 0].float()  # type: ignore[no-any-return]  # a module of transformers

    if head == "value":
        model.forward = values  # the model has to be called itself, see `whet_fsdp2.root`
    found: tuple[list[Any], list[Any]] = [], []
    with _given(_head_of(model, head), lambda hidden: torch.cat([hidden, hidden * LOUDER])):
        for one in range(batch.sequences):
            part = batch.take([one])
            tokens = torch.from_numpy(part["tokens"]).to(device)
            seen = len(tokens) - 1
            row = torch.nn.functional.pad(tokens[:-1], (0, longest - seen))[None]
            if head == "value":
                outputs = model(row)[:, :seen]
            else:
                logits = model(input_ids=row, use_cache=False).logits[:, :seen].float()
                outputs = torch.log_softmax(logits, -1).gather(2, tokens[1:, None].expand(2, -1, -1))[..., 0]
            for outcome, each in zip(found, outputs.cpu().numpy(), strict=True):
                outcome.append(np.concatenate([np.zeros(1, np.float32), each]) * part["loss_mask"])
    return np.concatenate(found[0]), np.concatenate(found[1])


def _head_of(model: Any, head: str) -> torch.nn.Module:
    found: torch.nn.Module = model.score if head == "value" else model.get_output_embeddings()
    return found


@contextmanager
def _given(head: torch.nn.Module, change: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Change the hidden states that a head gets."""
    hook = head.register_forward_pre_hook(lambda module, given: (change(given[0]), *given[1:]))
    try:
        yield
    finally:
        hook.remove()


def _outputs(root: AnyRoot, one: Feed) -> np.ndarray[Any, Any]:
    return spread(one, root(one, (root.probe,)))[root.probe].detach().cpu().numpy()


def _device(root: AnyRoot) -> torch.device:
    return local(root.model.get_input_embeddings().weight).device


def _tolerance(root: AnyRoot) -> float:
    return TOLERANCE.get(compute_dtype(root.model), TOLERANCE[torch.float32])


def compute_dtype(model: Any) -> torch.dtype:
    """Return the dtype of the forward pass: that of the weights, or the one to which FSDP2 casts them."""
    from torch.distributed.fsdp import FSDPModule

    policy = model._get_fsdp_state()._mp_policy.param_dtype if isinstance(model, FSDPModule) else None
    dtype: torch.dtype = policy or next(model.parameters()).dtype
    return dtype


def _differ(found: Any, expected: Any) -> float:
    return float(np.abs(found - expected).max() / max(1.0, float(np.abs(expected).max())))


def logit_rules(config: Any, float32: bool) -> list[LogitRule]:
    """Return the rules that a model's config may mean, the likeliest first. Models differ in what a name means."""
    settings = config.get_text_config()
    numbers, bounds = (
        [float(one) for name in names if isinstance(one := getattr(settings, name, None), int | float) and one]
        for names in (SCALES, SOFTCAPS)
    )
    scales = dict.fromkeys((*(scale for one in numbers for scale in (one, 1 / one)), 1.0))
    return [LogitRule(scale, bound, float32) for bound in dict.fromkeys((*bounds, 0.0)) for scale in scales]


def _find_rule(root: AnyRoot, batch: Batch, loud: Any, float32: bool) -> None:
    """Find how logits follow from the head's matrix. Raises `ConfigError` if no rule makes the model's own outputs.

    `loud`: the outputs of the model's own code with `LOUDER` hidden states.
    """
    one, head = feed(batch, "padded", _device(root)), _head_of(root.model, "lm" if isinstance(root, Root) else "value")
    for rule in logit_rules(root.model.config, float32) if isinstance(root, Root) else (MATRIX,):
        if isinstance(root, Root):
            root.rule = rule
        with _given(head, lambda hidden: hidden * LOUDER):
            off = _differ(_outputs(root, one), loud)
        if off <= _tolerance(root):
            return
    raise _beyond_rules(root, off)


def _beyond_rules(root: AnyRoot, off: float) -> ConfigError:
    for name, weight in root.model.named_parameters():
        if not local(weight.detach()).isfinite().all():
            return ConfigError(f"model.path: the weight {name} has values that are not finite; choose another model")
    return ConfigError(
        f"model.path: {type(root.model).__name__} does more than multiply by its head's matrix (its {root.probe} "
        f"differ by {off:.2g}). Supported are the numbers {', '.join((*SCALES, *SOFTCAPS))} of config.json"
    )


def _narrow(root: AnyRoot, batch: Batch, expected: Any) -> None:
    """Restrict the last layer to the positions that are read, if the outputs stay the same.

    Raises `ConfigError` if they differ without this, too.
    """
    one = feed(batch, "padded", _device(root))
    root.narrowed = narrow(root.model)
    try:
        off = _differ(_outputs(root, one), expected)
        problem: object = "" if off <= _tolerance(root) else f"its {root.probe} differ by {off:.2g}"
    except Exception as error:  # the model's own code raises anything
        problem = error
    if problem:
        log.warning("the last layer of %s is computed at all places: %s", type(root.model).__name__, problem)
        for part in root.narrowed:
            part.undo()
        root.narrowed = ()
        if not (off := _differ(_outputs(root, one), expected)) <= _tolerance(root):
            raise _beyond_rules(root, off)


def _last_alone(root: AnyRoot, batch: Batch, layout: Layout, one: Feed) -> tuple[np.ndarray[Any, Any], bool]:
    """Return the outputs [N] of a packed row, and whether those of its last sequence depend on that sequence alone.

    A state that goes on along the row reaches the last sequence from all others; a causal model carries nothing back.
    The test is by gradients: those of tokens without influence are exactly 0. Outputs themselves may round otherwise if
    other tokens change, because kernels of experts depend on how many tokens each expert has.
    """
    where, at = places(batch, pack(batch, layout))
    owner = np.repeat(np.arange(batch.sequences), batch["lengths"])
    last = owner[where[at.argmax()]]
    embedded: list[torch.Tensor] = []
    hook = root.model.get_input_embeddings().register_forward_hook(
        lambda module, given, made: embedded.append(made.requires_grad_())
    )
    try:
        with torch.enable_grad():
            outputs = spread(one, root(one, (root.probe,)))[root.probe]
            (gradient,) = torch.autograd.grad(outputs[torch.from_numpy(owner == last)].sum(), embedded)
    finally:
        hook.remove()
    reached = local(gradient).flatten(0, -2).count_nonzero(-1).cpu().numpy() > 0
    own = at[owner[where] == last] - (0 if one.piece is None else one.piece.begin)
    reached[own[(own >= 0) & (own < len(reached))]] = False
    return outputs.detach().cpu().numpy(), not reached.any()


def _try_packed(root: AnyRoot, batch: Batch, layout: Layout, expected: Any, context: Any) -> str | None:
    """Switch the model to packed attention. If that fails, switch back and return the reason."""
    attention.register()
    before = root.model.config._attn_implementation
    try:
        root.model.set_attn_implementation(attention.NAME)
        one = feed(batch, layout, _device(root), context)
        found, alone = _last_alone(root, batch, layout, one)
        problem = None if alone else f"its {root.probe} depend on the other sequences of a row"
        if not (off := _differ(found, expected)) <= _tolerance(root):
            problem = f"its {root.probe} differ by {off:.2g} from those of padded rows"
    except attention.UnsupportedAttentionError as error:
        problem = error.reason
    except (TypeError, ValueError, RuntimeError, KeyError) as error:  # raised by the model's own code
        problem = f"{type(error).__name__}: {error}"
    if problem is not None:
        root.model.set_attn_implementation(before)
    return problem
