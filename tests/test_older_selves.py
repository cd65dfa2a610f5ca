"""Roles that generate: an opponent with weights that stay as they are, or follow the policy."""

from pathlib import Path

import numpy as np
import pytest
import yaml

import whet
from whet.data.files import read_rows
from whet_testing.runs import numbers

SETTINGS = {
    "algorithm": {"use": "grpo", "prompts_per_step": 4, "group_size": 4},
    "backend": {"use": "fsdp2", "optimizer": {"lr": 3.0e-3}},
    "generator": {"use": "hf"},
    "rollout": {"max_tokens": 8},
    "environments": [{"use": "match"}],
    "plugins": [str(Path(__file__).parent / "addressed.py")],
}


def config(folder: Path, model: Path, opponent, **sections) -> Path:
    folder.mkdir(exist_ok=True)
    run = {"folder": str(folder / "run"), "seed": 2, "export": False, **sections.pop("run", {})}
    document = {"run": run, "model": {"path": str(model)}, "roles": {"opponent": opponent}, **SETTINGS, **sections}
    (folder / "run.yaml").write_text(yaml.safe_dump(document))
    return folder / "run.yaml"


def train(path: Path, *overrides: str) -> Path:
    with whet.open(path, *overrides) as parts:
        parts.algorithm.run(parts)
    return path.parent / "run"


def opponents(run: Path, step: int) -> list[str]:
    """Return what the opponent said in the episodes of a step, in their order."""
    return [row["recorded"]["opponent"] for row in read_rows(run / f"rollouts/step-{step:06d}.jsonl")]


CLUSTERS = {
    "inline": {"workers": "inline"},
    "colocated": {"workers": "process", "colocate": [["backend", "generator", "opponent"]]},
    "apart": {"workers": "process", "colocate": []},
}


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_a_policy_learns_to_beat_an_opponent_that_stays(tmp_path, tiny_model_folder, cluster):
    path = config(
        tmp_path, tiny_model_folder, {"like": "generator"}, cluster=CLUSTERS[cluster],
        run={"steps": 14}, algorithm={"use": "grpo", "prompts_per_step": 8, "group_size": 8},
    )  # fmt: skip
    run = train(path)
    won = [row["reward/won"] for row in numbers(run) if "reward/won" in row]
    even = [row["reward/even"] for row in numbers(run) if "reward/even" in row]
    assert np.mean(won[-4:]) > np.mean(won[:4]) + 0.1
    theirs = np.array(even) - np.array(won)
    assert abs(theirs[-4:].mean() - theirs[:4].mean()) < 0.12, "the opponent has learned"


def test_an_older_self_is_the_policy_of_some_steps_ago_and_resumes_bitwise(tmp_path, tiny_model_folder):
    """Its weights are those of steps 2, 4, ...; the run is stopped after step 3."""
    role = {"use": "hf", "sync_every": 2}
    through = train(config(tmp_path / "through", tiny_model_folder, role, run={"steps": 6}))
    path = config(tmp_path / "resumed", tiny_model_folder, role, run={"steps": 6, "save_every": 3})
    train(path, "run.steps=3")
    resumed = train(path)
    assert [opponents(resumed, step) for step in (4, 5, 6)] == [opponents(through, step) for step in (4, 5, 6)]
    rewards = [[row["reward/mean"] for row in numbers(run) if "reward/mean" in row] for run in (through, resumed)]
    assert rewards[0] == rewards[1]

    still = train(config(tmp_path / "still", tiny_model_folder, {"use": "hf"}, run={"steps": 3}))
    assert opponents(still, 2) == opponents(through, 2)
    assert opponents(still, 3) != opponents(through, 3), "it never got new weights"


def test_a_role_with_new_weights_each_step_is_the_policy(tmp_path, tiny_model_folder):
    """At temperature 0 both say the same, also after the policy has changed its mind."""
    settings = {"use": "match", "temperature": 0}
    path = config(
        tmp_path, tiny_model_folder, {"like": "generator", "sync_every": 1}, run={"steps": 3},
        environments=[settings], backend={"use": "fsdp2", "optimizer": {"lr": 0.1}},
        evaluation={"every": 1, "temperature": 0, "environments": [{**settings, "split": "train", "limit": 4}]},
    )  # fmt: skip
    run = train(path)
    said = {}
    for step in (1, 2, 3):
        rows = list(read_rows(run / f"evaluations/step-{step:06d}-match.jsonl"))
        said[step] = [row["messages"][-1]["content"] for row in rows]
        assert [row["recorded"]["opponent"] for row in rows] == said[step]
    assert len({tuple(words) for words in said.values()}) > 1, "the policy has never changed"


def numbers_of(run: Path) -> list[dict]:
    """Return the metrics of a run but those of time and memory."""
    beside = ("time", "seconds/", "given_back_mib/", "memory")
    return [{name: value for name, value in row.items() if not name.startswith(beside)} for row in numbers(run)]


def test_roles_that_generate_take_turns_in_memory_and_no_number_changes(tmp_path, tiny_model_folder):
    found, given = {}, set()
    for offload in ("never", "always"):
        cluster = {"workers": "inline", "offload": offload}
        role = {"like": "generator", "sync_every": 2}
        run = train(config(tmp_path / offload, tiny_model_folder, role, run={"steps": 3}, cluster=cluster))
        given |= {name for row in numbers(run) for name in row if name.startswith("given_back_mib/")}
        found[offload] = numbers_of(run), [opponents(run, step) for step in (1, 2, 3)]
    assert found["always"] == found["never"]
    assert given == {f"given_back_mib/{role}" for role in ("backend", "generator", "opponent")}


@pytest.mark.slow
def test_an_opponent_that_is_lost_comes_back_with_the_weights_that_it_had(tmp_path, tiny_model_folder):
    """Sixteen episodes are a step, and the weights are those of step 2 when the process is killed, in step 4."""
    found = {}
    for name, kill_at in (("whole", 0), ("struck", 3 * 16 + 4)):
        run = train(
            config(
                tmp_path / name,
                tiny_model_folder,
                {"use": "hf", "sync_every": 2},
                run={"steps": 4},
                cluster=CLUSTERS["apart"],
                environments=[{"use": "match", "kill_at": kill_at}],
            )
        )
        events = [(row["event"], row.get("role")) for row in read_rows(run / "journal.jsonl")]
        assert events.count(("replica restarted", "opponent")) == bool(kill_at)
        found[name] = opponents(run, 4)
    assert found["struck"] == found["whole"]
