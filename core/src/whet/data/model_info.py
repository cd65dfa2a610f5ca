"""Facts about a model folder, read from its JSON files without torch or transformers."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attrs import field, frozen

from whet.data.bounded import MODEL_VALUES, loads
from whet.errors import ConfigError

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of one number, by the names of dtypes in configs."""
_GATED = (
    "llama", "mistral", "ministral", "mixtral", "qwen", "gemma", "phi3", "olmo", "cohere", "granite", "smollm",
    "stablelm", "deepseek", "glm", "exaone", "internlm", "seed_oss", "ernie4_5", "hunyuan",
)  # fmt: skip
"""Beginnings of `model_type` whose feed-forward blocks have three matrices. Other models are assumed to have two."""
_POSITIONS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length")


@frozen
class ModelInfo:
    """A model folder: its `config.json`, and how to load it."""

    path: str
    """A local folder. A hub name is resolved to a folder before."""
    config: Mapping[str, Any] = field(factory=dict)
    """The content of `config.json`."""
    dtype: str = "float32"
    trust_remote_code: bool = False
    chat_template: str = ""
    """A Jinja chat template that replaces the folder's own. Empty: there is none."""

    @property
    def vocab_size(self) -> int:
        """Return the number of rows of the embedding. 0: the config does not state it."""
        return self._count("vocab_size")

    @property
    def max_positions(self) -> int:
        """Return the longest sequence that the model was made for. 0: the config does not state it."""
        return next(filter(None, map(self._count, _POSITIONS)), 0)

    @property
    def architecture(self) -> str:
        """Return the class name in `transformers`, e.g. `Qwen3ForCausalLM`."""
        names = self.config.get("architectures") or [""]
        return str(names[0])

    @property
    def code(self) -> tuple[str, ...]:
        """Return the modules of `transformers` that hold the model's code, so that they can be imported early."""
        family = str(self.config.get("model_type") or "").replace("-", "_")
        own = () if "auto_map" in self.config or not family else (f"transformers.models.{family}.modeling_{family}",)
        return ("transformers.models.auto.modeling_auto", *own)

    @property
    def heads(self) -> int:
        """Return the number of attention heads. 0: the config does not state it."""
        return self._count("num_attention_heads")

    @property
    def kv_heads(self) -> int:
        """Return the number of heads of keys and values. 0: the config does not state it."""
        return self._count("num_key_value_heads", self.heads)

    @property
    def experts(self) -> int:
        """Return the number of routed experts of a layer. 0: the model is dense."""
        return max(map(self._count, ("num_experts", "num_local_experts", "n_routed_experts")))

    @property
    def token_cache_bytes(self) -> int:
        """Return the bytes of keys and values of one token in float32. 0: the config does not state them."""
        layers, own = self._count("num_hidden_layers"), self._text("per_layer_config")
        if latent := self._count("kv_lora_rank"):  # latent attention keeps what keys and values are computed from
            return 4 * layers * (latent + self._count("qk_rope_head_dim"))
        heads, head = self.kv_heads, self._count("head_dim", self._count("hidden_size") // max(1, self.heads))
        apart = [ModelInfo("", one) for one in own.values()] if isinstance(own, dict) else []  # layers of other sizes
        each = [one._count("num_key_value_heads", heads) * one._count("head_dim", head) for one in apart]
        return 2 * 4 * ((layers - len(each)) * heads * head + sum(each))

    @property
    def parameters(self) -> int:
        """Return the number of parameters, estimated for a decoder from the config. 0: it cannot be estimated.

        Where the config is ambiguous, the smaller number is taken, so that the estimate is never above the real need.
        """
        layers, (dense, sparse) = self._count("num_hidden_layers"), self._layers()
        listed = len(self._text("mlp_only_layers") or ()), list(self._text("mlp_layer_types") or ()).count("dense")
        without = max(self._count("first_k_dense_replace"), self._count("num_dense_layers"), *listed)
        period = self._count("decoder_sparse_step", self._count("expert_layer_period", 1))
        mixed = max(0, layers - without) // period if sparse else 0
        return self.outer_parameters + mixed * sparse + (layers - mixed) * dense if layers and dense else 0

    @property
    def layer_parameters(self) -> int:
        """Return the parameters of the largest layer, estimated as `parameters` are. 0: they cannot be estimated."""
        return max(self._layers())

    def _layers(self) -> tuple[int, int]:
        """Return the parameters of a dense layer, and of a layer with experts and their router (0: there is none)."""
        hidden, heads = self._count("hidden_size"), self.heads
        if not (hidden and heads) or self._text("model_type") in ("doge", "recurrent_gemma"):  # other kinds of layers
            return 0, 0
        kv = self._count("num_key_value_heads", 1 if self._text("multi_query") else self._count("num_kv_heads", heads))
        head, mlp = self._count("head_dim", hidden // heads), self._count("intermediate_size", 4 * hidden)
        matrices = 3 if str(self._text("model_type") or "").startswith(_GATED) else 2
        attention = heads * self._count("v_head_dim") or head * 2 * (heads + kv)  # of a latent one, the output alone
        rest, one = hidden * (attention + 2), self._count("moe_intermediate_size", mlp)
        shared = self._count("shared_expert_intermediate_size") + self._count("n_shared_experts") * one
        sparse = rest + 3 * hidden * (self.experts * one + shared) + hidden * self.experts
        return rest + matrices * hidden * mlp, sparse if self.experts else 0

    @property
    def outer_parameters(self) -> int:
        """Return the number of parameters outside the layers: embedding, head and last norm."""
        hidden = self._count("hidden_size")
        tied = self._text("tie_word_embeddings") is not False  # a config that does not state it has the default, tied
        return self.vocab_size * hidden * (1 if tied else 2) + hidden

    @property
    def stored_dtype(self) -> str:
        """Return the dtype of the stored weights that the config states. Empty: it states none."""
        return str(self._text("dtype") or self._text("torch_dtype") or "")

    def dtype_for(self, setting: str) -> str:
        """Return the dtype of a component's setting, where `model` stands for the model's own dtype."""
        return self.dtype if setting == "model" else setting

    def weight_bytes(self, setting: str = "model") -> int:
        """Return the bytes of the weights in the dtype of a setting, see `dtype_for`. 0: their number is not known."""
        return self.parameters * DTYPE_BYTES[self.dtype_for(setting)]

    def _text(self, key: str) -> Any:
        """Return a value of the config. Multimodal models have it under `text_config`."""
        inner = self.config.get("text_config")
        return self.config.get(key, inner.get(key) if isinstance(inner, dict) else None)

    def _count(self, key: str, default: int = 0) -> int:
        """Return a number of the config, or the default if it is missing, null or no positive integer."""
        value = self._text(key)
        return value if isinstance(value, int) and value > 0 else default


def read_model(path: str | Path, dtype: str = "float32", trust_remote_code: bool = False) -> ModelInfo:
    """Read a local model folder. Raises `ConfigError` that names what is missing."""
    folder = Path(path)
    if not folder.is_dir():
        raise ConfigError(f"model.path: there is no folder {str(path)!r}; give a model folder or a hub name")
    file = folder / "config.json"
    try:
        config = loads(file.read_bytes(), MODEL_VALUES)
    except FileNotFoundError:
        is_adapter = (folder / "adapter_config.json").exists()
        hint = "; it is a LoRA adapter: merge it into its model first" if is_adapter else ""
        raise ConfigError(f"model.path: {str(path)!r} holds no config.json, so it is no model folder{hint}") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path: {file} cannot be read as JSON: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"model.path: {file} holds {type(config).__name__}, wanted a JSON object")
    return ModelInfo(str(folder), config, dtype, trust_remote_code)


def write_chat_template(model: ModelInfo, folder: str | Path) -> None:
    """Write the chat template that the model was trained with into an exported folder, unless it is the folder's."""
    if model.chat_template:
        (Path(folder) / "chat_template.jinja").write_text(model.chat_template, encoding="utf-8")


INDEX = "model.safetensors.index.json"


def weight_files(folder: str | Path) -> list[Path]:
    """Return the weight files that `transformers` reads: `model.safetensors`, else those of the index, else all.

    A folder can have the weights a second time, under other names (`consolidated.safetensors`). Raises `ConfigError` if
    the index cannot be read.
    """
    folder = Path(folder)
    index, whole = folder / INDEX, folder / "model.safetensors"
    if index.is_file() and not whole.is_file():
        try:
            listed = set(loads(index.read_bytes(), MODEL_VALUES)["weight_map"].values())
            return sorted(folder / Path(name).name for name in listed)
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise ConfigError(f"model.path: {index} cannot be read: {error!r}") from error
    return [whole] if whole.is_file() else sorted(folder.glob("*.safetensors"))


def check_weights(folder: str | Path) -> None:
    """Check that all weight files exist and have the length that their headers state. Incomplete downloads do not.

    Reads headers only. Raises `ConfigError` that names the file.
    """
    files = weight_files(folder)
    if not files:
        raise ConfigError(f"model.path: {str(folder)!r} holds no weights: there is no *.safetensors in it")
    if missing := [file.name for file in files if not file.exists()]:
        raise ConfigError(f"model.path: {str(folder)!r} lacks {', '.join(missing[:3])}, which {INDEX} lists")
    for file in files:
        size, wanted = file.stat().st_size, _safetensors_size(file)
        if size != wanted:
            raise ConfigError(f"model.path: {file} has {size:,} bytes, its header tells of {wanted:,}; fetch it again")


def _safetensors_size(file: Path) -> int:
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if length > _LONGEST_HEADER:
                raise ValueError("its header would be too long")
            header = loads(stream.read(length), MODEL_VALUES)
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        return 8 + length + int(max(ends, default=0))
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"model.path: {file} is no safetensors file: {error}; fetch it again (`git lfs pull` where it is a pointer)"
        ) from error


_LONGEST_HEADER = 100_000_000


def fingerprint(folder: str | Path) -> dict[str, str]:
    """Return hashes of the files that make a model: config, tokenizer, chat template, weights.

    Weight files are hashed by size and by their first and last megabyte. That is enough to tell models apart without
    reading hundreds of gigabytes.
    """
    folder = Path(folder)
    groups = {
        "config": ["config.json"],
        "tokenizer": ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"],
        "weights": [file.name for file in weight_files(folder)],
    }
    return {
        name: _hash([folder / file for file in files if (folder / file).exists()]) for name, files in groups.items()
    }


def _hash(files: list[Path]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for file in files:
        size, edge = file.stat().st_size, 1 << 20
        digest.update(f"{file.name}:{size}:".encode())
        with file.open("rb") as stream:
            digest.update(stream.read(edge))
            stream.seek(max(edge, size - edge))
            digest.update(stream.read(edge))
    return digest.hexdigest()


def locate(path: str, revision: str | None = None, *, config_only: bool = False, code: bool = False) -> Path:
    """Return the path of a model folder: a local one, or a hub model, which is downloaded unless it is in the cache.

    `config_only` downloads no weights. `code` also downloads the model's Python files.
    """
    if Path(path).is_dir() or path.count("/") != 1 or path.startswith((".", "/", "~")):
        return Path(path).expanduser()
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise ConfigError(
            f"model.path: there is no folder {path!r}; to read it from the hub, pip install 'whet[hub]'"
        ) from None
    patterns = ["*.json", "*.jinja", *([] if config_only else ["*.safetensors", "*.model", *["*.py"] * code])]
    try:
        second = ["consolidated*"]  # the same weights under other names
        return Path(snapshot_download(path, revision=revision, allow_patterns=patterns, ignore_patterns=second))
    except Exception as error:  # the hub client raises dozens of types, from its own to its HTTP library's
        away = getattr(error, "response", None) is None  # no connection and nothing cached, or offline mode
        found = "the hub cannot be reached and the cache holds no" if away else "the hub does not give a"
        raise ConfigError(
            f"model.path: there is no folder {path!r}, and {found} model of that name: "
            f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        ) from error
