"""Small random models with their tokenizers, made on the spot for demos and tests: nothing is downloaded."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from whet.data.files import use_umask

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for m in messages %}"
    "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tokenizer(corpus: Iterable[str], vocab_size: int = 384) -> Any:
    r"""Train a small byte-level BPE as a `transformers` tokenizer; numbers to 99 and `\boxed{` are single tokens."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    words = Regex(r"\\boxed\{| ?[A-Za-z]+|\d{1,2}|, |\. |\s|[^\sA-Za-z\d]")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(words, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIALS),
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    numbers = [f" {n}" for n in range(100)] * 20
    tokenizer.train_from_iterator([*corpus, *numbers, *["user\nassistant\n"] * 20, *["\\boxed{"] * 20], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def make_model(
    folder: str | Path,
    tokenizer: Any,
    *,
    family: str = "qwen3",
    hidden: int = 64,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int | None = None,
    mlp: int | None = None,
    tied: bool = True,
    max_positions: int = 256,
    experts: int = 8,
    experts_per_token: int = 2,
    seed: int = 0,
) -> Path:
    """Write a random decoder with its tokenizer to a folder.

    Families: `qwen3`, `qwen2`, `llama`, and the mixtures of experts `qwen3_moe` and `mixtral`, each of whose experts is
    as wide as `mlp`. Only they read `experts` and `experts_per_token`.
    """
    import torch
    from transformers import AutoModelForCausalLM

    width = mlp or 3 * hidden
    config = _config_class(family)(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim or hidden // heads,
        intermediate_size=width,
        max_position_embeddings=max_positions,
        tie_word_embeddings=tied,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        **_expert_settings(family, experts, experts_per_token, width),
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    folder = Path(folder)
    model.save_pretrained(folder)
    use_umask(*folder.glob("*.safetensors"))
    tokenizer.save_pretrained(folder)
    return folder


def _config_class(family: str) -> Any:
    import transformers

    names = {
        "qwen3": "Qwen3Config", "qwen2": "Qwen2Config", "llama": "LlamaConfig", "qwen3_moe": "Qwen3MoeConfig",
        "mixtral": "MixtralConfig",
    }  # fmt: skip
    return getattr(transformers, names[family])


def _expert_settings(family: str, experts: int, per_token: int, width: int) -> dict[str, Any]:
    """Return what the config of a mixture of experts has in addition."""
    if family == "qwen3_moe":
        return {
            "num_experts": experts, "num_experts_per_tok": per_token, "moe_intermediate_size": width,
            "norm_topk_prob": True,
        }  # fmt: skip
    return {"num_local_experts": experts, "num_experts_per_tok": per_token} if family == "mixtral" else {}
