"""Which cluster is joined follows from the config and RAY_ADDRESS, as with `ray.init`."""

from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import pytest

from whet.config.sections import ClusterSection
from whet.errors import ConfigError
from whet_ray import hooks
from whet_ray.address import address_problem, address_to_join, head_of
from whet_ray.node_agent import interface_of

THERE = "10.0.0.1:6379"


@pytest.mark.parametrize(
    ("address", "variable", "joined"),
    [
        ("", "", ""),
        ("", THERE, THERE),
        ("", "auto", "auto"),
        ("", "local", ""),
        ("auto", "", "auto"),
        ("auto", THERE, THERE),
        ("local", THERE, ""),
        ("10.0.0.2:1", THERE, "10.0.0.2:1"),
    ],
)
def test_the_variable_counts_where_the_config_leaves_it_open(address: str, variable: str, joined: str) -> None:
    environment = {"RAY_ADDRESS": variable}
    assert address_to_join(ClusterSection(launcher="ray", address=address), environment) == joined
    assert address_to_join(ClusterSection(launcher="local"), environment) == ""
    assert address_problem(ClusterSection(launcher="ray", address=address), environment) == ""


@pytest.mark.parametrize(
    ("address", "variable", "told"),
    [
        ("ray://h:10001", "", "is 'ray://h:10001', which is for Ray's client, and the driver must run"),
        ("", "ray://h:10001", "is '', and RAY_ADDRESS is 'ray://h:10001', which is for Ray's client"),
        ("auto", "http://h:8265", "is 'auto', and RAY_ADDRESS is 'http://h:8265', which is the address of Ray's job "),
        ("head:²", "", "is 'head:²', wanted `host:port` of the cluster's head"),
        ("head:0", "", "is 'head:0', wanted `host:port` of the cluster's head"),
        ("head:65536", "", "is 'head:65536', wanted `host:port` of the cluster's head"),
        ("head", "", "is 'head', wanted `host:port` of the cluster's head, `auto` or `local`"),
    ],
)
def test_what_names_no_head_is_refused_in_words(address: str, variable: str, told: str) -> None:
    section = ClusterSection(launcher="ray", address=address)
    assert address_problem(section, {"RAY_ADDRESS": variable}).startswith(told)


def test_auto_is_the_cluster_that_was_started_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray")
    from ray._private import services

    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setattr(services, "find_gcs_addresses", lambda: {"10.0.0.1:1", "10.0.0.2:1"})
    with pytest.raises(ConfigError, match=r"is auto, and Ray's heads at 10\.0\.0\.1:1, 10\.0\.0\.2:1 run here: "):
        head_of("auto")
    monkeypatch.setattr(services, "find_gcs_addresses", set)
    with pytest.raises(ConfigError, match="is auto, and no Ray runs on this machine: `ray start --head` one"):
        head_of("auto")
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray/ray_current_cluster").write_text(f"{THERE}\n")
    assert head_of("auto") == THERE
    assert head_of("10.0.0.2:1") == "10.0.0.2:1"


@pytest.mark.parametrize(("workers", "count"), [("process", 1), ("inline", 0)])
def test_a_config_with_an_address_that_cannot_be_joined_is_refused(
    workers: Literal["process", "inline"], count: int
) -> None:
    cluster = ClusterSection("ray", "ray://10.0.0.1:6379", workers)
    problems = list(hooks.whet_check_config(SimpleNamespace(cluster=cluster)))  # type: ignore[arg-type]
    assert [str(problem).partition(", and the")[0] for problem in problems] == [
        "cluster.address: is 'ray://10.0.0.1:6379', which is for Ray's client"
    ] * count


def test_the_interface_of_an_address_is_found() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.250") == ""
    assert interface_of("::1") in ("lo", "")
