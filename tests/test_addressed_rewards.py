"""Rewards of agents, turns and groups, moving baselines and curricula, through the real generator and backend."""

from pathlib import Path

import numpy as np
import pytest
import yaml

import whet
from whet.data.files import read_rows
from whet_testing.runs import numbers

SETTINGS = {
    "algorithm": {"use": "grpo", "prompts_per_step": 8, "group_size": 8},
    "backend": {"use": "fsdp2", "optimizer": {"lr": 3.0e-3}},
    "generator": {"use": "hf"},
    "rollout": {"max_tokens": 8},
    "cluster": {"workers": "inline"},
    "plugins": [str(Path(__file__).parent / "addressed.py")],
}


def train(folder: Path, model: Path, environment, *overrides: str, steps: int = 20) -> Path:
    """Train in an environment, and return the run folder."""
    folder.mkdir(exist_ok=True)
    document = {
        "run": {"folder": str(folder / "run"), "steps": steps, "seed": 2, "save_every": 0, "export": False},
        "model": {"path": str(model)},
        "environments": [environment],
        **SETTINGS,
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(document))
    with whet.open(folder / "run.yaml", *overrides) as parts:
        parts.algorithm.run(parts)
    return folder / "run"


def column(run: Path, name: str) -> list[float]:
    return [row[name] for row in numbers(run) if name in row]


@pytest.mark.parametrize("advantages", ["group-mean", "role-baseline"])
def test_a_zero_sum_game_is_learned_by_both_players(tmp_path, tiny_model_folder, advantages):
    run = train(tmp_path, tiny_model_folder, "duel", f"algorithm.advantages={advantages}")
    even = column(run, "reward/even")
    assert np.mean(even[-4:]) > np.mean(even[:4]) + 0.2
    assert np.abs(column(run, "reward/mean")).max() < 1e-6  # what one player wins the other one loses
    white, black = (np.array(column(run, f"reward/{agent}/mean")) for agent in ("white", "black"))
    assert white == pytest.approx(-black, abs=1e-6)
    assert min(column(run, "reward/std")) > 0
    row = next(iter(read_rows(run / "rollouts/step-000001.jsonl")))
    assert [sequence["agent"] for sequence in row["addressed"]] == ["white", "black"]


def test_rewards_of_turns_teach_faster_than_their_sum(tmp_path, tiny_model_folder):
    found = {}
    for name, per_turn, advantages in (("turns", True, "turn-returns"), ("episode", False, "rloo")):
        settings = {"use": "turns", "per_turn": per_turn}
        gamma = ["algorithm.advantages.gamma=0"] if per_turn else []
        chosen = [f"algorithm.advantages.use={advantages}", *gamma, "algorithm.prompts_per_step=4"]
        run = train(tmp_path / name, tiny_model_folder, settings, *chosen, steps=12)
        found[name] = np.array(column(run, "reward/wished"))
    assert found["turns"][0] == pytest.approx(found["episode"][0])  # the same model, the same responses
    gained = {name: values[-4:].mean() - values[0] for name, values in found.items()}
    assert gained["turns"] > 1.5 * max(gained["episode"], 0.0)
    assert gained["turns"] > 0.3


def test_a_group_is_ranked(tmp_path, tiny_model_folder):
    run = train(tmp_path, tiny_model_folder, "ranked", steps=10)
    even, rank = column(run, "reward/even"), column(run, "reward/rank")
    assert np.mean(even[-3:]) > np.mean(even[:3]) + 0.05
    assert max(rank) <= 0.5
    rows = list(read_rows(run / "rollouts/step-000001.jsonl"))
    group = [row["rewards"] for row in rows if row["group"] == rows[0]["group"]]
    best = max(group, key=lambda rewards: rewards["even"])
    assert best["rank"] == max(rewards["rank"] for rewards in group)


@pytest.mark.parametrize(
    ("environment", "advantages"),
    [("duel", "role-baseline"), ("climbing", "group-mean")],
    ids=["baseline", "curriculum"],
)
def test_a_resumed_state_changes_no_bit(tmp_path, tiny_model_folder, environment, advantages):
    chosen = [f"algorithm.advantages={advantages}", "run.save_every=1", "algorithm.prompts_per_step=4"]
    whole = train(tmp_path / "whole", tiny_model_folder, environment, *chosen, steps=6)
    for steps in (3, 6):
        again = train(tmp_path / "again", tiny_model_folder, environment, *chosen, steps=steps)
    assert numbers(again, "probe/") == numbers(whole, "probe/")
    for step in range(1, 7):
        name = f"rollouts/step-{step:06d}.jsonl"
        assert (again / name).read_text() == (whole / name).read_text()
    if environment == "climbing":
        levels = [
            next(iter(read_rows(whole / f"rollouts/step-{step:06d}.jsonl")))["difficulty"] for step in range(1, 7)
        ]
        assert levels == sorted(levels)
        assert levels[0] == 1 < levels[3]  # without its state it would begin at 1 again
