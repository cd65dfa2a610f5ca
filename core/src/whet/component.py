"""What a plugin says about the things it offers: `Component`, and the `Facts` that planning reads."""

import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from attrs import field, frozen

from whet.errors import PluginError

CORE_VERSION = "0.1.0"
"""Of the distribution `whet`; `whet.__version__` is the same."""

Kind = Literal["backends", "generators", "losses", "environments", "loggers", "algorithms", "advantages", "filters"]
KINDS: tuple[Kind, ...] = (
    "backends", "generators", "losses", "environments", "loggers", "algorithms", "advantages", "filters",
)  # fmt: skip

_FILE = "file:"


@frozen
class Component:
    """One thing that a plugin offers. Making one imports nothing heavy."""

    name: str
    """The word after `use:`; lower-case with dashes."""
    config: type
    """The attrs class of its section of the config; every field documented by a string beneath it."""
    target: str
    """`package.module:Class`, imported only in the process that runs it, and called with the config first. Single-file
    plugins say `f"{__name__}:Class"`; it becomes `file:/path/to/file.py:Class`."""
    facts: str = ""
    """`package.module:function`, called with (config, model) without torch, returning `Facts`. Empty: no facts."""


@frozen
class RoleNeed:
    """What an algorithm or environment wants of a further model."""

    outputs: frozenset[str] = frozenset()
    """Model outputs that it must give, e.g. `values`."""
    trained: bool = False
    """Whether it is trained, and so saved with the run; else it stays as it was loaded."""
    conversations: bool = False
    """Whether it reads whole conversations of episodes, none of which may be longer than its positions."""


@frozen
class Package:
    """What workers stand on and no plugin installs, as engines are; looked for in the Python that they will run in."""

    name: str
    """What people call it."""
    module: str
    """Its top-level module."""
    distributions: tuple[str, ...]
    """Those that offer it."""
    install: str
    """What to do where it is missing."""

    @property
    def is_here(self) -> bool:
        """Whether this interpreter can import it; nothing is imported."""
        return importlib.util.find_spec(self.module) is not None

    def version(self, versions: Mapping[str, str]) -> str:
        """Give its version out of those of distributions by name; empty: none of them offers it."""
        return next((versions[name] for name in self.distributions if name in versions), "")


@frozen
class MemoryTerm:
    """A part of what one rank holds in memory, as far as it can be known beforehand."""

    what: str
    """What it is, e.g. `gradients`, and how many ranks share it out."""
    bytes: int
    """On this rank; over all its GPUs, where it has several."""
    when: Literal["working", "loading"] = "working"
    """`loading`: held for a while as the rank starts, and not beside what is held while it works."""
    place: Literal["", "host", "gpu"] = ""
    """Empty: where the rank computes. `host`: in the host's memory, also where the rank has a GPU. `gpu`: only where it
    has a GPU."""
    kept_asleep: bool = True
    """Whether it waits in the host's memory while a role with GPUs sleeps; else it is freed."""
    gpu_share: float = 0.0
    """On a GPU: the share of its memory that the role takes in all, this term being what the others leave of that."""
    change: str = ""
    """What to change for less of it, e.g. `lower generator.cache_gib`."""


@frozen
class Facts:
    """All that planning knows of a component. What fits what is derived from facts, never listed by name."""

    inputs: frozenset[str] = frozenset()
    """Of an algorithm: what it feeds on, of `rollouts` and `data`."""
    data_format: str = ""
    """Of an algorithm that feeds on `data`: the records it reads, e.g. `conversations` or `pairs`."""
    record_fields: tuple[tuple[str, ...], ...] = ()
    """Of an algorithm that feeds on `data`: fields of which a record has all of one tuple, as they are called in the
    data; `whet check` looks for them. None: it does not look."""
    encode: str = ""
    """Of an algorithm that feeds on `data`: `package.module:function`, called as `function(config, model)`, returns the
    `Encode` (see `whet.data.offline`) that turns a record into sequences. `run.epochs` and `whet data look` need it."""
    records_per_step: int | None = None
    """Of an algorithm that feeds on `data`: records that one step consumes. `run.epochs` needs it."""
    outputs_needed: frozenset[str] = frozenset()
    """Of a loss: the model outputs it reads, e.g. `logprobs`, `entropy`; see `whet.interfaces.backend`. Of an
    algorithm: those that it scores by itself, beyond `logprobs`."""
    outputs_given: frozenset[str] = frozenset()
    """Of a backend: the model outputs it can compute."""
    weights_needed: frozenset[str] = frozenset()
    """Of an algorithm: sets of weights that it scores with beside the policy's, e.g. `reference`."""
    weights_given: frozenset[str] = frozenset({"policy"})
    """Of a backend: the sets of weights it holds. Whether `reference` is one is its setting `reference`."""
    role: str = "backend"
    """Of a loss: the role whose outputs it reads."""
    roles: Mapping[str, RoleNeed] = field(factory=dict)
    """Of an algorithm or environment: further models that it uses, by the names they have under `roles`."""
    states_answers: bool | None = None
    """Of an environment: whether it has a `final_answer`, which majority votes need. None: only the built one tells."""
    columns_read: frozenset[str] = frozenset()
    """Batch columns that a loss or algorithm reads beyond those that are always there."""
    columns_written: frozenset[str] = frozenset()
    """Batch columns that an algorithm adds."""
    columns_essential: frozenset[str] = frozenset()
    """Of an algorithm: columns that carry what it makes of its data; a loss that reads none of them would ignore it."""
    token_advantages: bool = False
    """Of advantages and algorithms: whether each token gets an advantage of its own [N], rather than each sequence [B].
    Of a loss: whether it takes those, too."""
    greedy_sample: bool = False
    """Of advantages: whether each group needs one more answer, at temperature 0, whose reward is the column
    `greedy_reward` [B]. It is not trained on and counts nowhere else."""
    least_group_size: int = 1
    """Of advantages and filters: samples of one task that they need to compare."""
    transports: tuple[str, ...] = ()
    """Of backends and generators: ways to hand weights over, best first, of `shared`, `cuda-ipc`, `broadcast`,
    `shared-memory`, `tcp`, `disk`."""
    on_weight_update: tuple[str, ...] = ("drain",)
    """Of generators: what can happen to requests under way when new weights arrive, of `drain`, `continue`, `abort`."""
    dtype: str = ""
    """Of generators: what they compute in, e.g. `bfloat16`, or a name of their own for anything coarser. Empty: in the
    dtype of the model."""
    ranks: int = 1
    """Of backends and generators: worker processes wanted."""
    processes: int = 1
    """Of generators: processes over which each rank spreads its model, e.g. by tensor parallelism. Each takes weights,
    and has a GPU where there are any."""
    group_size: int | None = None
    """Of an algorithm: samples of one task that it compares with each other."""
    groups_per_step: int | None = None
    """Of an algorithm fed by rollouts: groups that one step consumes."""
    memory: Callable[[int, bool], Iterable[MemoryTerm]] | None = None
    """Of backends and generators: called with the role's number of ranks and whether it is trained, it returns what one
    rank holds in memory. None: nothing is known."""
    imports: tuple[str, ...] = ()
    """Of backends and generators: modules that their workers will need; imported early, beside other preparations."""
    sleeps: tuple[str, ...] = ()
    """Of backends and generators: devices on which `sleep` gives memory back, of `cpu` and `cuda`."""
    packages: tuple[Package, ...] = ()
    """Of backends and generators: what their workers stand on beside what their plugins install."""
    forkable: bool = False
    """Of backends and generators: whether a worker's process may be forked from one that has imported `imports`, its
    own and those of other such roles: they start no thread, open no device, and change nothing for others."""
    notes: tuple[str, ...] = ()
    """Anything else that `whet check` should print, a sentence each."""


@frozen
class Problem:
    """One thing wrong with a config: where, and what to change."""

    path: str
    """Dotted path into the config, e.g. `rollout.max_tokens`; empty for the whole."""
    message: str

    def __str__(self) -> str:
        return f"{self.path}: {self.message}" if self.path else self.message


@frozen
class Selection:
    """A component chosen by `use:` together with its structured config."""

    kind: Kind
    component: Component
    config: object
    """An instance of `component.config`."""
    distribution: str = ""
    """The distribution or file that offers it."""

    @property
    def name(self) -> str:
        """The word after `use:`."""
        return self.component.name


@frozen
class Spec:
    """A component as it travels to a worker: import paths and builtins, no code and no pickle."""

    target: str
    config_type: str = ""
    """`package.module:Class` of the config; empty when `config` is passed on as it is."""
    config: dict[str, object] = field(factory=dict)


def resolve(target: str) -> Any:
    """Import what `package.module:Name` or `file:/path/to/file.py:Name` names. Raises `PluginError` saying why not."""
    module, _, name = target.rpartition(":")
    try:
        found = import_file(module[len(_FILE) :]) if module.startswith(_FILE) else importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except Exception as error:  # a plugin's module may raise anything while it is imported
        raise PluginError(f"{target!r} cannot be imported: {type(error).__name__}: {error}") from error
    return found


def loaded(target: str) -> Any:
    """Give what `resolve` would, where its module has been imported already; None elsewhere. Nothing is imported."""
    module, _, name = target.rpartition(":")
    found = sys.modules.get(file_module(module[len(_FILE) :]) if module.startswith(_FILE) else module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def import_path(named: Any) -> str:
    """Give the target that `resolve` turns into this class or function again, in this or another process."""
    module, name = named.__module__, named.__qualname__
    if "<locals>" in name:
        raise PluginError(f"{module}.{name} is made inside a function, so no worker can import it; move it out")
    file = getattr(sys.modules.get(module), "__file__", None)
    return f"{_FILE}{file}:{name}" if file and module == file_module(file) else f"{module}:{name}"


def file_module(path: str | Path) -> str:
    """Name the module that a single-file plugin is loaded as: the same in every process."""
    file = Path(path).resolve()
    stem = "".join(letter if letter.isalnum() else "_" for letter in file.stem)
    return f"whet_file_{stem}_{hashlib.blake2b(str(file).encode(), digest_size=4).hexdigest()}"


def import_file(path: str | Path) -> ModuleType:
    """Import a single file under its `file_module` name; once for each process. Raises what the file raises."""
    file, name = Path(path).resolve(), file_module(path)
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
