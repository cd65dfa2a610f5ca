"""A small run is traced, and the traces are read."""

import json

import pytest
import yaml

import whet
from whet.data.files import read_rows
from whet.errors import ConfigError
from whet.plan.prepare import prepare

pytestmark = pytest.mark.usefixtures("forked_workers")


@pytest.fixture
def config(tmp_path, tiny_model_folder):
    document = {
        "run": {"folder": str(tmp_path / "run"), "steps": 3, "save_every": 1, "export": False},
        "model": {"path": str(tiny_model_folder)},
        "algorithm": {"use": "grpo", "prompts_per_step": 2, "group_size": 4, "minibatches": 2},
        "backend": "fsdp2",
        "generator": "hf",
        "rollout": {"max_tokens": 4},
        "environments": ["arithmetic"],
        "hooks": [{"use": "profile", "steps": [2], "ranks": []}],
        "loggers": [],
    }
    (tmp_path / "it.yaml").write_text(yaml.safe_dump(document))
    return tmp_path / "it.yaml"


def run(config, *overrides):
    with whet.open(config, *overrides) as parts:
        parts.hooks.whet_run(algorithm=parts.algorithm, parts=parts)
    return parts


def test_the_calls_of_a_chosen_step_are_traced_and_no_number_changes(config, tmp_path):
    chosen = ["cluster.ranks={backend: 2}", "cluster.colocate=[]", "cluster.threads={backend: 1, generator: 1}"]
    run(config, *chosen, "run.steps=1", "hooks=[]")
    run(config, *chosen)  # resumes after step 1
    run(config, *chosen, f"run.folder={tmp_path / 'plain'}", "hooks=[]")
    files = sorted(str(file.relative_to(tmp_path / "run" / "profile")) for file in tmp_path.glob("run/profile/*/*"))
    # `live` finds what can change the loss, before each batch is shared out over the ranks.
    calls = ["live-1.json", "live-2.json", "score-1.json", "train-1.json", "train-2.json"]
    assert files == [f"step-000002/backend-{rank}-{call}" for rank in (0, 1) for call in calls]
    for file in tmp_path.glob("run/profile/*/*train-1.json"):
        names = {event.get("name", "") for event in json.loads(file.read_text())["traceEvents"]}
        assert names >= {"aten::mm", "[memory]"}, "operations, and allocations"
        assert any("Backward" in name for name in names)
    rows = [list(read_rows(tmp_path / name / "metrics.jsonl")) for name in ("run", "plain")]
    traced, plain = ([(row["loss"], row["grad_norm"]) for row in one if row["step"]] for one in rows)
    assert traced == plain
    assert len(plain) == 3


def test_workers_in_this_process_are_traced_and_other_roles_are_not(config, tmp_path):
    hooks = run(config, "cluster.workers=inline", "run.steps=2").hooks
    assert [one.plugin_name for one in hooks.whet_worker_group.get_hookimpls()] == ["whet"], "gone with the run"
    files = {file.name for file in tmp_path.glob("run/profile/step-000002/*")}
    assert files == {"backend-0-score-1.json", "backend-0-train-1.json", "backend-0-train-2.json"}


def test_ranks_that_a_role_does_not_have_are_refused(config):
    with pytest.raises(ConfigError, match=r"has ranks \[1, 3\], and backend has 1; wanted one below it"):
        run(config, "cluster.workers=inline", "hooks=[{use: profile, ranks: [1, 3]}]")


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ("steps: [0]", "hooks.0.steps: must be >= 1: 0"),
        ("roles: [generator]", "hooks.0.roles: generator serves requests that overlap; wanted some of backend"),
        ("roles: [critic]", "hooks.0.roles: critic is no role of this run; wanted some of backend"),
        ("step: [1]", "hooks.0.step: unknown key (did you mean 'steps'?)"),
    ],
)
def test_settings_that_make_no_sense_are_refused(config, settings, problem):
    with pytest.raises(ConfigError) as caught:
        prepare(config, [f"hooks=[{{use: profile, {settings}}}]"])
    assert [one.removeprefix("command line: ") for one in caught.value.problems] == [problem]
