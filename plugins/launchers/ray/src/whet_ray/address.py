"""Which Ray cluster a run joins. `cluster.address` and `RAY_ADDRESS` decide, with the same meaning as in `ray.init`.

cluster.address   host:port, auto, local, or empty
host:port         the cluster whose head listens there
auto              the cluster of RAY_ADDRESS; where that is not set, the cluster that `ray start` began on this machine
local             a new Ray on this machine, for this run alone; RAY_ADDRESS is ignored
empty             the cluster of RAY_ADDRESS; where that is not set, the same as local
"""

import os
from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from whet.errors import ConfigError

if TYPE_CHECKING:
    from whet.config.sections import ClusterSection

VARIABLE: Final = "RAY_ADDRESS"
_LAST_PORT: Final = 65535
_SUBMIT: Final = "`ray job submit --address http://HEAD:8265 -- whet run ...`"


def address_to_join(section: "ClusterSection", environment: Mapping[str, str] = os.environ) -> str:
    """Return `host:port` or `auto` of the cluster that a run joins, or "" where it starts Ray on this machine."""
    if section.launcher != "ray":
        return ""
    address = section.address
    if address in ("", "auto"):
        address = environment.get(VARIABLE, "").strip() or address
    return "" if address == "local" else address


def source_of(address: str, environment: Mapping[str, str] = os.environ) -> tuple[str, str]:
    """Return what named the address of a cluster, and how to change it."""
    if address == environment.get(VARIABLE, "").strip():
        return VARIABLE, f"correct {VARIABLE} or unset it; with cluster.address: local it is ignored"
    return "cluster.address", "correct cluster.address; empty or `local` starts Ray for the run alone"


def address_problem(section: "ClusterSection", environment: Mapping[str, str] = os.environ) -> str:
    """Return what is wrong with the address that a run would join, or "" where nothing is wrong."""
    address = address_to_join(section, environment)
    named = "is" if address == section.address else f"is {section.address!r}, and {VARIABLE} is"
    fault = _fault(address) if address else ""
    return f"{named} {address!r}, {fault}" if fault else ""


def head_of(address: str) -> str:
    """Return `host:port` of the cluster's head, and look it up for `auto`. Raises `ConfigError` if none is found."""
    if address != "auto":
        if fault := _fault(address):
            raise ConfigError(f"cluster.address: is {address!r}, {fault}")
        return address
    written: str | None = import_module("ray._private.utils").read_ray_address()
    if written:
        return written
    services: Any = import_module("ray._private.services")
    running = sorted(services.find_gcs_addresses())
    if len(running) == 1:
        return str(running[0])
    found = f"Ray's heads at {', '.join(running)} run here" if running else "no Ray runs on this machine"
    raise ConfigError(
        f"cluster.address: is auto, and {found}: `ray start --head` one, set {VARIABLE}, or name its `host:port`; "
        "empty or `local` starts Ray for the run alone"
    )


def _fault(address: str) -> str:
    if address == "auto":
        return ""
    if address.startswith("ray://"):
        return (
            "which is for Ray's client, and the driver must run on a machine of the cluster: "
            f"{_SUBMIT}, or `whet run` there with `host:port` of the head"
        )
    if "://" in address:
        return f"which is the address of Ray's job server: {_SUBMIT}, or give `host:port` of the cluster's head"
    host, _, port = address.rpartition(":")
    number = int(port[:9]) if port.isascii() and port.isdigit() else 0
    if host and 0 < number <= _LAST_PORT and "/" not in host:
        return ""
    return "wanted `host:port` of the cluster's head, `auto` or `local`"
