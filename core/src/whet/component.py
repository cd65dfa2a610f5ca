"""What a plugin declares about its components: `Component`, and the `Facts` that planning reads."""

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
"""Version of the distribution `whet`; `whet.__version__` is the same."""

Kind = Literal["backends", "generators", "losses", "environments", "loggers", "algorithms", "advantages", "filters"]
KINDS: tuple[Kind, ...] = (
    "backends", "generators", "losses", "environments", "loggers", "algorithms", "advantages", "filters",
)  # fmt: skip

_FILE = "file:"


@frozen
class Component:
    """A component that a plugin offers. Making one imports nothing heavy."""

    name: str
    """The word after `use:`; lower-case with dashes."""
    config: type
    """The attrs class of its section of the config. A string beneath each field documents it."""
    target: str
    """`package.module:Class`, imported only in the process that runs it, and called with the config first. Single-file
    plugins write `f"{__name__}:Class"`, which becomes `file:/path/to/file.py:Class`."""
    facts: str = ""
    """`package.module:function`, called with (config, model) without torch. It returns the record of its kind in
    `FACTS`. Empty: no facts."""


@frozen
class RoleNeed:
    """What an algorithm or environment needs of a further model."""

    outputs: frozenset[str] = frozenset()
    """Model outputs that the model must compute, e.g. `values`."""
    trained: bool = False
    """Whether the model is trained, and so saved with the run. If not, it stays as it was loaded."""
    conversations: bool = False
    """Whether the model reads whole conversations of episodes. None of them may be longer than its positions."""


@frozen
class Package:
    """A package that workers need and no plugin installs, e.g. an engine. It is looked for in the workers' Python."""

    name: str
    """Its name for people."""
    module: str
    """Its top-level module."""
    distributions: tuple[str, ...]
    """Distributions that offer it."""
    install: str
    """The command or the change that makes it available."""

    @property
    def is_here(self) -> bool:
        """Return whether this interpreter can import it. Nothing is imported."""
        return importlib.util.find_spec(self.module) is not None

    def version(self, versions: Mapping[str, str]) -> str:
        """Return its version from a mapping of distributions to versions. Empty: none of its distributions is in it."""
        return next((versions[name] for name in self.distributions if name in versions), "")


@frozen
class MemoryTerm:
    """A part of the memory of one rank, as far as it is known before the run."""

    what: str
    """Its name, e.g. `gradients`, and how many ranks share it."""
    bytes: int
    """Bytes on this rank; over all its GPUs, if it has several."""
    when: Literal["working", "loading"] = "working"
    """`loading`: held for a while as the rank starts, and never together with the terms of `working`."""
    place: Literal["", "host", "gpu"] = ""
    """Empty: where the rank computes. `host`: in the host's memory, even if the rank has a GPU. `gpu`: only if it has a
    GPU."""
    kept_asleep: bool = True
    """Whether it moves to the host's memory while a role with GPUs sleeps. If not, it is freed."""
    gpu_share: float = 0.0
    """On a GPU: the share of its memory that the whole role takes. This term is what the other terms leave of that
    share."""
    change: str = ""
    """The change that reduces it, e.g. `lower generator.cache_gib`."""


@frozen(kw_only=True)
class Facts:
    """What planning knows about a component of any kind. Compatibility is derived from facts, never listed by name.

    Each kind has a record of its own below, except loggers.
    """

    notes: tuple[str, ...] = ()
    """Anything that `whet check` should print, one sentence each."""


@frozen(kw_only=True)
class AlgorithmFacts(Facts):
    """What planning knows about an algorithm."""

    inputs: frozenset[str] = frozenset()
    """Its inputs, of `rollouts` and `data`."""
    roles: Mapping[str, RoleNeed] = field(factory=dict)
    """Further models that it uses, by their names under `roles`."""
    outputs_needed: frozenset[str] = frozenset()
    """Model outputs that it scores by itself, beyond `logprobs`; see `whet.interfaces.backend`."""
    weights_needed: frozenset[str] = frozenset()
    """Sets of weights that it scores with beside the policy's, e.g. `reference`."""
    columns_written: frozenset[str] = frozenset()
    """Batch columns that it adds."""
    columns_essential: frozenset[str] = frozenset()
    """Columns that carry what it computes from its data. A loss that reads none of them would ignore it."""
    token_advantages: bool = False
    """Whether each token gets an advantage of its own [N], rather than each sequence [B]."""
    group_size: int | None = None
    """Trains on rollouts: number of samples of one task that it compares with each other."""
    groups_per_step: int | None = None
    """Trains on rollouts: number of groups of one step."""
    data_format: str = ""
    """Trains on `data`: the kind of records that it reads, e.g. `conversations` or `pairs`."""
    record_fields: tuple[tuple[str, ...], ...] = ()
    """Trains on `data`: a record must have all fields of one tuple, by their names in the data; `whet check` looks for
    them. Empty: it does not look."""
    encode: str = ""
    """Trains on `data`: `package.module:function`, called as `function(config, model)`, which returns the `Encode` (see
    `whet.interfaces.data`) that turns a record into sequences. `run.epochs` and commands that show data need it."""
    records_per_step: int | None = None
    """Trains on `data`: number of records of one step. `run.epochs` needs it."""


@frozen(kw_only=True)
class LossFacts(Facts):
    """What planning knows about a loss."""

    outputs_needed: frozenset[str] = frozenset()
    """Model outputs that it reads, e.g. `logprobs`, `entropy`; see `whet.interfaces.backend`."""
    role: str = "backend"
    """The role whose outputs it reads."""
    columns_read: frozenset[str] = frozenset()
    """Batch columns that it reads beyond the columns that are always there."""
    token_advantages: bool = False
    """Whether it accepts an advantage for each token [N], rather than for each sequence [B]."""


@frozen(kw_only=True)
class WorkerFacts(Facts):
    """What planning knows about a backend or a generator: a component with worker processes."""

    ranks: int = 1
    """Number of worker processes wanted."""
    processes: int = 1
    """Number of processes over which each rank spreads its model, e.g. by tensor parallelism. Each receives weights,
    and has a GPU if there are any."""
    transports: tuple[str, ...] = ()
    """Supported transports of a weight sync, best first, of `shared`, `cuda-ipc`, `broadcast`, `shared-memory`,
    `disk`."""
    memory: Callable[[int, bool], Iterable[MemoryTerm]] | None = None
    """Called with the role's number of ranks and whether it is trained, it returns what one rank holds in memory. None:
    unknown."""
    sleeps: tuple[str, ...] = ()
    """Devices on which `sleep` releases memory, of `cpu` and `cuda`."""
    imports: tuple[str, ...] = ()
    """Modules that its workers will need. They are imported early, during other preparations."""
    forkable: bool = False
    """Whether a worker's process may be forked from one that has imported `imports`, its own and those of other such
    roles. These modules start no thread, open no device, and change nothing for others."""
    packages: tuple[Package, ...] = ()
    """Packages that its workers need beside those that its plugin installs."""


@frozen(kw_only=True)
class BackendFacts(WorkerFacts):
    """What planning knows about a backend."""

    outputs_given: frozenset[str] = frozenset()
    """Model outputs that it can compute."""
    weights_given: frozenset[str] = frozenset({"policy"})
    """Sets of weights that it holds. Its setting `reference` decides whether `reference` is one."""


@frozen(kw_only=True)
class GeneratorFacts(WorkerFacts):
    """What planning knows about a generator."""

    on_weight_update: tuple[str, ...] = ("drain",)
    """What can happen to running requests when new weights arrive, of `drain`, `continue`, `abort`."""
    dtype: str = ""
    """The dtype of its computation, e.g. `bfloat16`, or a name of its own for anything coarser. Empty: the dtype of the
    model."""


@frozen(kw_only=True)
class EnvironmentFacts(Facts):
    """What planning knows about an environment."""

    roles: Mapping[str, RoleNeed] = field(factory=dict)
    """Further models that it uses, by their names under `roles`."""
    states_answers: bool | None = None
    """Whether it has a `final_answer`, which majority votes need. None: known only after it is built."""


@frozen(kw_only=True)
class FilterFacts(Facts):
    """What planning knows about a filter."""

    least_group_size: int = 1
    """The smallest number of samples of one task that can be compared."""


@frozen(kw_only=True)
class AdvantagesFacts(FilterFacts):
    """What planning knows about an advantage estimator."""

    token_advantages: bool = False
    """Whether each token gets an advantage of its own [N], rather than each sequence [B]."""
    greedy_sample: bool = False
    """Whether each group needs one more response, at temperature 0, whose reward is the column `greedy_reward` [B]. It
    is not trained on and counts nowhere else."""


FACTS: Mapping[Kind, type[Facts]] = {
    "backends": BackendFacts,
    "generators": GeneratorFacts,
    "losses": LossFacts,
    "environments": EnvironmentFacts,
    "loggers": Facts,
    "algorithms": AlgorithmFacts,
    "advantages": AdvantagesFacts,
    "filters": FilterFacts,
}
"""The record of each kind."""


@frozen
class Problem:
    """A mistake in a config: where it is, and what to change."""

    path: str
    """Dotted path into the config, e.g. `rollout.max_tokens`. Empty: the whole config."""
    message: str

    def __str__(self) -> str:
        return f"{self.path}: {self.message}" if self.path else self.message


@frozen
class Selection:
    """A component chosen by `use:`, together with its structured config."""

    kind: Kind
    component: Component
    config: object
    """An instance of `component.config`."""
    distribution: str = ""
    """The distribution or file that offers it."""

    @property
    def name(self) -> str:
        """Return the word after `use:`."""
        return self.component.name


@frozen
class Spec:
    """A component in the form in which it is sent to a worker: import paths and builtins, no code and no pickle."""

    target: str
    config_type: str = ""
    """`package.module:Class` of the config. Empty: `config` is passed on unchanged."""
    config: dict[str, object] = field(factory=dict)


def resolve(target: str) -> Any:
    """Import `package.module:Name` or `file:/path/to/file.py:Name` and return it. Raises `PluginError` with the
    reason.
    """
    module, _, name = target.rpartition(":")
    try:
        found = import_file(module[len(_FILE) :]) if module.startswith(_FILE) else importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except Exception as error:  # a plugin's module may raise anything while it is imported
        raise PluginError(f"{target!r} cannot be imported: {type(error).__name__}: {error}") from error
    return found


def loaded(target: str) -> Any:
    """Return what `resolve` would, if its module is imported already, else None. Nothing is imported."""
    module, _, name = target.rpartition(":")
    found = sys.modules.get(file_module(module[len(_FILE) :]) if module.startswith(_FILE) else module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def import_path(named: Any) -> str:
    """Return the target with which `resolve` finds this class or function, in this or another process."""
    module, name = named.__module__, named.__qualname__
    if "<locals>" in name:
        raise PluginError(f"{module}.{name} is made inside a function, so no worker can import it; move it out")
    file = getattr(sys.modules.get(module), "__file__", None)
    return f"{_FILE}{file}:{name}" if file and module == file_module(file) else f"{module}:{name}"


def file_module(path: str | Path) -> str:
    """Return the name of the module that a single-file plugin is loaded as. It is the same in every process."""
    file = Path(path).resolve()
    stem = "".join(letter if letter.isalnum() else "_" for letter in file.stem)
    return f"whet_file_{stem}_{hashlib.blake2b(str(file).encode(), digest_size=4).hexdigest()}"


def import_file(path: str | Path) -> ModuleType:
    """Import a single file under its `file_module` name, once per process. Raises what the file raises."""
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
