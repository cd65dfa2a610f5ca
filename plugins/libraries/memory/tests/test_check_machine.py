"""`whet check --machine` plans for machines that are not here; without it GPUs that are missing are a warning."""

import json
from pathlib import Path
from typing import Any

GPUS = "cluster.gpus.backend=8"


def test_a_recipe_for_gpus_is_planned_where_there_are_none_and_runs_nowhere_but_there(
    command: Any, config: Path
) -> None:
    done = command("check", str(config), "cluster.gpus.backend=800")
    assert done.exit_code == 0, done.stderr
    told = "warnings, for it cannot run here:\n  command line: cluster.gpus: asks for 800 GPUs; this machine has "
    assert told in done.stdout
    assert "backend: trainer, 800 ranks x 1 thread on cuda:0, cuda:1" in done.stdout
    found = json.loads(command("check", str(config), "cluster.gpus.backend=800", "--json").stdout)
    assert (found["ok"], found["problems"], len(found["warnings"])) == (True, [], 1)


def test_what_a_machine_lacks_is_named_with_the_line_that_asks_for_it(
    command: Any, config: Path, tmp_path: Path
) -> None:
    (tmp_path / "more.yaml").write_text(f"extends: {config}\ncluster:\n  gpus: {{backend: 800}}\n")
    done = command("check", "more.yaml")
    assert "  more.yaml:3: cluster.gpus: asks for 800 GPUs; this machine has " in done.stdout


def test_a_machine_that_is_described_takes_the_place_of_this_one(command: Any, config: Path) -> None:
    fit = command("check", str(config), GPUS, "--machine", "8xH100,cores=96,memory=1TB")
    assert fit.exit_code == 0, fit.stderr
    assert fit.stdout.startswith("structure: ok\nproblems: none\nplan:\n")
    assert "8 ranks x 12 threads on cuda:0" in fit.stdout
    assert "no role computes on a GPU" not in fit.stdout
    idle = command("check", str(config), "--machine", "8xH100,cores=96,memory=1TB")
    told = "no role computes on a GPU, and there are some; state cluster.gpus, the number for each of: backend"
    assert told in idle.stdout
    small = command("check", str(config), GPUS, "--machine", "4xH100,cores=96,memory=1TB")
    assert small.exit_code == 1
    assert small.stderr == "Error: command line: cluster.gpus: asks for 8 GPUs; the given machine has 4\n"
    assert "backend: trainer, 8 ranks" in small.stdout, "the plan is printed all the same"
    found = json.loads(command("check", str(config), GPUS, "--machine", "4xH100", "--json").stdout)
    told = "command line: cluster.gpus: asks for 8 GPUs; the given machine has 4"
    assert (found["ok"], found["problems"]) == (False, [told])
    assert found["plan"]["roles"][0]["ranks"] == 8


def test_machines_of_a_file_are_those_of_a_cluster(command: Any, config: Path, tmp_path: Path) -> None:
    (tmp_path / "two.yaml").write_text("nodes: [{count: 2, cores: 16, memory: 64GB, gpus: 4xA100-40GB}]")
    ray = "cluster.launcher=ray", "cluster.placement={backend: spread}"
    done = command("check", str(config), GPUS, *ray, "--machine", "two.yaml")
    assert done.exit_code == 0, done.stderr
    local = command("check", str(config), "cluster.gpus.backend=4", "--machine", "two.yaml")
    assert "only the first of the 2 machines is used, as cluster.launcher is local" in local.stdout
    apart = command("check", str(config), GPUS, "cluster.launcher=ray", "cluster.placement={backend: one-node}",
                    "--machine", "two.yaml")  # fmt: skip
    assert apart.exit_code == 1
    assert "no machine of the 2 given machines has room left for rank 0 of backend" in apart.stderr


def test_words_that_describe_no_machine_are_refused(command: Any, config: Path) -> None:
    done = command("check", str(config), "--machine", "8xH1000")
    assert done.exit_code == 1
    assert done.stderr.startswith("Error: --machine: gpus: the memory of 'H1000' is not known here")
