"""A doctor that finds what would end a run, and that nothing can hold up."""

import os
import platform
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

import whet
from whet.plan.prepare import prepare
from whet.plugins.registry import load_plugins
from whet_doctor import examine as doctor
from whet_doctor.checks import Check, within
from whet_doctor.examine import examine
from whet_testing.environments import make_environment

ALWAYS = [
    "python", "plugins", "torch", "ray", "cores", "memory", "shared memory", "disk", "write access", "clock",
    "open files", "ports", "hub",
]  # fmt: skip


def of(found: list[Check], name: str) -> list[tuple[str, str]]:
    return [(check.status, check.found) for check in found if check.name == name]


def test_a_machine_and_a_config_that_are_fit(good: Path) -> None:
    found = examine(str(good))
    assert {check.name for check in found} >= {*ALWAYS, "config", "model", "data"}
    for name in ("python", "config", "model", "data", "ports", "torch", "write access", "disk"):
        assert [status for status, _ in of(found, name)] == ["ok"], name
    assert "it.yaml: feeds on data" in of(found, "config")[0][1]
    assert "Qwen3ForCausalLM" in of(found, "model")[0][1]
    assert of(found, "data")[0][1].endswith("data.jsonl: JSON lines; columns prompt, answer")
    assert not (good.parent / "runs").exists(), "it only looks"


def test_what_is_wrong_with_a_config_is_a_failure_each(good: Path) -> None:
    found = list(doctor._config(str(good), ["run.stesp=1", "run.seed=x"], load_plugins(), []))
    assert [(check.status, check.found) for check in found] == [
        ("fail", "command line: run.stesp: unknown key (did you mean 'steps'?)"),
        ("fail", "command line: run.seed: wanted an integer, found the text 'x'"),
    ]


def test_a_run_folder_that_cannot_be_written_is_a_failure() -> None:
    first, *_ = doctor._write_access(Path("/proc/runs"))
    assert first.status == "fail"
    assert first.found.startswith("/proc cannot be written: ")


def test_a_model_without_weights_is_a_failure(good: Path, tmp_path: Path) -> None:
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_text("{}")
    (found,) = doctor._model(prepare(good, [f"model.path={tmp_path}/bare"]))
    assert found.status == "fail"


@pytest.mark.parametrize(("text", "status"), [('{no json\n{"a": 1}\n', "warn"), ('{"a": 1}\n', "ok")])
def test_the_first_record_of_each_file_is_read(good: Path, tmp_path: Path, text: str, status: str) -> None:
    (tmp_path / "data.jsonl").write_text(text)
    (found,) = doctor._data(prepare(good))
    assert found.status == status


def test_data_without_a_record_is_a_failure(good: Path, tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text("")
    assert [status for status, found in of(examine(str(good)), "config") if "holds no record" in found] == ["fail"]


def test_a_ray_cluster_that_does_not_answer_is_a_failure(good: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        there = examine(str(good), ["cluster.launcher=ray", f"cluster.address={address}"])
    gone = examine(str(good), ["cluster.launcher=ray", f"cluster.address={address}"])
    assert ("ok", f"{address} answers") in of(there, "ray")
    [(status, found)] = [one for one in of(gone, "ray") if address in one[1]]
    assert status == "fail"
    assert found.startswith(f"nobody answers at {address}: ")


def test_gpus_that_the_plan_lacks_are_a_failure(good: Path) -> None:
    lacking = prepare(good, ["cluster.gpus.backend=800"])
    [found] = doctor._gpus(lacking)
    assert (found.status, [found.found]) == ("fail", list(lacking.plan.warnings)), "what `whet check` says"
    assert [check.status for check in doctor._gpus(prepare(good))] == ["ok"]


def test_a_check_that_hangs_is_a_finding() -> None:
    ended = threading.Event()

    def hang() -> Any:
        ended.wait(60)
        yield Check("disk", "ok", "at last")

    found, other = within(0.5, {"disk": hang, "python": doctor._python})
    ended.set()
    assert (found.name, found.status, found.found) == ("disk", "fail", "no answer within 0.5 s")
    assert other.name == "python", "the others are not held up"


def test_a_check_that_raises_is_a_finding() -> None:
    def check() -> Any:
        yield Check("disk", "ok", "half")
        raise OSError("stale file handle")

    half, found = within(10, {"disk": check})
    assert (half.status, found.status) == ("ok", "fail")
    assert "OSError: stale file handle" in found.found


@pytest.mark.parametrize(
    ("source", "status", "words"),
    [
        ("raise ImportError('no libcudart')", "fail", "it cannot be imported: ImportError: no libcudart"),
        ("import time; time.sleep(60)", "fail", "gave no answer in "),
        ("import os; os._exit(11)", "fail", "it cannot be imported: exit code 11"),
    ],
)  # fmt: skip
def test_torch_is_asked_in_a_process_of_its_own(monkeypatch, tmp_path, source, status, words) -> None:
    (tmp_path / "torch.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (found,) = doctor._torch(1.0 if "sleep" in source else 50.0)
    assert found.status == status
    assert words in found.found


@pytest.mark.parametrize(
    ("build", "seen", "driver", "status"),
    [("", 0, 0, "ok"), ("", 0, 2, "warn"), ("12.8", 0, 2, "fail"), ("12.8", 1, 2, "warn"), ("12.8", 2, 2, "ok")],
)
def test_gpus_that_torch_cannot_use_are_told(build: str, seen: int, driver: int, status: str) -> None:
    answer = {"version": "2", "threads": 1, "build": build, "gpus": [["H200", 1 << 30, 2 << 30]] * seen}
    found = doctor._of_torch(answer, driver)
    assert found.status == status
    assert bool(found.change) == (status != "ok")


@pytest.mark.parametrize(
    ("quota", "threads", "status"), [("50000", "", "warn"), ("50000", "1", "ok"), ("max", "", "ok")]
)
def test_a_container_with_less_than_its_cores_is_told(monkeypatch, tmp_path, quota, threads, status) -> None:
    for name, text in (("proc/self/cgroup", "0::/\n"), ("sys/fs/cgroup/cpu.max", f"{quota} 100000\n")):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setenv("OMP_NUM_THREADS", threads)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
    (found,) = doctor._cores(tmp_path)
    assert found.status == status
    assert ("set OMP_NUM_THREADS=1" in found.change) == (status == "warn")


def test_a_hub_without_a_home_folder_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_HOME", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as where neither HOME nor the user is known
    (found,) = doctor._hub()
    assert (found.status, found.change) == ("warn", "set HOME, or HF_HOME to a folder")


def test_a_cache_of_the_hub_in_the_home_folder_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_CACHE", "~/hub")
    (found,) = doctor._hub()
    assert found.found.startswith(f"cache {tmp_path / 'hub'},")
    assert "no home folder" not in found.found


def test_broken_plugins_are_warnings(offers: Any, install: Any) -> None:
    install("whet-bad", {"bad_hooks": "1 / 0"})
    good, bad = doctor._plugins(load_plugins())
    assert "whet-offers 1.0" in good.found
    assert (bad.status, bad.change) == ("warn", "`whet plugins why whet-bad`")
    assert "ZeroDivisionError" in bad.found


def test_the_python_of_a_role_is_shown_with_its_torch(good: Path, tmp_path: Path) -> None:
    python = make_environment(tmp_path / "other")
    prepared = prepare(good, [f"cluster.python.backend={python}"])
    assert list(prepared.interpreters) == ["backend"]
    found = list(doctor._interpreter("backend", prepared.interpreters["backend"], 60.0))
    assert [(check.name, check.status) for check in found] == [("python of backend", "ok"), ("torch of backend", "ok")]
    assert found[0].found.startswith(f"{python}: Python {platform.python_version()}, whet {whet.__version__}, torch ")


def test_a_python_that_does_not_fit_a_role_fails_the_config(good: Path, tmp_path: Path) -> None:
    python = make_environment(tmp_path / "other", without=["whet"])
    [check] = doctor._config(str(good), [f"cluster.python.backend={python}"], load_plugins(), [])
    assert check.status == "fail"
    assert check.found.startswith(f"command line: cluster.python.backend: {python} has no whet (ModuleNotFoundError")
