"""The declarations of a plugin about its components: `Component`, and the `Facts` that planning reads."""

import hashlib
import importlib.util
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, get_args

from attrs import Factory, field, frozen

from whet.errors import PluginError

CORE_VERSION = "0.1.0"
"""Version of the distribution `whet`, and value of `whet.__version__`."""

Kind = Literal[
    "backends", "generators", "losses", "environments", "loggers", "algorithms", "advantages", "filters", "hooks",
    "sandboxes", "rewards",
]  # fmt: skip
KINDS: tuple[Kind, ...] = get_args(Kind)

_FILE = "file:"
FILE_MODULE = "whet_file_"
"""The beginning of the module names of single-file plugins."""
_importing = threading.RLock()  # no other thread may get a module that is not complete
_sources: dict[str, bytes] = {}  # the text of each single file as it was imported, by the name of its module


@frozen
class Component:
    """A component that a plugin offers. Creating a `Component` imports no heavy package."""

    name: str
    """The name after `use:`, in lower case with dashes."""
    config: type
    """The attrs class of the component's section in the config. The string below a field documents the field."""
    target: str
    """`package.module:Class`. The class is imported only in the process that runs it. Its first argument is the config.
    A single-file plugin writes `f"{__name__}:Class"`, which becomes `file:/path/to/file.py:Class`."""
    facts: str = ""
    """`package.module:function`, called as `function(config, model)`, without torch. It returns an instance of the
    class that `FACTS` lists for the component's kind. Empty: the component declares no facts."""


@frozen
class RoleNeed:
    """The requirements of an algorithm or environment on a further model."""

    outputs: frozenset[str] = frozenset()
    """Model outputs that the model must compute, e.g. `values`."""
    trained: bool = False
    """Whether the model is trained, and thus saved with the run. If not, its weights do not change."""
    conversations: bool = False
    """Whether the model reads whole conversations of episodes. None may have more tokens than it has positions."""
    generates: bool = False
    """Whether the model writes responses: its section chooses a generator. Only an environment can ask for this."""


@frozen
class Package:
    """A package that workers need and that no plugin installs, e.g. an engine. The workers' Python must have it."""

    name: str
    """The package's name, for a human reader."""
    module: str
    """The package's top-level module."""
    distributions: tuple[str, ...]
    """The distributions that contain the package."""
    install: str
    """The command or the change that installs the package."""

    @property
    def is_here(self) -> bool:
        """Return whether this interpreter can import the package. Nothing is imported."""
        return importlib.util.find_spec(self.module) is not None

    def version(self, versions: Mapping[str, str]) -> str:
        """Return the package's version, or "" if `versions`, by distribution, has none of the package's."""
        return next((versions[name] for name in self.distributions if name in versions), "")


@frozen
class MemoryTerm:
    """One part of a rank's memory, as far as it is known before the run."""

    what: str
    """The name of this part, e.g. `gradients`, and the number of ranks that share it."""
    bytes: int
    """Number of bytes on this rank. If the rank has several GPUs: the sum over its GPUs."""
    when: Literal["working", "loading"] = "working"
    """`loading`: the memory is used only while the rank starts, never together with the `working` terms."""
    place: Literal["", "host", "gpu"] = ""
    """Empty: on the device where the rank computes. `host`: in the host's memory, even if the rank has a GPU. `gpu`: on
    the GPU; if the rank has no GPU, this term does not count."""
    kept_asleep: bool = True
    """Whether the memory moves to the host's memory while a role with GPUs sleeps. If not, it is freed."""
    gpu_share: float = 0.0
    """On a GPU: the share of the GPU's memory that the whole role takes, by its key `memory_fraction`. Then the size of
    this term is the rest of the share, after all other terms."""
    lent: bool = False
    """Whether a generator computes with this memory if weights travel `in-place`. It then stays where it is while the
    role sleeps. A plan with another transport takes it as false."""
    woken: Literal["", "weights", "adapter"] = ""
    """Whether roles that take turns hold this memory during a weight sync: one of all `weights`, or also one of an
    `adapter`. A generator wakes for it, and a backend sends from it. A backend without such a term then holds all that
    it keeps. A plan whose weights travel otherwise takes it as empty."""
    change: str = ""
    """The change that reduces this memory, e.g. `lower generator.cache_gib`."""


@frozen
class AdapterInfo:
    """A LoRA adapter (Hu et al. 2021, arXiv:2106.09685): W + scaling B A, with B [out, rank] and A [rank, in]."""

    rank: int
    alpha: float
    rslora: bool = False
    """Whether scaling is alpha / sqrt(rank) (Kalajdzievski 2023, arXiv:2312.03732), not alpha / rank."""
    kinds: tuple[str, ...] = ("linear",)
    """Kinds of weights that the adapter changes: `linear` layers, and stacked parameters of `experts`."""

    @property
    def scaling(self) -> float:
        """Return the factor of the product B A."""
        return float(self.alpha / (self.rank**0.5 if self.rslora else self.rank))


@frozen(kw_only=True)
class Facts:
    """Facts about a component of any kind. Planning derives compatibility from facts, never from a list of names.

    Each kind except loggers and hooks has its own class below.
    """

    notes: tuple[str, ...] = ()
    """Sentences that `whet check` prints, one sentence in each string."""


@frozen(kw_only=True)
class AlgorithmFacts(Facts):
    """Facts about an algorithm."""

    inputs: frozenset[str] = frozenset()
    """The algorithm's inputs: a subset of `rollouts` and `data`."""
    roles: Mapping[str, RoleNeed] = field(factory=dict)
    """Further models that it uses, by their names under `roles`."""
    outputs_needed: frozenset[str] = frozenset()
    """Model outputs that the algorithm itself scores, except `logprobs`; see `whet.interfaces.backend`."""
    weights_needed: frozenset[str] = frozenset()
    """Sets of weights with which the algorithm scores, except `policy`, e.g. `reference`."""
    columns_written: frozenset[str] = frozenset()
    """Batch columns that the algorithm adds."""
    columns_essential: frozenset[str] = frozenset()
    """Batch columns with the results that the algorithm computes from its data. A loss that reads none of
    these columns would ignore the results."""
    token_advantages: bool = False
    """Whether each token gets an advantage of its own [N], rather than each sequence [B]."""
    group_size: int | None = None
    """If it trains on rollouts: the number of samples of one task that the algorithm compares with each other."""
    groups_per_step: int | None = None
    """If it trains on rollouts: the number of groups in one step."""
    data_format: str = ""
    """If it trains on `data`: the kind of records that it reads, e.g. `conversations` or `pairs`."""
    record_fields: tuple[tuple[str, ...], ...] = ()
    """If it trains on `data`: tuples of field names, as in the data files. A record must have all fields of one tuple.
    `whet check` checks this. Empty: it checks no fields."""
    encode: str = ""
    """If it trains on `data`: `package.module:function`, called as `function(config, model)`. It returns the `Encode`
    (see `whet.interfaces.data`) that turns a record into sequences. `run.epochs` and commands that show data need the
    function."""
    records_per_step: int | None = None
    """If it trains on `data`: the number of records in one step. `run.epochs` needs this number."""
    optimizer_steps: Callable[[int], Mapping[str, int]] | None = None
    """(steps of the run) -> optimizer steps of the whole run, by role: `backend`, or a name of `roles`. Learning rates
    fall over them. None, and for a role that is missing: one in each step."""


@frozen(kw_only=True)
class LossFacts(Facts):
    """Facts about a loss."""

    outputs_needed: frozenset[str] = frozenset()
    """Model outputs that the loss reads, e.g. `logprobs`, `entropy`; see `whet.interfaces.backend`."""
    role: str = "backend"
    """The role whose outputs the loss reads."""
    columns_read: frozenset[str] = frozenset()
    """Batch columns that the loss reads, except the columns that every batch has."""
    token_advantages: bool = False
    """Whether the loss accepts an advantage for each token [N], rather than for each sequence [B]."""


@frozen(kw_only=True)
class WorkerFacts(Facts):
    """Facts about a backend or a generator: a component with worker processes."""

    ranks: int = 1
    """Number of worker processes that the component needs."""
    problems: "Callable[[int], Iterable[Problem]] | None" = None
    """(ranks of the role) -> what that number or the model does not allow. Paths are within the component's section."""
    processes: int = 1
    """Number of processes over which each rank splits its model, e.g. by tensor parallelism. Each process receives
    weights. If there are GPUs, each process has one."""
    transports: tuple[str, ...] = ()
    """Supported transports of a weight sync, the best first. Possible are `in-place`, `shared`, `cuda-ipc`,
    `broadcast`, `shared-memory` and `disk`."""
    in_place: str = ""
    """For the transport `in-place`: the form in which weights lie in memory, e.g. `transformers`: whole tensors by the
    names of a class of `transformers`. Both ends must have the same form."""
    memory: Callable[[int, bool], Iterable[MemoryTerm]] | None = None
    """(ranks of the role, whether the role is trained) -> the parts of one rank's memory. None: it is unknown."""
    forecast: object = None
    """How the peak of each phase is predicted, for the feature `memory-forecast`. None: from `memory` alone."""
    sleeps: tuple[str, ...] = ()
    """Devices on which `sleep` releases memory: a choice of `cpu` and `cuda`."""
    imports: tuple[str, ...] = ()
    """Modules that the workers will need. They are imported early, at the same time as other preparations."""
    forkable: bool = False
    """Whether a worker may be forked from a process that has imported `imports`, of its role and of other forkable
    roles. True promises that these modules start no thread, open no device, and change nothing for other roles."""
    packages: tuple[Package, ...] = ()
    """Packages that the workers need and that the plugin does not install."""


@frozen(kw_only=True)
class BackendFacts(WorkerFacts):
    """Facts about a backend."""

    outputs_given: frozenset[str] = frozenset()
    """Model outputs that the backend can compute."""
    weights_given: frozenset[str] = frozenset({"policy"})
    """Sets of weights that the backend holds. Its setting `reference` decides whether it holds `reference`."""
    columns_wanted: frozenset[str] = frozenset()
    """Columns that the generator must record while it samples; see `whet.interfaces.generator`."""
    adapter: AdapterInfo | None = None
    """The adapter that the backend trains, and can send alone. None: it trains all weights."""
    begins_with: str = ""
    """The setting that changes the weights of `model.path` before the first step, e.g. `lora.adapter`. Empty: none."""
    senders: int = 1
    """Number of ranks that send weights, each its part of them. An adapter is sent by one."""


@frozen(kw_only=True)
class GeneratorFacts(WorkerFacts):
    """Facts about a generator."""

    on_weight_update: tuple[str, ...] = ("drain",)
    """Supported values of `rollout.on_weight_update`, which decides what happens to running requests when new weights
    arrive: a choice of `drain`, `continue` and `abort`."""
    dtype: str = ""
    """The dtype in which the generator computes, e.g. `bfloat16`. For a coarser number format, the generator chooses a
    name. Empty: the dtype of the model."""
    columns_given: frozenset[str] = frozenset()
    """Columns that the generator can record while it samples; see `whet.interfaces.generator`."""
    adapters: frozenset[str] = frozenset()
    """The kinds of weights whose adapters the generator applies by itself; see `AdapterInfo.kinds`."""
    extras: frozenset[str] = frozenset()
    """Optional parts of a request that it supports, of `progress` (reports tokens while it samples), `likeliest`
    (reports the likeliest tokens at each position, too) and `schema` (holds a text to a JSON schema)."""


@frozen(kw_only=True)
class EnvironmentFacts(Facts):
    """Facts about an environment."""

    roles: Mapping[str, RoleNeed] = field(factory=dict)
    """Further models that it uses, by their names under `roles`."""
    states_answers: bool | None = None
    """Whether the environment has a `final_answer`, which majority votes need. None: not known before it is built."""
    splits: tuple[str, ...] | None = None
    """The names of all splits; `whet check` refuses every other. None: known once the environment is built."""


@frozen(kw_only=True)
class FilterFacts(Facts):
    """Facts about a filter."""

    least_group_size: int = 1
    """The smallest number of samples of one task that can be compared."""


@frozen(kw_only=True)
class AdvantagesFacts(FilterFacts):
    """Facts about an advantage estimator."""

    token_advantages: bool = False
    """Whether each token gets an advantage of its own [N], rather than each sequence [B]."""
    greedy_sample: bool = False
    """Whether each group needs one more response, at temperature 0. The reward of this response is the column
    `greedy_reward` [B]. The response is not trained on and not counted in anything else."""


FACTS: Mapping[Kind, type[Facts]] = {
    "backends": BackendFacts,
    "generators": GeneratorFacts,
    "losses": LossFacts,
    "environments": EnvironmentFacts,
    "loggers": Facts,
    "algorithms": AlgorithmFacts,
    "advantages": AdvantagesFacts,
    "filters": FilterFacts,
    "hooks": Facts,
    "sandboxes": Facts,
    "rewards": Facts,
}
"""The class of facts of each kind."""


@frozen
class Problem:
    """A mistake in a config: its place, and the change that corrects it."""

    path: str
    """Dotted path of a key in the config, e.g. `rollout.max_tokens`. Empty: the whole config."""
    message: str

    def __str__(self) -> str:
        return f"{self.path}: {self.message}" if self.path else self.message


@frozen
class Selection:
    """A component that `use:` chose, together with its structured config."""

    kind: Kind
    component: Component
    config: object
    """An instance of `component.config`."""
    distribution: str = ""
    """The distribution or file that offers the component."""
    use: str = field(default=Factory(lambda self: self.component.name, takes_self=True))
    """The text after `use:`, with which a config chooses the component: its name, or DISTRIBUTION/NAME."""

    @property
    def name(self) -> str:
        """Return the component's name."""
        return self.component.name


@frozen
class Spec:
    """A component in a form that can be sent to a worker: import paths and builtins, no code and no pickle."""

    target: str
    config_type: str = ""
    """`package.module:Class` of the config. Empty: `config` is passed on unchanged."""
    config: dict[str, object] = field(factory=dict)


def resolve(target: str) -> Any:
    """Return the object `package.module:Name` or `file:/path/to/file.py:Name`. Raises `PluginError` with the reason."""
    module, _, name = target.rpartition(":")
    try:
        file = module.removeprefix(_FILE)
        found = importlib.import_module(module) if file == module else import_file(file, renew=False)
        for part in name.split("."):
            found = getattr(found, part)
    except Exception as error:  # a plugin's module may raise anything while it is imported
        raise PluginError(f"{target!r} cannot be imported: {type(error).__name__}: {error}") from error
    return found


def loaded(target: str) -> Any:
    """Return the object that `resolve` returns, if its module is already imported, else None. Nothing is imported."""
    module, _, name = target.rpartition(":")
    found = sys.modules.get(file_module(module[len(_FILE) :]) if module.startswith(_FILE) else module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def import_path(named: Any) -> str:
    """Return the target of a class or function. In any process, `resolve` returns the class or function from it."""
    module, name = named.__module__, named.__qualname__
    if "<locals>" in name:
        raise PluginError(f"{module}.{name} is made inside a function, so no worker can import it; move it out")
    file = getattr(sys.modules.get(module), "__file__", None)
    return f"{_FILE}{file}:{name}" if file and module == file_module(file) else f"{module}:{name}"


def file_module(path: str | Path) -> str:
    """Return the module name under which a single-file plugin is loaded. The name is the same in every process."""
    file = Path(path).resolve()
    stem = "".join(letter if letter.isalnum() else "_" for letter in file.stem)
    return f"{FILE_MODULE}{stem}_{hashlib.blake2b(str(file).encode(), digest_size=4).hexdigest()}"


def import_file(path: str | Path, renew: bool = True) -> ModuleType:
    """Import a single file under its `file_module` name, once per process, and return the module.

    `renew`: import it anew if its text has changed since. An exception that the file raises is not caught.
    """
    file, name = Path(path).resolve(), file_module(path)
    with _importing:
        if name in sys.modules and not (renew and file.read_bytes() != _sources.get(name)):
            return sys.modules[name]
        spec = importlib.util.spec_from_file_location(name, file)
        if spec is None:
            raise ImportError(f"{file} is no Python file")
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        try:  # not by the loader, whose bytecode cache misses a change of equal length within the same second
            _sources[name] = file.read_bytes()
            exec(compile(_sources[name], file, "exec", dont_inherit=True), module.__dict__)
        except BaseException:
            del sys.modules[name]
            raise
    return module
