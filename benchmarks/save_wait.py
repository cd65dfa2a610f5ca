"""Measure how long the steps of a run wait for its checkpoints, with and without `run.save_in_background`.

    python benchmarks/save_wait.py                    a model of 100 MB: 300 MB a checkpoint
    python benchmarks/save_wait.py --hidden 1024      a larger one

Each run trains `sft` for twelve steps in a worker process, and saves after every fourth. `wait` is the seconds that the
loop spends on a save. `written` is the seconds until the checkpoint is durable, counted from there. The steps that come
during a write show what the write costs them. The two runs take turns; compare columns, not machines.
"""

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import yaml

from whet.data.files import read_rows
from whet.run import compose
from whet_start.small_models import make_model, make_tokenizer

STEPS, EVERY = 12, 4


def main() -> None:
    """Take turns, and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--folder", default=None, help="where the run folders are made; by default a temporary folder")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as place:
        tokenizer = make_tokenizer(["What is it? It is 0 1 2 3 4 5 6 7 8 9, and that follows."])
        shape = {"hidden": args.hidden, "layers": args.layers, "heads": 8, "kv_heads": 8}
        model = make_model(Path(place) / "model", tokenizer, **shape)
        size = sum(file.stat().st_size for file in model.glob("*.safetensors"))
        print(f"a model of {size / 1e6:.0f} MB in float32; {os.cpu_count()} cores")
        found: dict[bool, list[dict[str, float]]] = {False: [], True: []}
        for number in range(args.rounds):
            for background in found:
                found[background] += measured(Path(place) / f"{number}-{background}", model, background)
    print(f"{'save_in_background':<20}{'step':>8}{'wait':>8}{'written':>9}{'step meanwhile':>16}")
    for background, rows in found.items():
        medians = {name: statistics.median(row[name] for row in rows if name in row) for name in rows[0]}
        step, wait, written, meanwhile = (medians[name] for name in ("step", "wait", "written", "meanwhile"))
        print(f"{json.dumps(background):<20}{step:>8.2f}{wait:>8.2f}{written:>9.2f}{meanwhile:>16.2f}")


def measured(folder: Path, model: Path, background: bool) -> list[dict[str, float]]:
    """Run once, and return of each save the seconds of a step without it, of the wait, the write, and the next step."""
    folder.mkdir()
    rows = [{"prompt": f"What is {n}?", "completion": f"{n} is {n}, and {n + 1} follows."} for n in range(64)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {
        "run": {
            "folder": str(folder / "run"), "steps": STEPS, "save_every": EVERY, "keep": 1, "export": False,
            "save_in_background": background,
        },
        "model": {"path": str(model)},
        "algorithm": {"use": "sft", "batch_size": 8},
        "backend": {"use": "fsdp2", "optimizer": {"lr": 1.0e-4}},
        "data": {"train": [{"path": str(folder / "rows.jsonl")}]},
        "cluster": {"threads": {"backend": 1}},
    }  # fmt: skip
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    compose.run(folder / "run.yaml")
    spans = list(read_rows(folder / "run" / "spans.jsonl"))
    steps = {row["step"]: row["seconds/step"] for row in read_rows(folder / "run" / "metrics.jsonl")}
    found = []
    for step in range(EVERY, STEPS, EVERY):  # the last save has no step after it
        # A save belongs to the step after it, whose row takes its spans.
        of = [span for span in spans if span["role"] == "run" and step < span["step"] <= step + EVERY]
        seconds = {name: sum(span["seconds"] for span in of if span["phase"] == name) for name in ("save", "write")}
        alone = steps[step] if step > EVERY else steps[step - 1]
        found.append({
            "step": alone, "wait": seconds["save"], "written": seconds["write"], "meanwhile": steps[step + 1],
        })  # fmt: skip
    return found


if __name__ == "__main__":
    main()
