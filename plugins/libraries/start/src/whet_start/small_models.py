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
    seed: int = 0,
) -> Path:
    """Write a random decoder of a family (`qwen3`, `qwen2`, `llama`) with its tokenizer to a folder."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

    families = {"qwen3": Qwen3Config, "qwen2": Qwen2Config, "llama": LlamaConfig}
    config = families[family](
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim or hidden // heads,
        intermediate_size=mlp or 3 * hidden,
        max_position_embeddings=max_positions,
        tie_word_embeddings=tied,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    folder = Path(folder)
    model.save_pretrained(folder)
    use_umask(*folder.glob("*.safetensors"))
    tokenizer.save_pretrained(folder)
    return folder
