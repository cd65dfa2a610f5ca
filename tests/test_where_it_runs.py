"""Where a run runs does not matter: in this process, in worker processes or on Ray's nodes, every bit is the same."""

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import pytest
import yaml

from whet_testing.environments import make_environment
from whet_testing.runs import numbers


@pytest.fixture(scope="module")
def train(whet) -> Callable[..., Path]:
    """Run ten steps of GRPO on arithmetic in a process of their own, of the driver's Python; give the run folder."""
    return partial(run_ten_steps, whet)


def run_ten_steps(
    whet,
    folder: Path,
    model: Path,
    driver: Path | None = None,
    plugins: Sequence[Path] = (),
    variables: Mapping[str, str] | None = None,
    **cluster: object,
) -> Path:
    config = {
        "run": {"folder": str(folder / "run"), "steps": 10, "seed": 1},
        "model": {"path": str(model)},
        "algorithm": {"use": "grpo", "prompts_per_step": 4, "group_size": 4, "minibatches": 2},
        "backend": {"use": "fsdp2", "optimizer": {"lr": 1.0e-3}},
        "generator": {"use": "hf"},
        "rollout": {"max_tokens": 8, "temperature": 0.7},
        "environments": [{"use": "even"}],
        "plugins": [str(Path(__file__).parent / "even_digits.py"), *map(str, plugins)],
        "cluster": {"threads": {"backend": 1, "generator": 1}, **cluster},
        "loggers": [],
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    done = whet("run", folder / "run.yaml", python=driver, variables=variables, seconds=240)
    assert done.code == 0, done.errors
    return folder / "run"


@pytest.fixture(scope="module")
def inline(tmp_path_factory, tiny_model_folder, train):
    return train(tmp_path_factory.mktemp("inline"), tiny_model_folder, workers="inline")


@pytest.mark.parametrize(
    ("cluster", "transport"),
    [
        ({"colocate": [["backend", "generator"]]}, "shared"),
        ({"colocate": []}, "shared-memory"),
        ({"colocate": [], "transport": "broadcast"}, "broadcast"),
    ],
    ids=["one process", "two processes", "two processes, broadcast"],
)
def test_worker_processes_give_the_bits_of_this_process(tmp_path, tiny_model_folder, inline, cluster, transport, train):
    run = train(tmp_path, tiny_model_folder, **cluster)
    assert numbers(run) == numbers(inline)
    assert (run / "model/model.safetensors").read_bytes() == (inline / "model/model.safetensors").read_bytes()
    assert json.loads((run / "plan.json").read_text())["way"]["transport"] == transport
    assert not [log for log in (run / "logs").glob("*.log") if "goes on by connections" in log.read_text()]


LISTS_TEMPORARY_FOLDER = """
import os
import tempfile
import whet


@whet.hookimpl
def whet_step_finished(step, metrics):
    with open({path!r}, "a") as file:
        file.writelines(name + "\\n" for name in os.listdir(tempfile.gettempdir()))
"""


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A temporary folder of the run's own: other tests start Ray, too. Ray's sockets bear no long path."""
    with tempfile.TemporaryDirectory(prefix="w", dir="/tmp") as folder:
        yield Path(folder)


def test_ray_on_this_machine_gives_the_same_bits_and_leaves_nothing_in_the_temporary_folder(
    tmp_path, temporary, tiny_model_folder, inline, train, forks_under_ray
):
    pytest.importorskip("ray")
    plugin, names = tmp_path / "lists_temporary_folder.py", tmp_path / "names"
    plugin.write_text(LISTS_TEMPORARY_FOLDER.format(path=str(names)))
    run = train(tmp_path, tiny_model_folder, plugins=[plugin], variables={"TMPDIR": str(temporary)}, launcher="ray")
    assert numbers(run) == numbers(inline)
    assert json.loads((run / "plan.json").read_text())["way"]["transport"] == "shared"
    assert (run / "logs/backend-0.log").is_file()
    assert [name for name in names.read_text().splitlines() if name.startswith("whet-ray-")]
    assert not list(temporary.iterdir())


def test_a_generator_in_a_python_of_its_own_gives_the_same_bits_through_ray(
    tmp_path, tiny_model_folder, inline, generator_python, train, forks_under_ray
):
    pytest.importorskip("ray")
    run = train(tmp_path, tiny_model_folder, launcher="ray", python={"generator": str(generator_python)})
    assert_same(run, inline)


def test_trainer_and_generator_in_two_pythons_and_a_driver_without_torch_give_the_same_bits(
    tmp_path, tiny_model_folder, inline, generator_python, whet, train
):
    driver = make_environment(tmp_path / "driver", without=["torch", "transformers", "safetensors", "ray"])
    python = {"generator": str(generator_python), "backend": sys.executable}
    run = train(tmp_path, tiny_model_folder, driver, python=python)
    assert_same(run, inline)
    versions = json.loads((run / "versions.json").read_text())
    assert "torch" not in versions
    assert versions["roles"]["backend"].keys() >= {"torch", "whet-fsdp2", "whet-hf"}
    exported = whet("export", run, tmp_path / "out", python=driver)
    assert exported.code == 0, exported.errors
    assert (tmp_path / "out/model.safetensors").read_bytes() == (run / "model/model.safetensors").read_bytes()


def test_a_python_that_lacks_what_a_role_needs_is_refused_before_anything_starts(
    whet, small_run, tmp_path, generator_python
):
    """The trainer computes the loss, which is another plugin's."""
    config = small_run(tmp_path, cluster={"python": {"backend": str(generator_python)}})
    lines = whet("check", config).error.splitlines()
    where = f"cluster.python.backend: {generator_python}"
    assert [line.strip().partition(": ")[2] for line in lines[1:]] == [
        *(
            f"{where} has no {name}, and the driver {name} 0.1.0; install the same in both"
            for name in ("whet-grpo", "whet-fsdp2")
        ),
        f"{where} lacks whet_grpo and whet_fsdp2, which its workers import; install what offers it there",
    ]


def assert_same(run: Path, inline: Path) -> None:
    """Compare a run whose generator has a Python of its own with one in a single process."""
    assert numbers(run) == numbers(inline)
    assert (run / "model/model.safetensors").read_bytes() == (inline / "model/model.safetensors").read_bytes()
    assert json.loads((run / "plan.json").read_text())["way"]["transport"] == "shared-memory"
    there = json.loads((run / "versions.json").read_text())["roles"]["generator"]
    assert "whet-hf" in there
    assert not {"whet-fsdp2", "whet-grpo", "ray"} & set(there)


@pytest.fixture(scope="module")
def generator_python(tmp_path_factory) -> Path:
    """A Python with all that a generator needs, and no trainer, algorithm or Ray."""
    without = ["whet-fsdp2", "whet-grpo", "whet-sft", "ray", "datasets", "pytest"]
    return make_environment(tmp_path_factory.mktemp("other") / "venv", without=without)


@pytest.mark.skipif(
    "WHET_OTHER_PYTHON" not in os.environ, reason="WHET_OTHER_PYTHON names no Python with another torch"
)
def test_trainer_and_generator_have_different_versions_of_torch(tmp_path, tiny_model_folder, train):
    other = os.environ["WHET_OTHER_PYTHON"]
    run = train(tmp_path, tiny_model_folder, python={"generator": other})
    versions = json.loads((run / "versions.json").read_text())
    assert versions["torch"] != versions["roles"]["generator"]["torch"]
    rows = numbers(run)
    assert any(row["grad_norm"] > 0 for row in rows)
    assert max(row["logprob_gap/max"] for row in rows) < 1e-4


def test_a_trainer_on_one_node_and_a_generator_on_another_give_the_same_bits(
    tmp_path, tiny_model_folder, inline, monkeypatch, train, forks_under_ray
):
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    small = {"include_dashboard": False, "object_store_memory": 80 << 20}
    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "resources": {"train": 1}, **small})
    try:
        nodes.add_node(num_cpus=1, resources={"gen": 1}, object_store_memory=80 << 20)
        resources = {"backend": {"train": 1}, "generator": {"gen": 1}}
        run = train(
            tmp_path, tiny_model_folder, launcher="ray", address=nodes.address, colocate=[], resources=resources
        )  # fmt: skip
    finally:
        nodes.shutdown()
    assert numbers(run) == numbers(inline)
    assert (run / "model/model.safetensors").read_bytes() == (inline / "model/model.safetensors").read_bytes()
    assert json.loads((run / "plan.json").read_text())["way"]["transport"] == "shared-memory"


def test_it_learns_and_the_engines_agree_at_temperature_07(inline):
    rows = numbers(inline)
    assert any(row["grad_norm"] > 0 for row in rows)
    assert max(row["logprob_gap/max"] for row in rows) < 1e-4
