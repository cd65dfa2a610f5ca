"""The section `cluster` of a config file: where the roles run, how long waits may take, what follows a loss."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import attrs
from attrs import field, frozen
from attrs.validators import deep_mapping

from whet.config.bounds import FACTOR, PROCESSES, RETRIES, SECONDS, STEPS, above, between
from whet.config.renamed import renamed

_RANKS: Any = deep_mapping(value_validator=between(1, PROCESSES))
_GPUS: Any = deep_mapping(value_validator=between(0, PROCESSES))
_AMOUNTS: Any = deep_mapping(value_validator=deep_mapping(value_validator=above(0, FACTOR)))


def is_path(named: str) -> bool:
    """Return whether `named` is the path of an interpreter. Otherwise it is the name of an environment."""
    return os.sep in named


def _absolute_paths(named: Mapping[str, str]) -> dict[str, str]:
    """Return the mapping with paths made absolute. Names of environments stay unchanged."""
    return {role: str(Path(one).expanduser().absolute()) if is_path(one) else one for role, one in named.items()}


def _heartbeat(instance: object, attribute: Any, value: float) -> None:
    """Refuse a bound that would end healthy workers."""
    if value and not value >= 1:
        raise ValueError(f"is {value:g}, wanted 0 or at least 1: a worker that is busy may be silent for a moment")


@frozen
class DeadlinesSection:
    """How long each kind of wait may take, in seconds, before the run ends with an error that names it."""

    start: float = field(default=600.0, validator=above(0, SECONDS))
    """Workers importing, loading the model and answering for the first time."""
    train: float = field(default=1800.0, validator=above(0, SECONDS))
    """One optimizer step, scoring or loss evaluation."""
    generate: float = field(default=1800.0, validator=above(0, SECONDS))
    """One completion, from request to last token."""
    weight_sync: float = field(default=600.0, validator=above(0, SECONDS), metadata=renamed("refit"))
    """One weight sync: backend to generator. With `rollout.on_weight_update: drain`, a replica may first finish its
    requests, within `generate`."""
    save: float = field(default=1800.0, validator=above(0, SECONDS))
    """Writing or reading a checkpoint."""
    episode: float = field(default=3600.0, validator=above(0, SECONDS))
    """One episode with all its turns."""
    heartbeat: float = field(default=120.0, validator=[_heartbeat, between(0, SECONDS)])
    """A worker process that is silent for this long counts as hung, even if it computes; 0: no limit. Code that holds
    Python's interpreter lock for longer is silent too."""
    notice: float = field(default=60.0, validator=between(0, SECONDS))
    """A wait of this length that is also twice as long as the longest of its kind so far is reported: who waits for
    whom, with stacks in `logs/waits.log`. Nothing is ended. 0: never."""


@frozen
class RecoverySection:
    """What happens when a worker process dies or hangs. An exception that a worker raises ends the run at once."""

    enabled: bool = field(default=True, metadata={"off": False})
    """`false`: the first death ends the run with its error."""
    replicas: int = field(default=8, validator=between(0, RETRIES))
    """How often single replicas of the generator may be restarted."""
    restarts: int = field(default=3, validator=between(0, RETRIES))
    """How often the run may restart from its last checkpoint after another worker is lost."""
    refill: int = field(default=100, validator=between(0, STEPS))
    """Number of new steps after which a restart no longer counts; 0: it always counts."""


@frozen
class ClusterSection:
    """Where the roles run."""

    launcher: str = "local"
    """What starts worker processes. `local`: this machine. Others are offered by plugins, for clusters of machines."""
    address: str = ""
    """For a launcher that joins a cluster: `host:port` of the cluster's head. `auto`: the cluster that the launcher's
    environment variable names, else the one that was started on this machine. `local`: one that starts for this run on
    this machine, and ends with it. Empty: as the environment variable states, else `local`."""
    workers: Literal["process", "inline"] = "process"
    """`process`: every role in worker processes. `inline`: everything in this process, so that a debugger works."""
    ranks: dict[str, int] = field(factory=dict, validator=_RANKS)
    """Number of worker processes of each role; 1 for a role that is not named."""
    gpus: dict[str, int] = field(factory=dict, validator=_GPUS)
    """Number of GPUs of each role; none named: the CPU. A role that shares the devices of roles with GPUs must be
    named, with 0 for the CPU. One rank for each GPU unless `ranks` states otherwise."""
    threads: dict[str, int] = field(factory=dict, validator=_RANKS)
    """Compute threads of each rank of a role. By default the ranks that work at once divide the machine's cores."""
    colocate: list[list[str]] | None = field(default=None, metadata=renamed("share"))
    """Groups of roles that share their devices and take turns. They share their worker processes, too, except roles of
    different Python environments and, on GPUs, roles whose ranks take different numbers of GPUs. By default all roles
    of one Python environment share, except the generator where `rollout.max_staleness` is above 0."""
    offload: Literal["auto", "always", "never"] = field(default="auto", metadata=renamed("sleep"))
    """Whether backend and generator release their memory while the other one works: on GPUs to the host, on CPUs to
    files. `auto`: if they share GPUs, `rollout.max_staleness` is 0 and both support it. `always`: wherever they are; a
    component that does not support it is an error."""
    placement: dict[str, Literal["pack", "spread", "one-node"]] = attrs.Factory(dict)
    """For a cluster that is joined: how the ranks of a role are placed on nodes. `pack`: on as few as possible, the
    default. `spread`: on as many as possible. `one-node`: all on one node, or the run is refused. Roles that share
    devices have one placement."""
    resources: dict[str, dict[str, float]] = field(factory=dict, validator=_AMOUNTS)
    """For a cluster that is joined: the custom resources that each rank of a role takes, e.g. `{generator: {a100: 1}}`
    for nodes that were started with `{"a100": 8}`."""
    memory: Literal["check", "ignore"] = "check"
    """`check`: refuse a run whose weights, gradients, optimizer and caches alone need more memory than a host or a GPU
    has. `ignore`: start it anyway."""
    transport: Literal["", "shared", "cuda-ipc", "broadcast", "shared-memory", "disk"] = field(
        default="", metadata=renamed(tcp="shared-memory")
    )
    """How weights are sent from backend to generator. Empty: the fastest way that both and their placement allow."""
    python: dict[str, str] = field(factory=dict, converter=_absolute_paths, metadata={"names_path": True})
    """The Python environment of a role's worker processes, if it is not the driver's: the name of an environment
    in `WHET_ENVIRONMENTS`, by default `~/.local/share/whet/environments`, or a path, which contains a slash, e.g.
    `{generator: my-engine}`."""
    deadlines: DeadlinesSection = attrs.Factory(DeadlinesSection)
    """How long waits may take."""
    recovery: RecoverySection = attrs.Factory(RecoverySection)
    """What happens when a worker process dies or hangs."""
