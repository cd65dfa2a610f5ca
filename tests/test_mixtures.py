"""Several environments in one run, each with its own group size, sampling, rewards and difficulty."""

import json

import pytest
import yaml

from whet.run.compose import run

for needed in ("whet_env_games", "whet_env_math", "whet_env_rewards", "whet_fsdp2", "whet_grpo", "whet_hf"):
    pytest.importorskip(needed, reason=f"{needed} is not installed")


def test_environments_of_one_run_keep_their_own_groups_sampling_and_metrics(tmp_path, tiny_model_folder):
    puzzle = {"use": "sliding-puzzle", "shuffle": 4, "turns": 3, "prompt": "{position}", "move": "line"}
    document = {
        "run": {"folder": str(tmp_path / "run"), "steps": 3, "export": False},
        "model": {"path": str(tiny_model_folder)},
        "algorithm": {"use": "grpo", "prompts_per_step": 4, "group_size": 2},
        "backend": {"use": "fsdp2", "optimizer": {"lr": 1.0e-4}},
        "generator": {"use": "hf"},
        "rollout": {"max_tokens": 6},
        "cluster": {"workers": "inline"},
        "environments": [
            {
                "name": "sums", "use": "rewarded", "environment": {"use": "arithmetic"}, "weight": 3,
                "sampling": {"max_tokens": 3, "temperature": 1.5}, "truncation_factor": 0.5,
                "rewards": [{"use": "repetition", "words": 1, "weight": -1}, {"use": "tag-format", "weight": 0.1}],
            },
            {**puzzle, "group_size": 3, "curriculum": {"easiest": 1, "by": "step", "steps": 3}},
        ],
        "evaluation": {"environments": [{**puzzle, "limit": 2, "samples": 2, "sampling": {"max_tokens": 2}}]},
    }  # fmt: skip
    (tmp_path / "it.yaml").write_text(yaml.safe_dump(document))
    assert run(tmp_path / "it.yaml").finished
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "sums/reward/mean" in row]
    assert [row["step"] for row in steps] == [1, 2, 3]
    for row in steps:
        assert {"sums/reward/repetition", "sums/reward/tag-format", "sliding-puzzle/reward/illegal"} <= set(row)
        assert row["sums/response_length/max"] <= 3
        assert row["logprob_gap/max"] < 1e-4  # each environment's logprobs are of its own temperature
    assert rows[-1]["evaluation/sliding-puzzle/response_length"] <= 2 * 3
    played = [
        [json.loads(line) for line in file.read_text().splitlines()]
        for file in sorted((tmp_path / "run" / "rollouts").glob("step-*.jsonl"))
    ]
    for episodes in played:
        sizes = {}
        for episode in episodes:
            sizes.setdefault((episode["environment"], episode["group"]), []).append(episode)
        assert sorted((name, len(group)) for (name, _), group in sizes.items()) == [
            ("sliding-puzzle", 3), ("sums", 2), ("sums", 2), ("sums", 2),
        ]  # fmt: skip
    levels = [next(e["difficulty"] for e in step if e["environment"] == "sliding-puzzle") for step in played]
    assert levels == [1, 2, 3]
