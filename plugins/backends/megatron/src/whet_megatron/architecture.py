"""From the `config.json` of a Hugging Face model to what Megatron builds of it. Imports no torch.

A family of models is a row of `FAMILIES`. A package offers a further one by an entry point in the group
`whet_megatron.families`: its name is the `model_type`, its value `package.module:object`, and the object a `Family`.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from itertools import product
from typing import Any

from attrs import evolve, field, frozen

from whet.data.model_info import ModelInfo
from whet.errors import ConfigError
from whet.installed import entry_points
from whet_megatron.rules import DENSE, MIXTRAL, QWEN_MOE, VALUE_HEAD, Rule

GROUP = "whet_megatron.families"
QUANTISED = "quantization_config"
"""Key of `config.json` that says how weights are quantised."""


@frozen
class Architecture:
    """A decoder as Megatron builds it: rotary positions, RMS norms, gated feed-forward layers without biases."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    """Values of a dense feed-forward layer."""
    vocabulary: int
    tied: bool
    """Whether embedding and head share their weight."""
    epsilon: float
    """Added to the mean square in norms."""
    rope_theta: float
    rope_factor: float = 0.0
    """Factor of Llama 3's scaling of rotary frequencies. 0: they are not scaled."""
    qkv_bias: bool = False
    qk_norm: bool = False
    """Whether queries and keys of each head are normalised."""
    experts: int = 0
    """Experts of each layer. 0: the model is dense."""
    experts_per_token: int = 0
    expert_mlp: int = 0
    """Values of an expert."""
    normalize_chosen: bool = True
    """Whether the weights of a token's chosen experts add up to 1."""

    def numbers(self, rule: Rule) -> Iterator[tuple[int, int]]:
        """Yield the layer and the expert of each parameter of a rule, 0 where its name has no such number."""
        layers = range(self.layers if "{layer}" in rule.name else 1)
        return product(layers, range(self.experts if "{expert}" in rule.name else 1))

    def has(self, rule: Rule) -> bool:
        """Return whether a language model has the parameters of a rule of its family."""
        if rule.name == VALUE_HEAD.name:
            return not self.tied
        if rule.name.endswith("linear_qkv.bias"):
            return self.qkv_bias
        return self.qk_norm or not rule.name.endswith(("q_layernorm.weight", "k_layernorm.weight"))


Config = Mapping[str, Any]


@frozen
class Family:
    """A kind of model."""

    rules: tuple[Rule, ...]
    """How its stored weights become Megatron's, see `whet_megatron.rules`."""
    special: Callable[[Config], Mapping[str, Any]] = field(default=lambda config: {})
    """`config.json` -> the fields of `Architecture` in which the family differs from Llama."""
    unfit: Callable[[Config], Iterator[str]] = field(default=lambda config: iter(()))
    """`config.json` -> what of it Megatron cannot compute: sentences without a subject, e.g. `has biases`."""
    needed: tuple[str, ...] = ()
    """Further sizes that `config.json` must have, because `transformers` has numbers of its own for them."""
    rope_theta: float = 10_000.0
    """Base of the rotary frequencies where `config.json` has none."""


SLIDING = "attends to a sliding window (sliding_window)"


def _qwen2(config: Config) -> Iterator[str]:
    if config.get("use_sliding_window") and config.get("sliding_window", 4096):  # the defaults of `transformers`
        yield SLIDING


def _biases(config: Config) -> Iterator[str]:
    if config.get("attention_bias") or config.get("mlp_bias"):
        yield "has biases (attention_bias, mlp_bias)"


def _qwen3(config: Config) -> Iterator[str]:
    yield from _biases(config)
    yield from _qwen2(config)


def _qwen3_moe(config: Config) -> Iterator[str]:
    yield from _qwen3(config)
    if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
        yield "has dense layers among those with experts (mlp_only_layers, decoder_sparse_step)"
    yield from _one_expert(config)


def _one_expert(config: Config) -> Iterator[str]:
    if config["num_experts_per_tok"] < 2:
        yield "chooses one expert for each token, whose weight would always be 1 (num_experts_per_tok)"


def _mixtral(config: Config) -> Iterator[str]:
    if config.get("sliding_window"):
        yield SLIDING
    yield from _one_expert(config)


FAMILIES: dict[str, Family] = {
    "llama": Family(DENSE, unfit=_biases),
    "qwen2": Family(DENSE, lambda config: {"qkv_bias": True}, _qwen2, ("num_key_value_heads",)),
    "qwen3": Family(DENSE, lambda config: {"qk_norm": True}, _qwen3, ("num_key_value_heads", "head_dim")),
    "qwen3_moe": Family(
        QWEN_MOE,
        lambda config: {
            "qk_norm": True,
            "expert_mlp": config["moe_intermediate_size"],
            "normalize_chosen": bool(config.get("norm_topk_prob", False)),
        },
        _qwen3_moe,
        ("num_key_value_heads", "moe_intermediate_size"),
    ),
    "mixtral": Family(
        MIXTRAL, lambda config: {"expert_mlp": config["intermediate_size"]}, _mixtral, ("num_key_value_heads",), 1.0e6
    ),
}


@cache
def _offered() -> dict[str, Family]:
    """Return the families of other packages. Importing one may fail: then its name and error are raised."""
    found: dict[str, Family] = {}
    for entry in entry_points(GROUP):
        try:
            found[entry.name] = entry.load()
        except Exception as error:  # of the author's module
            origin = entry.dist.name if entry.dist else "a distribution"
            raise ConfigError(f"{entry.value}, which {origin} offers as {GROUP}, cannot be used: {error}") from error
    return found


def family(model: ModelInfo) -> Family | None:
    """Return the family of a model. None: there is none."""
    kind = str(model.config.get("model_type", ""))
    return FAMILIES.get(kind) or _offered().get(kind)


def refusals(model: ModelInfo) -> Iterator[str]:
    """Yield why a model cannot be trained by this backend: sentences about `model.path`."""
    config, found = model.config, family(model)
    if found is None:
        known = ", ".join(sorted({*FAMILIES, *_offered()}))
        yield f"is a model of type {config.get('model_type', '')!r}; this backend has {known}"
        return
    if wrong := list(_size_problems(model, found)):  # what follows computes with sizes
        yield from wrong
        return
    yield from found.unfit(config)
    inner = config.get("text_config")
    if any(isinstance(one, Mapping) and one.get(QUANTISED) is not None for one in (config, inner)):
        yield (f"has quantised weights ({QUANTISED}), of which this backend would read the codes without their scales; "
               "give a folder of weights in float32 or bfloat16, e.g. of the model before quantisation")  # fmt: skip
    if str(config.get("hidden_act", "silu")) != "silu":
        yield f"has the activation {config['hidden_act']} (hidden_act); this backend has silu"
    yield from _rope_problems(config)
    yield from _count_problems(model)
    if model.dtype not in ("float32", "bfloat16"):
        yield f"computes in {model.dtype} (model.dtype); this backend computes in float32 or bfloat16"


def unquantised(model: ModelInfo) -> ModelInfo:
    """Return a model as it is without quantisation of its weights."""
    config = {key: value for key, value in model.config.items() if key != QUANTISED}
    if isinstance(inner := config.get("text_config"), Mapping):
        config["text_config"] = {key: value for key, value in inner.items() if key != QUANTISED}
    return evolve(model, config=config)


NEEDED = (
    "num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size", "intermediate_size", "rms_norm_eps"
)  # fmt: skip
"""What every model must state."""
FROM_HEADS = ("num_key_value_heads", "head_dim")
"""What may be null: it follows from the number of heads."""


def _size_problems(model: ModelInfo, found: Family) -> Iterator[str]:
    """Yield which sizes a config lacks, and which are no positive numbers."""
    given = {key: value for key, value in model.config.items() if value is not None or key in FROM_HEADS}
    mixed = bool(model.experts) or any("{expert}" in rule.name for rule in found.rules)
    needed = (*NEEDED, *found.needed, *["num_experts_per_tok"] * mixed)
    missing = [key for key in needed if key not in given] + ["num_experts"] * (mixed and not model.experts)
    if missing:
        yield f"has a config.json without {', '.join(missing)}"
    for key in dict.fromkeys((*needed, *FROM_HEADS)):
        value, kinds = given.get(key), (int, float) if key == "rms_norm_eps" else (int,)
        if value is not None and not _positive(value, *kinds):
            yield f"has {key} {value!r}, wanted a positive {'number' if float in kinds else 'integer'}"


def _positive(value: object, *kinds: type) -> bool:
    """Return whether a value of a config is a positive number of one of some kinds."""
    return isinstance(value, int | float) and isinstance(value, kinds) and value is not True and value > 0


def _count_problems(model: ModelInfo) -> Iterator[str]:
    """Yield numbers of a config that contradict each other: Megatron fails in the first step, or computes nonsense."""
    heads, keys = model.heads, model.kv_heads
    if heads % keys:
        yield f"has {heads} heads, which its {keys} key heads do not divide (num_key_value_heads)"
    size = model.config.get("head_dim") or model.config["hidden_size"] // heads
    if size % 2:
        yield f"has heads of {size} values, and rotary positions turn pairs of them (head_dim)"
    chosen = model.config.get("num_experts_per_tok") or 0
    if model.experts and chosen > model.experts:
        yield f"chooses {chosen} of {model.experts} experts for each token (num_experts_per_tok)"


def _rope(config: Config) -> Mapping[str, Any]:
    """Return the settings of the rotary positions. As in `transformers`, the older name comes first."""
    found = config.get("rope_scaling") or config.get("rope_parameters") or {}
    return {"rope_theta": config.get("rope_theta"), **found}


LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""What Megatron takes for granted of Llama 3's scaling of rotary frequencies."""


def _rope_problems(config: Config) -> Iterator[str]:
    for key in ("rope_scaling", "rope_parameters"):
        inner = config.get(key) or {}
        if not isinstance(inner, Mapping) or any(isinstance(one, Mapping) for one in inner.values()):
            yield f"has {key} {str(inner)[:80]}, wanted one object for all layers"
            return
    rope = _rope(config)
    kind = str(rope.get("rope_type") or rope.get("type") or "default")
    if kind not in ("default", "llama3"):
        yield f"scales rotary positions by {kind} (rope_parameters); this backend has default and llama3"
    for key in ("rope_theta", "factor") if kind == "llama3" else ("rope_theta",):
        value = rope.get(key)
        if not _positive(value, int, float) and (value is not None or key == "factor"):
            yield f"has {key} {value!r} in its rope_parameters, wanted a positive number"
    if wrong := [key for key, value in LLAMA3.items() if kind == "llama3" and rope.get(key) != value]:
        found, right = (", ".join(f"{key} {one.get(key)}" for key in wrong) for one in (rope, LLAMA3))
        yield f"has {found} in its rope_parameters; Megatron computes with {right}"
    if (rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0) != 1.0:
        yield "rotates a part of each head only (partial_rotary_factor)"


def read(model: ModelInfo) -> Architecture:
    """Return the architecture of a model. Raises `ConfigError` if this backend cannot compute it."""
    if wrong := next(refusals(model), None):
        raise ConfigError(f"model.path: {model.path} {wrong}")
    found = family(model)
    assert found is not None
    config, rope = model.config, _rope(model.config)
    scaled = (rope.get("rope_type") or rope.get("type")) == "llama3"
    plain: dict[str, Any] = {
        "layers": config["num_hidden_layers"],
        "hidden": config["hidden_size"],
        "heads": model.heads,
        "kv_heads": model.kv_heads,
        "head_dim": config.get("head_dim") or config["hidden_size"] // model.heads,
        "mlp": config["intermediate_size"],
        "vocabulary": model.vocab_size,
        "tied": bool(config.get("tie_word_embeddings", False)),
        "epsilon": float(config["rms_norm_eps"]),
        "rope_theta": float(rope.get("rope_theta") or found.rope_theta),
        "rope_factor": float(rope["factor"]) if scaled else 0.0,
        "experts": model.experts,
        "experts_per_token": config["num_experts_per_tok"] if model.experts else 0,
    }
    return Architecture(**{**plain, **found.special(config)})
