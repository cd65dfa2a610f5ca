"""What a demo starts from: a small random model with its tokenizer, and data to train on."""

import importlib.util
import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from whet.component import resolve
from whet.errors import ConfigError, WhetError
from whet.plugins.catalog import install_words
from whet_demo.demos import Demo
from whet_start.small_models import make_model, make_tokenizer

RECORDS = 40_000
"""Demonstrations to train on."""
HELD_OUT = 256
SEED = "seed.txt"
"""The file in `start` that holds the seed of its model and data."""
MODULES = ("torch", "transformers", "safetensors")
"""Needed to make the model; core does not install them."""


def make_start(demo: Demo, folder: Path, seed: int = 0) -> None:
    """Make model and data of a demo where they are not there.

    Raises `WhetError` where that needs what is not here, and where they are there and were made from another seed.
    """
    _refuse_another_seed(folder, seed)
    missing = [name for name in MODULES if importlib.util.find_spec(name) is None]
    if missing:
        needed = " and ".join(missing)
        raise WhetError(f"making the model needs {needed}, which this Python lacks: {install_words(missing)}")
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    records: Callable[..., object] = resolve(demo.demonstrations)
    given = records(RECORDS + HELD_OUT, seed=seed)
    if not has_start(folder / "start"):
        (folder / "start").mkdir(parents=True, exist_ok=True)
        (folder / "start" / SEED).write_text(f"{seed}\n", encoding="utf-8")
    write_start(  # what `records` returns is a plugin's
        folder / "start", given, held_out=HELD_OUT, seed=seed, layers=demo.layers  # type: ignore[arg-type]
    )  # fmt: skip


def _refuse_another_seed(folder: Path, seed: int) -> None:
    """Raise `ConfigError` where the model and data that are there were made from another seed."""
    made = folder / "start" / SEED
    with suppress(FileNotFoundError, ValueError):
        if (found := int(made.read_text(encoding="utf-8"))) != seed:
            raise ConfigError(
                f"{folder / 'start'}: its model and data were made from the seed {found}, and --seed is {seed}; state "
                f"--seed {found} to go on, or another --folder to begin from {seed}"
            )


def has_start(folder: Path) -> bool:
    """Return whether a folder holds all that `write_start` writes."""
    return (folder / "validation.jsonl").exists()


def write_start(
    folder: Path, records: Iterable[Mapping[str, Any]], *, held_out: int = 256, seed: int = 0, layers: int = 4
) -> None:
    """Write what a small run starts from: a random model, `train.jsonl`, `validation.jsonl`.

    The model has 0.2 million parameters in each layer, and 0.05 million in its embedding.

    The records are conversations, `{"messages": [...]}`, of which the last `held_out` are for validation. The
    tokenizer is made of the first 3,000. A folder that is complete is left as it is.
    """
    if has_start(folder):
        return
    folder.mkdir(parents=True, exist_ok=True)
    every = list(records)
    corpus = ["".join(m["role"] + "\n" + m["content"] + "\n" for m in record["messages"]) for record in every[:3000]]
    make_model(folder, make_tokenizer(corpus), hidden=128, layers=layers, heads=4, kv_heads=4, mlp=384, seed=seed)
    for file, part in (("train.jsonl", every[:-held_out]), ("validation.jsonl", every[-held_out:])):
        partial = folder / f"{file}.partial"
        partial.write_text("".join(json.dumps(record) + "\n" for record in part), encoding="utf-8")
        partial.rename(folder / file)  # the last one shows that all is there
