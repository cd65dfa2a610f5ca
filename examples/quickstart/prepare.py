"""Make what a small run starts from: a random model, its tokenizer, and demonstrations to warm it up."""

import argparse
import itertools
import json
from pathlib import Path

from transformers.utils.logging import disable_progress_bar

from whet.testing.models import make_model, make_tokenizer
from whet_env_math import arithmetic
from whet_env_tools import calculator

TASKS = {"arithmetic": arithmetic.demonstrations, "calculator": calculator.demonstrations}


def main() -> None:
    """Write FOLDER with model, tokenizer, train.jsonl and validation.jsonl; nothing to do where they are."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--task", choices=sorted(TASKS), default="arithmetic")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--records", type=int, default=40000)
    args = parser.parse_args()
    disable_progress_bar()
    done = args.folder / "validation.jsonl"
    if done.exists():
        print(f"{args.folder} is there already")
        return
    args.folder.mkdir(parents=True, exist_ok=True)
    records = list(TASKS[args.task](args.records + 256, seed=args.seed))
    corpus = ["".join(m["role"] + "\n" + m["content"] + "\n" for m in r["messages"]) for r in records[:3000]]
    make_model(args.folder, make_tokenizer(corpus), hidden=128, layers=4, heads=4, kv_heads=4, mlp=384, seed=args.seed)
    write(args.folder / "train.jsonl", itertools.islice(records, args.records))
    write(done, records[args.records :])
    print(f"wrote a model of 0.9 M parameters and {args.records} demonstrations to {args.folder}")


def write(path: Path, records) -> None:  # type: ignore[no-untyped-def]
    """Write JSON lines."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


if __name__ == "__main__":
    main()
