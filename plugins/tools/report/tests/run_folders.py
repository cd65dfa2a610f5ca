"""Run folders for tests of the report, written the way a run writes them."""

from pathlib import Path
from typing import Any

from whet.run.run_folder import RunFolder

HOSTILE = (
    "<script>alert(1)</script><img src=x onerror=alert(2)></pre></script><!-- "
    "\x1b[2J\x9b2J\u202egpj.exe\u2066\u200b\u2028${data} &lt;b&gt; \ud800 \\u003cscript\\u003e"
)
"""What a model may write to whoever reads its rollouts."""
GAPS = {1: 1e-6, 2: 3e-6, 10: 0.25}
"""Steps -> the gap at the last token of the first sample."""


def episode(group: int, sample: int, step: int, said: str, gap: float | None) -> dict[str, Any]:
    """A row of a rollout: a prompt of two tokens, three tokens of the model; recorded where there is a gap."""
    sampler = [0.0, 0.0, -0.5, -1.5, -0.25]
    row = {
        "group": group, "environment": "sums", "task": group, "id": f"task-{group}", "sample": sample,
        "reward": float(sample), "advantage": sample - 1.5, "gold": f"gold {HOSTILE}",
        "rewards": {"correct": float(sample), HOSTILE: 0.0}, "turns": 1, "response_length": 3,
        "stop": "stop", "versions": [step - 1, step - 1],
        "messages": [{"role": "user", "content": f"What is {group}?"}, {"role": "assistant", "content": said}],
    }  # fmt: skip
    if gap is None:
        return row
    return row | {
        "sequences": [
            {
                "prompt_length": 2,
                "stop": "stop",
                "tokens": [5, 6, 7, 8, 2],
                "pieces": ["<|user|>", "What\n", said, "\\xe6", "<|end|>"],
                "loss_mask": [0, 0, 1, 1, 1],
                "versions": [-1, -1, *[step - 1] * 3],
                "sampler_logprobs": sampler,
                "trainer_logprobs": [*sampler[:4], sampler[4] - gap],
                "columns": {"advantages": 0.75 - sample, "weights": [0.0, 0.0, 0.5, -0.5, 0.25]},
            }
        ]
    }


def write(path: Path, said: str = "The answer is 7.", steps: int = 12) -> Path:
    """Write a run of GRPO: records on steps 1, 2 and 10, an evaluation every five steps, and an end."""
    run = RunFolder(path)
    run.write_text(
        "config.yaml", f"run:\n  steps: {steps}\nrollout:\n  record:\n    every: 2\nmodel:\n  path: a/model\n"
    )
    run.write_json("versions.json", {"whet": "0.1.0"})
    role = {"role": "backend", "component": "fsdp2", "ranks": 1, "devices": ["cpu"]}
    peaks = {"backend": {"train": {"device": 3 << 29, "host": 0}, "idle": {"device": 1 << 29}, "source": "trace"}}
    run.write_json("plan.json", {"way": {"transport": "shared"}, "roles": [role], "peaks": peaks})
    run.append("journal.jsonl", [{"time": 1000.0, "event": "opened", "after_step": 0}])
    for step in range(1, steps + 1):
        begin = 1000.0 + step
        reward, name = 0.5 + step / 100, "evaluation/sums/reward"
        evaluated = {name: reward, f"{name}/ci_low": reward - 0.1, f"{name}/ci_high": reward + 0.08}
        numbers = {"loss": 1 / step, "reward/mean": step / steps, "logprob_gap/max": GAPS.get(step, 1e-7)}
        row = {"step": step, "time": begin + 0.9, **numbers, "seconds/step": 0.9, HOSTILE: 1.0}
        row |= {"memory/backend.train": 1.0 + step / 20, "memory/backend.loading": 0.25}
        run.append("metrics.jsonl", [row | (evaluated if step % 5 == 0 else {})])
        spans = [("rollout", "take", 0.0, 0.5), ("generator", "generate", 0.1, 0.3), ("backend", "train", 0.5, 0.4)]
        run.append("spans.jsonl", [
            {"step": step, "role": role, "phase": phase, "begin": begin + first, "seconds": seconds}
            for role, phase, first, seconds in spans
        ])  # fmt: skip
        rows = [episode(step, i, step, said, GAPS.get(step) if i == 0 else None) for i in range(4)]
        run.append(f"rollouts/step-{step:06d}.jsonl", rows)
        if step % 5 == 0:
            run.append(f"evaluations/step-{step:06d}-sums.jsonl", [episode(0, 0, step, said, None)])
    run.journal("failed", error="WorkerError", message=f"backend 0 died: {said}")
    (path / "logs").mkdir()
    (path / "logs" / "backend-0.log").write_text(f"started\n{said}", encoding="utf-8", errors="replace")
    return path
