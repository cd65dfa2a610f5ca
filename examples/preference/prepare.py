"""Make what a small run on preferences starts from: a random model, demonstrations, pairs and labelled answers.

    python examples/preference/prepare.py models/preference-0 --solutions gsm8k_model_solutions.jsonl

The pairs come from graded solutions: a record has a `question`, the `ground_truth`, and under the name of each model
its `solution` and whether it `is_correct` (openai/grade-school-math has such a file). A right solution is chosen over a
wrong one of the same question. A question is trained on, or kept to choose settings by (`selection`), or held out to
report (`validation`). Without the file, sums are made up: a worked sum against a wrong result.
"""

import argparse
import json
import random
import zlib
from collections.abc import Iterator
from pathlib import Path

from transformers.utils.logging import disable_progress_bar

from whet_start.small_models import make_model, make_tokenizer

HELD_OUT = 5
"""One question in so many is not trained on; half of these are for choosing settings, half for reporting."""


def main() -> None:
    """Write FOLDER with the model and its data; nothing to do where they are."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--solutions", type=Path, help="a file of graded solutions; without it sums are made up")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    disable_progress_bar()
    done = args.folder / "validation.jsonl"
    if done.exists():
        print(f"{args.folder} is there already")
        return
    args.folder.mkdir(parents=True, exist_ok=True)
    questions = list(graded(args.solutions) if args.solutions else sums(2000, args.seed))
    random.Random(args.seed).shuffle(questions)
    parts = {name: [q for q in questions if part_of(q[0]) == name] for name in ("train", "selection", "validation")}
    corpus = [text for question, right, wrong in parts["train"] for text in (question, *right, *wrong)]
    small = {"hidden": 64, "layers": 2, "heads": 4, "kv_heads": 4, "mlp": 192, "max_positions": 1024}
    make_model(args.folder, make_tokenizer(corpus, vocab_size=1024), seed=args.seed, **small)
    for name, part in parts.items():
        write(args.folder / f"demonstrations-{name}.jsonl", demonstrations(part))
        write(args.folder / f"labelled-{name}.jsonl", labelled(part))
        write(args.folder / f"{name}.jsonl", pairs(part))
    print(
        f"wrote a small model, demonstrations, pairs and labelled answers to {args.folder}: {len(questions)} questions"
    )


Question = tuple[str, list[str], list[str]]
"""A question, its right answers and its wrong ones."""


def graded(file: Path) -> Iterator[Question]:
    """Read questions that have both."""
    for line in file.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        solutions = [value for value in record.values() if isinstance(value, dict)]
        right = [one["solution"] for one in solutions if one["is_correct"]]
        wrong = [one["solution"] for one in solutions if not one["is_correct"]]
        if wrong:
            yield record["question"], [record["ground_truth"], *right], wrong


def sums(count: int, seed: int) -> Iterator[Question]:
    """Make up sums, worked out right, and with a result that is off."""
    rng = random.Random(seed)
    for _ in range(count):
        a, b, c = (rng.randint(1, 40) for _ in range(3))
        off = rng.choice((-2, -1, 1, 2))
        work = f"{a}+{b}={a + b}, {a + b}+{c}="
        yield f"Compute {a}+{b}+{c}.", [f"{work}{a + b + c}"], [f"{a + b + c + off}", f"{work}{a + b + c + off}"]


def part_of(question: str) -> str:
    """Return what a question is for: the same answer in every run."""
    turn, place = divmod(zlib.crc32(question.encode()), HELD_OUT)
    return "train" if place else ("selection", "validation")[turn % 2]


def demonstrations(questions: list[Question]) -> Iterator[dict[str, str]]:
    """Return every right answer."""
    return ({"prompt": question, "completion": answer} for question, right, _ in questions for answer in right)


def pairs(questions: list[Question]) -> Iterator[dict[str, str]]:
    """Return every right answer over every wrong one."""
    for question, right, wrong in questions:
        yield from ({"prompt": question, "chosen": a, "rejected": b} for a in right for b in wrong)


def labelled(questions: list[Question]) -> Iterator[dict[str, object]]:
    """Return every answer with whether it is right."""
    for question, right, wrong in questions:
        yield from ({"prompt": question, "completion": answer, "label": True} for answer in right)
        yield from ({"prompt": question, "completion": answer, "label": False} for answer in wrong)


def write(path: Path, records: Iterator[dict]) -> None:  # type: ignore[type-arg]
    """Write JSON lines."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


if __name__ == "__main__":
    main()
