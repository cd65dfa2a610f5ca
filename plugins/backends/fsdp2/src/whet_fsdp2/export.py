"""What lies beside the weights in a model folder."""

import shutil
from pathlib import Path

COMPANIONS = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.model", "*.tiktoken",
    "chat_template*", "generation_config.json", "preprocessor_config.json", "processor_config.json", "*.py", "LICENSE*",
)  # fmt: skip


def copy_companions(source: Path, target: Path) -> None:
    """Copy tokenizer, chat template, generation config and model code, unchanged."""
    target.mkdir(parents=True, exist_ok=True)
    for pattern in COMPANIONS:
        for file in sorted(source.glob(pattern)):
            if file.is_file():
                shutil.copyfile(file, target / file.name)
