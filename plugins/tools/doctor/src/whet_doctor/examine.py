"""Looks at a machine, and at a config where one is given, for what would end a run later. Imports no torch here.

Every check has a deadline: a dead network file system or a driver that hangs is a finding, not a doctor that hangs.
"""

import importlib.util
import json
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from whet.component import CORE_VERSION, KINDS
from whet.data.model_info import check_weights
from whet.errors import ConfigError, WhetError
from whet.installed import entry_points
from whet.plan import machine
from whet.plan.layers import placed
from whet.plan.memory import HOST, size, whose
from whet.plan.prepare import Prepared, field_names, packages_here, prepare
from whet.plan.rank_placement import gpu_problems
from whet.plugins import launchers
from whet.plugins.features import reader
from whet.plugins.registry import Registry, load_plugins
from whet.runtime.interpreters import OLDEST_PYTHON, Interpreter, surroundings, versions
from whet_doctor.checks import Check, Checker, Status, within

SECONDS = 60.0
"""Deadline of the checks, which are made at one time."""
GIB = 1 << 30
PROBE = """
import json, torch
count = torch.cuda.device_count() if torch.cuda.is_available() else 0
print(json.dumps({
    "version": str(torch.__version__), "threads": torch.get_num_threads(),
    "build": torch.version.cuda or torch.version.hip or "",
    "gpus": [[torch.cuda.get_device_name(i), *torch.cuda.mem_get_info(i)] for i in range(count)],
}))
"""
"""Asks torch in a process of its own."""


def examine(config: str | None = None, overrides: Sequence[str] = (), *, seconds: float = SECONDS) -> list[Check]:
    """Check the machine, and with a config also whether its run can start here."""
    registry = load_plugins()
    prepared: list[Prepared] = []
    found = []
    if config is not None:
        found = within(seconds, {"config": lambda: _config(config, overrides, registry, prepared)})
    plan = prepared[0] if prepared else None
    folder = Path(plan.config.run.folder) if plan else Path()
    checkers: dict[str, Checker] = {
        "python": _python,
        "plugins": lambda: _plugins(registry),
        "torch": lambda: _torch(seconds, plan),
        "cores": _cores,
        "memory": lambda: _memory(plan),
        "gpus": lambda: _gpus(plan),
        "shared memory": _shared_memory,
        "disk": lambda: _disk(folder, plan),
        "write access": lambda: _write_access(folder),
        "open files": _open_files,
        "network": _network,
        "hub": _hub,
    }
    checkers |= {name: partial(_launcher, name, plan) for name in launchers.found()}
    if plan:
        checkers |= {"model": lambda: _model(plan), "data": lambda: _data(plan), "engine": lambda: _packages(plan)}
        checkers |= {
            f"python of {role}": partial(_interpreter, role, found, seconds)
            for role, found in plan.interpreters.items()
        }  # fmt: skip
    return found + within(seconds, checkers)


def _config(config: str, overrides: Sequence[str], registry: Registry, prepared: list[Prepared]) -> Iterator[Check]:
    try:
        prepared.append(prepare(config, overrides, registry=registry))
    except ConfigError as error:
        for problem in error.problems:
            yield Check("config", "fail", problem, f"correct it in {config}, or among the overrides")
    except WhetError as error:
        yield Check("config", "fail", str(error))
    else:
        yield Check("config", "ok", f"{config}: {prepared[0].plan.describe().splitlines()[0]}")


def _python() -> Iterator[Check]:
    found, oldest = f"{platform.python_version()}, {sys.executable}", ".".join(map(str, OLDEST_PYTHON))
    yield _judged("python", sys.version_info < OLDEST_PYTHON, found, f"whet needs {oldest} or newer", "fail")


def _plugins(registry: Registry) -> Iterator[Check]:
    """List what offers components, endpoints or commands, and what cannot be used."""
    names = {f"{source.distribution} {source.version}".rstrip() for source in registry.sources}
    commands = [entry.dist for entry in entry_points("whet.commands")]
    names |= {f"{found.name} {found.version}" for found in commands if found is not None}
    yield Check("plugins", "ok", ", ".join([f"whet {CORE_VERSION}", *sorted(names)]))
    for broken in registry.broken:
        yield Check("plugins", "warn", f"not usable: {broken}", f"`whet plugins why {broken.distribution}`")
    for kind in KINDS:
        for name, offers in registry.contested(kind).items():
            owners = " and ".join(offer.distribution for offer in offers)
            yield Check(
                "plugins", "warn", f"{kind}/{name} is offered by {owners}", "use: DISTRIBUTION/NAME chooses one"
            )


def _torch(seconds: float, plan: Prepared | None = None) -> Iterator[Check]:
    if importlib.util.find_spec("torch") is None:
        if plan is not None and {role.role for role in plan.plan.roles} <= set(plan.interpreters):
            yield Check("torch", "ok", "not installed here, and not needed: every role has a Python of its own")
            return
        yield Check("torch", "warn", "not installed here", "pip install torch, wherever backends and generators run")
        return
    found = _asked_torch("torch", [sys.executable, "-P"], os.environ, seconds)
    yield found
    if found.status == "fail":
        return
    held, wanted = versions(), ("transformers", "safetensors")
    missing = " ".join(name for name in wanted if name not in held)
    words = ", ".join(f"{name} {held.get(name, 'not installed')}" for name in wanted)
    yield _judged("libraries", bool(missing), words, f"pip install {missing}")


def _asked_torch(name: str, python: Sequence[str], environment: Mapping[str, str], seconds: float) -> Check:
    """Import torch in a process of its own, and return what it reports."""
    command = [*python, "-c", PROBE]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=0.9 * seconds, check=False, env=environment
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return Check(name, "fail", f"its import or CUDA gave no answer in {0.9 * seconds:g} s", "look at the driver")
    if done.returncode:
        words = done.stderr.strip().rpartition("\n")[2] or f"exit code {done.returncode}"
        return Check(name, "fail", f"it cannot be imported: {words}", "install torch anew")
    return _of_torch(json.loads(done.stdout.splitlines()[-1]), machine.gpu_count(), name)


def _interpreter(role: str, found: Interpreter, seconds: float) -> Iterator[Check]:
    """Show the Python of a role, and what torch sees there; that it fits the driver was checked with the config."""
    yield Check(f"python of {role}", "ok", str(found))
    if "torch" in found.versions:
        environment = surroundings(found.executable, os.environ)
        yield _asked_torch(f"torch of {role}", [found.executable, "-P"], environment, seconds)


def _packages(plan: Prepared) -> Iterator[Check]:
    """Look for the packages of workers in this Python. Other Pythons were checked with the config."""
    for role, package in packages_here(plan.config.cluster, plan.roles):
        name = f"{package.name} of {role}"
        held = package.version(versions(package.distributions)) or "of no known version"
        found = f"{held}, {sys.executable}" if package.is_here else f"{sys.executable} has none"
        yield _judged(name, not package.is_here, found, package.install, "fail")


def _of_torch(torch: Any, gpus: int, name: str = "torch") -> Check:
    seen = "; ".join(f"{name}, {free / GIB:.0f} of {total / GIB:.0f} GiB free" for name, free, total in torch["gpus"])
    build = f"CUDA {torch['build']}" if torch["build"] else "CPU build"
    found = f"{torch['version']} ({build}), {torch['threads']} threads, {seen or 'no GPU'}"
    if gpus and not torch["build"]:
        return Check(name, "warn", f"{found}; the driver shows {gpus}", "install a torch built for CUDA")
    if gpus > len(torch["gpus"]):
        status: Status = "warn" if torch["gpus"] else "fail"
        change = f"update the driver, or install a torch for its CUDA; {torch['build']} is what this one was built for"
        return Check(name, status, f"{found}; the driver shows {gpus}", change)
    return Check(name, "ok", found)


def _launcher(name: str, plan: Prepared | None) -> Iterator[Check]:
    """Report what a launcher finds; with a config that uses it, also about the cluster that the run joins."""
    used = plan is not None and plan.plan.launcher == name and not plan.plan.inline
    for finding in launchers.launching(name).examine(plan.config.cluster if used and plan is not None else None):
        yield Check(name, *finding)


def _cores(root: Path = machine.ROOT) -> Iterator[Check]:
    bound, quota, usable = len(os.sched_getaffinity(0)), machine.cpu_quota(root), machine.usable_cores(root)
    found = f"{bound} cores" + (f", of which the container may use {quota:g}" if quota is not None else "")
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    if wanted.isdecimal() and int(wanted) > usable:
        yield Check("cores", "warn", f"{found}; OMP_NUM_THREADS is {wanted}", f"set OMP_NUM_THREADS={usable}")
    elif usable < bound and not wanted:
        change = f"whet plans with {usable}; set OMP_NUM_THREADS={usable} for graders and other programs"
        yield Check("cores", "warn", found, change)
    else:
        yield Check("cores", "ok", found)


def _memory(plan: Prepared | None) -> Iterator[Check]:
    """Compare what the plan takes with what there is, as `whet check` does, and with what is free now."""
    free, total = machine.available_memory(), machine.total_memory()
    found = f"{size(free)} available" + (f" of {size(total)}" if total else "")
    if plan is None:
        yield Check("memory", "ok", found)
        return
    overfull = [room for room in plan.plan.memory if room.overfull]
    for room in overfull:
        words = f"{whose(room, plan.machine)} has {size(room.has or 0)}, the plan takes at least {size(room.needs)}"
        if plan.config.cluster.memory == "ignore":
            yield Check("memory", "warn", words, "cluster.memory is ignore, so it is tried all the same")
    for refusal in plan.plan.refusals:
        yield Check("memory", "fail", refusal)
    if overfull:
        return
    needed = max((room.needs for room in plan.plan.memory if room.place == HOST), default=0)
    found += f", the plan takes at least {size(needed)}" if needed else ""
    change = "end other programs; what the run lacks, the system takes by killing one of its processes"
    yield _judged("memory", needed > free, found, change)


def _gpus(plan: Prepared | None) -> Iterator[Check]:
    """Count GPUs as the plan does."""
    count = machine.gpu_count()
    sizes = [size(known) for known in machine.gpu_memory(count) if known]
    found = f"{count}" + (f": {', '.join(f'{sizes.count(one)} x {one}' for one in dict.fromkeys(sizes))}" * bool(sizes))
    problems = gpu_problems(plan.config.cluster, plan.roles, plan.plan.roles, plan.machine) if plan else []
    for problem in placed(map(str, problems), plan.loaded.layers) if plan else ():
        change = "run it where they are, or lower cluster.gpus; `whet check --machine` plans for another machine"
        yield Check("gpus", "fail", problem, change)
    if not problems:
        yield Check("gpus", "ok", found)


def _shared_memory() -> Iterator[Check]:
    """Look at /dev/shm, where launchers and engines share memory. Weight syncs take none of its room."""
    folder = Path("/dev/shm")
    if not folder.is_dir():
        change = "engines and clusters want it; mount a tmpfs there"
        yield Check("shared memory", "warn", "there is no /dev/shm", change)
        return
    free = shutil.disk_usage(folder).free
    change = "give the container more, e.g. docker run --shm-size=16g"
    yield _judged("shared memory", free < GIB // 4, f"{free / GIB:.2f} GiB free in /dev/shm", change)


def _disk(folder: Path, plan: Prepared | None) -> Iterator[Check]:
    usage = shutil.disk_usage(_existing(folder))
    found = f"{usage.free / GIB:.1f} GiB free for {folder.absolute()}"
    change = "free some space, choose another run.folder, or lower run.keep"
    if plan:  # weights and two moments in float32 for each checkpoint, one more while it is written, and the export
        run = plan.config.run
        saves = -(-run.steps // run.save_every) if run.steps and run.save_every else 1
        if run.save_every and not run.steps:  # by epochs: the number of steps is not known here
            saves = run.keep or 1
        kept = min(run.keep or saves, saves) + 1
        whole = 0 if plan.roles.backend.adapter else 12 * kept  # of an adapter a checkpoint holds little
        needed = plan.model.parameters * (whole + 4 * run.export)
        found += f"; checkpoints take about {needed / GIB:.1f} GiB"
        found += "; it holds a run" if (folder / "config.yaml").exists() else ""
        yield _judged("disk", usage.free < needed, found, change, "fail")
    else:
        yield _judged("disk", usage.free < 5 * GIB, found, change)


def _write_access(folder: Path) -> Iterator[Check]:
    """Write a file where runs write, and compare its time with the clock."""
    written, late = [], 0.0
    for place in dict.fromkeys((_existing(folder), Path(tempfile.gettempdir()))):
        try:
            with tempfile.NamedTemporaryFile(dir=place, prefix=".whet-doctor-") as file:
                late = max(late, abs(os.fstat(file.fileno()).st_mtime - time.time()))
        except OSError as error:
            change = "choose another run.folder or TMPDIR, or change the folder's permissions"
            yield Check("write access", "fail", f"{place} cannot be written: {error.strerror}", change)
        else:
            written.append(str(place))
    if written:
        yield Check("write access", "ok", " and ".join(written))
    if late > 5:
        found = f"this machine and the file system are {late:.0f} s apart"
        yield Check("clock", "warn", found, "synchronise both by NTP: times in records are not comparable")
    elif time.time() < Path(__file__).stat().st_mtime - 3600:
        yield Check("clock", "warn", f"it is {time.ctime()}, before whet was installed", "set the clock")
    else:
        yield Check("clock", "ok", time.strftime("%Y-%m-%d %H:%M:%S %Z"))


def _open_files() -> Iterator[Check]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = "unlimited" if soft == resource.RLIM_INFINITY else str(soft)
    few = soft != resource.RLIM_INFINITY and soft < 4096
    target = 65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)
    change = f"ulimit -n {target}" if target > soft else "raise the hard limit"
    yield _judged("open files", few, f"at most {most} for each process", change)


def _network() -> Iterator[Check]:
    """Connect to a free port of this machine, as workers do, and look its own name up, as torch does."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname(), 5):
            port = server.getsockname()[1]
    except OSError as error:
        yield Check("ports", "fail", f"no connection within this machine: {error}", "allow loopback connections")
        return
    yield Check("ports", "ok", f"127.0.0.1:{port} can be listened on and reached")
    name = socket.gethostname()
    try:
        socket.getaddrinfo(name, None)
    except OSError as error:
        change = f"add {name} to /etc/hosts, or set GLOO_SOCKET_IFNAME: several ranks look it up"
        yield Check("host name", "warn", f"{name} cannot be looked up: {error}", change)


def _hub() -> Iterator[Check]:
    home = os.path.expanduser(os.environ.get("HF_HOME", "~/.cache/huggingface"))
    cache = Path(os.path.expanduser(os.environ.get("HF_HUB_CACHE", f"{home}/hub")))
    offline = [
        name for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE") if os.environ.get(name, "0") not in ("", "0")
    ]
    words = f"offline by {' and '.join(offline)}" if offline else "not set to be offline; nothing was asked of it"
    found = f"cache {cache}, {words}"
    if str(cache).startswith("~"):
        yield Check("hub", "warn", f"{found}; there is no home folder", "set HOME, or HF_HOME to a folder")
    elif not os.access(_existing(cache), os.W_OK):
        yield Check("hub", "warn", f"{found}; it cannot be written", "set HF_HOME to a folder that can")
    elif "huggingface-hub" not in versions(["huggingface-hub"]):
        yield Check("hub", "warn", f"{found}; huggingface-hub is not installed", "pip install 'whet[hub]'")
    else:
        yield Check("hub", "ok", found)


def _model(plan: Prepared) -> Iterator[Check]:
    info, named = plan.model, plan.config.model.path
    found = (
        f"{info.architecture or 'unknown architecture'}, {info.parameters / 1e6:,.1f} million parameters, {info.path}"
    )
    try:
        check_weights(Path(info.path))
    except WhetError as error:
        if Path(named).expanduser().is_dir():
            yield Check("model", "fail", str(error), "complete the model folder")
        else:
            yield Check("model", "warn", f"{found}; its weights are not in the cache", "the run begins by a download")
        return
    yield Check("model", "ok", found)


def _data(plan: Prepared) -> Iterator[Check]:
    """Look at the first record of each data file; files that cannot be read have failed with the config."""
    data = plan.config.data
    for file in [*data.train, *data.validation] if data else []:
        seen = reader().look(file, (), field_names(plan.config.algorithm))
        found = seen.doubt or f"{file.path}: {seen.recognised or 'not looked at'}"
        yield _judged("data", bool(seen.doubt), found, "look at the file's first record")


def _judged(name: str, bad: bool, found: str, change: str, status: Status = "warn") -> Check:
    """Return a check with the change to make if `found` is bad. It is ok otherwise."""
    return Check(name, status, found, change) if bad else Check(name, "ok", found)


def _existing(folder: Path) -> Path:
    """Return the folder, or the nearest one around it that exists."""
    folder = folder.absolute()
    return next((place for place in (folder, *folder.parents) if place.is_dir()), Path("/"))
