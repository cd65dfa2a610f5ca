"""The sections of a config file. A default stands here and nowhere else; its documentation beneath it.

Fields typed `Selection` hold a component chosen by `use:`; `selection(kind)` says of which kind. Of a field's metadata,
`off` is the value that switches its section off, `path: True` says that it may name a file or folder, `policy: True`
that it is of the model that is trained alone: roles that are `like: backend` do not take it over, `infinite: True` that
it takes infinity, `names_path: True` that it holds names or paths, `writes: True` that a component writes to this path,
which is relative to the run folder. `renamed_key` and `renamed_values` are its names before (`whet.config.renamed`).
"""

from typing import Any, Literal

import attrs
from attrs import field, frozen
from attrs.validators import deep_iterable, deep_mapping, ge, gt, le, min_len, optional

from whet.component import Kind, Selection
from whet.config.bounds import (
    BYTES,
    FACTOR,
    GROUP,
    PROCESSES,
    RECORDS,
    RETRIES,
    SECONDS,
    SEED,
    STEPS,
    TOKENS,
    above,
    between,
)
from whet.config.paths import absolute_paths
from whet.config.renamed import renamed

_SHARE: Any = optional(above(0, FACTOR))
_EPOCHS: Any = optional(above(0, 1_000_000))
_COUNTS: Any = deep_iterable(between(1, GROUP))
_RANKS: Any = deep_mapping(value_validator=between(1, PROCESSES))
_GPUS: Any = deep_mapping(value_validator=between(0, PROCESSES))
_AMOUNTS: Any = deep_mapping(value_validator=deep_mapping(value_validator=above(0, FACTOR)))


def _file_name(instance: object, attribute: Any, value: str) -> None:
    """Refuse what cannot be a part of the names of files and of metrics."""
    if not value.isprintable() or "/" in value or value.startswith((".", " ")):
        raise ValueError(f"is {value!r:.60}, wanted a word: it becomes part of the names of files and metrics")


def _folder(instance: object, attribute: Any, value: str) -> None:
    """Refuse what cannot be shown on one line, as the run folder is in messages, logs and commands."""
    if not value.isprintable():
        raise ValueError(f"is {value!r:.60}, wanted the path of a folder without line breaks or control characters")


_FOLDER: Any = [min_len(1), _folder]


def _heartbeat(instance: object, attribute: Any, value: float) -> None:
    """Refuse what would end healthy workers."""
    if value and not value >= 1:
        raise ValueError(f"is {value:g}, wanted 0 or at least 1: a worker that is busy may be silent for a moment")


def _length(instance: Any, attribute: Any, value: float | None) -> None:
    """Refuse a run whose length is stated twice, or not at all."""
    if instance.steps is not None and value is not None:
        raise ValueError(f"is {value:g}, and run.steps is {instance.steps}; state one of the two")
    if instance.steps is None and value is None:
        raise ValueError("states neither `steps` nor `epochs`: how long to train")


COLUMNS = (
    "messages", "prompt", "completion", "text", "chosen", "rejected", "label", "margin",
    "conversations", "instruction", "input", "output", "system", "history",
)  # fmt: skip
"""Columns that a data file may have, under these names or under its own."""


def _known_columns(instance: object, attribute: Any, value: dict[str, str]) -> None:
    unknown = [name for name in value if name not in COLUMNS]
    if unknown:
        words = f"names {', '.join(unknown)}, wanted {', '.join(COLUMNS)}"
        raise ValueError(f"{words}: what a column is, then its name in the file")


def selection(kind: Kind, default: str | None = None, *, inline: bool = False) -> Any:
    """Make a field that holds a component of a kind, chosen by `use:`.

    `default` names the component where the key is left out. `inline` components take all keys beside `use:`
    that the class around them does not know itself.
    """
    metadata = {"kind": kind, "default": default, "inline": inline}
    if default is None:
        return attrs.field(metadata=metadata, kw_only=True)
    return attrs.field(metadata=metadata, default=None, kw_only=True)


def optional_selection(kind: Kind) -> Any:
    """Make a field that holds a component of a kind, or None where the key is left out."""
    return attrs.field(metadata={"kind": kind, "default": None, "inline": False}, default=None, kw_only=True)


@frozen
class RunSection:
    """The run itself."""

    folder: str = field(validator=_FOLDER, metadata={"path": True})
    """Where everything the run writes goes."""
    steps: int | None = field(default=None, validator=optional(between(1, STEPS)))
    """Steps to take in all, counted over resumes. State this or `epochs`."""
    epochs: float | None = field(default=None, validator=[_EPOCHS, _length])
    """Of algorithms that train on data files, instead of `steps`: how often to train on every record, e.g. 3 or 0.5.
    The last step takes the records that are left, which may be fewer than `batch_size`."""
    seed: int = field(default=0, validator=between(0, SEED))
    """Every random draw of the run is derived from this."""
    save_every: int = field(default=0, validator=between(0, STEPS))
    """Steps between checkpoints; 0: only at the end."""
    keep: int = field(default=2, validator=between(0, GROUP))
    """Checkpoints kept, the newest; 0 keeps all."""
    resume: Literal["auto", "never", "must"] = "auto"
    """`auto` continues the folder's run if there is one; `never` refuses a folder that holds a run; `must` refuses
    one that does not."""
    allow_changed: list[str] = attrs.Factory(list)
    """Config paths that may differ from the run that is resumed, e.g. `backend.optimizer.lr`."""
    export: bool = True
    """Write the final model as a folder that `transformers` loads, in `FOLDER/model`."""
    private_records: bool = True
    """Only this user may read what the model was asked and said: the rows of rollouts, evaluations and the endpoint;
    `false`: whoever the umask lets, as with all other files of the run folder."""


@frozen
class ModelSection:
    """The model that is trained."""

    path: str = field(validator=min_len(1), metadata={"path": True})
    """A model folder or a name on the Hugging Face hub."""
    revision: str | None = None
    """Of a hub model: branch, tag or commit."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the forward and backward pass; the optimizer's weights are always float32."""
    trust_remote_code: bool = False
    """Run Python code that the model folder brings. Only for folders you trust as you trust your own code."""
    chat_template: str | None = field(default=None, metadata={"path": True})
    """A file with a Jinja chat template to use instead of the model's own."""


@frozen
class RoleSection:
    """A further model of a run, e.g. a critic or a teacher; keys that are not named here are its backend's own."""

    component: Selection = selection("backends", inline=True)
    """What holds the model."""
    like: Literal["", "backend"] = ""
    """`backend`: every key that is not given here is as in the section `backend`, but for those that are of the policy
    alone, e.g. `reference` and `teacher` of `fsdp2`."""
    model: ModelSection | None = None
    """The model; by default the one that the run starts from."""


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
    """One weight sync: backend to generator."""
    save: float = field(default=1800.0, validator=above(0, SECONDS))
    """Writing or reading a checkpoint."""
    episode: float = field(default=3600.0, validator=above(0, SECONDS))
    """One episode with all its turns."""
    heartbeat: float = field(default=120.0, validator=[_heartbeat, between(0, SECONDS)])
    """Silence of a worker process after which it counts as hung, whatever it was asked; 0: it may be silent for ever.
    Code that keeps Python's interpreter lock for longer is silent too."""
    notice: float = field(default=60.0, validator=between(0, SECONDS))
    """A wait as long as this, and twice as long as the longest of its kind before, is told with who waits for whom,
    and with stacks in `logs/waits.log`; nothing is ended. 0: never."""


@frozen
class RecoverySection:
    """What happens when a worker process dies or hangs. What a worker raises ends the run at once, come what may."""

    enabled: bool = field(default=True, metadata={"off": False})
    """`false`: the first death ends the run with its error."""
    replicas: int = field(default=8, validator=between(0, RETRIES))
    """How often replicas of the generator may be restarted by themselves."""
    restarts: int = field(default=3, validator=between(0, RETRIES))
    """How often the run may begin again after its last checkpoint, where another worker is lost."""
    refill: int = field(default=100, validator=between(0, STEPS))
    """New steps after which a restart no longer counts; 0: it always does."""


@frozen
class ClusterSection:
    """Where the roles run."""

    launcher: Literal["local", "ray"] = "local"
    """`local`: on this machine. `ray`: on the nodes of a Ray cluster."""
    address: str = ""
    """Of the launcher `ray`: `host:port` of the head of a cluster to join, as `ray start --head` prints it. `auto`: the
    one that the environment variable RAY_ADDRESS names, else the one that was started on this machine. `local`: Ray is
    started on this machine for this run, and ends with it. Empty: as RAY_ADDRESS says, else `local`."""
    workers: Literal["process", "inline"] = "process"
    """`process`: every role in worker processes. `inline`: everything in this process, so that a debugger works."""
    ranks: dict[str, int] = field(factory=dict, validator=_RANKS)
    """Worker processes for each role; 1 where a role is not named."""
    gpus: dict[str, int] = field(factory=dict, validator=_GPUS)
    """GPUs for each role; none named: the CPU. One rank for each GPU unless `ranks` says otherwise."""
    threads: dict[str, int] = field(factory=dict, validator=_RANKS)
    """Compute threads for each rank of a role; by default the machine's cores are shared out among the ranks that
    work at one time."""
    colocate: list[list[str]] | None = field(default=None, metadata=renamed("share"))
    """Groups of roles that share their worker processes (and devices) and take turns. By default all of
    one Python do, but for the generator where `rollout.max_staleness` is above 0."""
    offload: Literal["auto", "always", "never"] = field(default="auto", metadata=renamed("sleep"))
    """Whether backend and generator give their memory back while the other one works: on GPUs to the host, on CPUs to
    files. `auto`: where they share GPUs, `rollout.max_staleness` is 0 and both can. `always`: wherever they are; what
    cannot is an error."""
    placement: dict[str, Literal["pack", "spread", "one-node"]] = attrs.Factory(dict)
    """Of the launcher `ray`: how the ranks of a role lie on nodes. `pack`: on as few as possible, which is the default.
    `spread`: on as many as possible. `one-node`: all on one, or not at all. Roles that share processes have one."""
    resources: dict[str, dict[str, float]] = field(factory=dict, validator=_AMOUNTS)
    """Of the launcher `ray`: what each rank of a role takes of Ray's custom resources, e.g. `{generator: {a100: 1}}`
    for nodes started with `ray start --resources='{"a100": 8}'`."""
    memory: Literal["check", "ignore"] = "check"
    """`check`: a run is refused whose weights, gradients, optimizer and caches alone need more memory than a host or a
    GPU has. `ignore`: it is tried all the same."""
    transport: Literal["", "shared", "cuda-ipc", "broadcast", "shared-memory", "tcp", "disk"] = ""
    """How weights travel from backend to generator. Empty: the best way that both know and their places allow."""
    python: dict[str, str] = field(factory=dict, converter=absolute_paths, metadata={"names_path": True})
    """The Python environment of a role's worker processes where that is not the driver's: the name of one that `whet
    env create` has made, or a path, which has a slash in it, e.g. `{generator: vllm}`."""
    deadlines: DeadlinesSection = attrs.Factory(DeadlinesSection)
    """How long waits may take."""
    recovery: RecoverySection = attrs.Factory(RecoverySection)
    """What happens when a worker process dies or hangs."""


@frozen
class PassingSection:
    """What counts as a pass in `pass_at` and `majority_at`, and in `pass_rate` of training."""

    reward: str = ""
    """Name of the reward that decides; empty: the weighted sum of all."""
    at_least: float = field(default=1.0, validator=between(-FACTOR, FACTOR))
    """The smallest value that passes."""


@frozen
class EnvironmentSection:
    """One environment of a run; keys that are not named here are the environment's own."""

    component: Selection = selection("environments", inline=True)
    """The environment."""
    name: str = field(default="", validator=_file_name)
    """Its name in metrics and records; by default the component's."""
    split: str = ""
    """The split of its tasks; by default `train` in training and `test` in evaluation."""
    weight: float = field(default=1.0, validator=between(0, FACTOR))
    """Share of the groups that come from it, relative to the others."""
    samples: int = field(default=1, validator=between(1, GROUP))
    """Episodes for each task in evaluation."""
    limit: int = field(default=0, validator=between(0, RECORDS))
    """Of evaluation: use only the first so many tasks; 0: all of them."""
    pass_at: list[int] | None = field(default=None, validator=optional(_COUNTS))
    """Of evaluation: instead of `evaluation.pass_at`."""
    majority_at: list[int] | None = field(default=None, validator=optional(_COUNTS))
    """Of evaluation: instead of `evaluation.majority_at`."""
    passing: PassingSection | None = None
    """Of evaluation: instead of `evaluation.passing`."""


@frozen
class RecordSection:
    """Which training rollouts are recorded token by token. Of all others the messages and rewards are recorded."""

    every: int = field(default=10, validator=between(0, STEPS), metadata={"off": 0})
    """Steps between steps that are recorded; the first step is, too. 0: none."""
    groups: int = field(default=2, validator=between(1, GROUP))
    """Groups recorded on such a step, the first ones. The trainer scores them beforehand, which costs a forward pass
    over them. Where the algorithm has the trainer score whole batches anyway, as many sequences are added in which
    sampler and trainer differ most."""
    max_tokens: int = field(default=65_536, validator=between(1, TOKENS))
    """Tokens recorded on one step, at most; whole sequences are left out beyond."""


@frozen
class RolloutSection:
    """How episodes are played for training."""

    max_tokens: int = field(default=256, validator=between(1, TOKENS))
    """Longest completion of one turn, in tokens."""
    max_context: int = field(default=0, validator=between(0, TOKENS))
    """Longest sequence, prompt included, in tokens; 0: the model's own limit."""
    temperature: float = field(default=1.0, validator=above(0, 100))
    """Logits are divided by this, in the generator and in the trainer alike."""
    stop: list[str] = field(factory=list, validator=deep_iterable(min_len(1)))
    """Stop strings, beside the model's own end-of-turn tokens."""
    max_staleness: int = field(default=0, validator=between(0, PROCESSES))
    """How many versions behind the trainer the weights that made a training token may be. 0 is synchronous."""
    order: Literal["fifo", "as_completed"] = field(
        default="fifo", metadata=renamed(admission="fifo", completion="as_completed")
    )
    """Which groups a step gets: the oldest, or those that are through first. From a `max_staleness` of 2 on,
    `as_completed` lets a slow group be overtaken for some steps; below, both give the same groups."""
    on_weight_update: Literal["drain", "continue", "abort"] = field(
        default="drain", metadata=renamed("running", keep="continue")
    )
    """What happens to requests under way when new weights arrive. `drain`: they end with the old weights first.
    `continue`: they go on with the new ones, at their next token. `abort`: they end at once, and their rest is asked
    for anew. At `max_staleness` 0 none is under way."""
    retries: int = field(default=2, validator=between(0, RETRIES))
    """How often an episode that failed is played again before its group is dropped."""
    infrastructure_retries: int = field(default=3, validator=between(0, RETRIES))
    """The same where what it stands on failed, not the episode: a grader's process, a sandbox, a connection."""
    max_failed_groups: int = field(default=16, validator=between(1, RETRIES))
    """Dropped groups in a row after which the run ends with the last error."""
    max_infrastructure_groups: int = field(default=16, validator=between(1, RETRIES))
    """The same for groups that were dropped because of what episodes stand on."""
    max_filtered_groups: int = field(default=0, validator=between(0, RETRIES))
    """Groups that filters may drop in a row before the run ends with an error; 0: 20 times what a step needs."""
    record: RecordSection = attrs.Factory(RecordSection)
    """What is written down token by token, for `whet report`."""


@frozen
class ProbeSection:
    """After a weight sync each replica of the generator samples a few tokens, and its logprobs of them are compared
    with the trainer's. Where they differ by more than the bound, the run ends.
    """

    every: int = field(default=10, validator=between(0, STEPS), metadata={"off": 0})
    """Versions of the weights between those that are probed. The first two weight syncs of each attempt of the run are
    probed too, and one after which a replica was restarted. 0: none."""
    prompts: int = field(default=4, validator=between(1, GROUP))
    """Prompts of random tokens that each replica continues."""
    tokens: int = field(default=8, validator=between(1, GROUP))
    """Tokens sampled for each prompt."""
    bound: float | None = field(default=None, validator=optional(above(0, FACTOR)))
    """Largest mean of the absolute difference, in nats, at temperature 1. Null: that of the coarser dtype of generator
    and trainer, 0.001 for float32, 0.02 for float16, 0.1 for bfloat16, 0.3 for anything else."""


@frozen
class WeightSyncSection:
    """Weight sync: how the generator gets the trainer's weights."""

    probe: ProbeSection = attrs.Factory(ProbeSection)
    """Whether the generator computes with them."""


@frozen
class EvaluationSection:
    """Evaluation within a run, and of `whet eval`."""

    environments: list[EnvironmentSection] = field(factory=list, metadata={"off": []})
    """What to evaluate on."""
    every: int = field(default=0, validator=between(0, STEPS))
    """Steps between evaluations; 0: only at the end."""
    at_start: bool = True
    """Also evaluate before the first step."""
    temperature: float = field(default=1.0, validator=between(0, 100))
    """0 picks the likeliest token."""
    top_p: float = field(default=1.0, validator=[gt(0), le(1)])
    """Sample from the smallest set of tokens with this much probability."""
    top_k: int = field(default=0, validator=between(0, TOKENS))
    """Sample from this many likeliest tokens; 0: all."""
    max_tokens: int = field(default=0, validator=between(0, TOKENS))
    """Longest completion of one turn; 0: as in `rollout`."""
    pass_at: list[int] = field(factory=list, validator=_COUNTS)
    """Estimate pass@k for each of these k: how likely it is that one of k answers passes. None above `samples`."""
    majority_at: list[int] = field(factory=list, validator=_COUNTS)
    """Estimate maj@k for each of these k: how likely it is that the answer which most of k samples give passes. None
    above `samples`; needs environments that say what an answer is."""
    unanswered: Literal["silent", "vote"] = "silent"
    """What samples without an answer do in maj@k: `silent`: they have no vote. `vote`: they vote together for an answer
    that never passes, as in NeMo RL."""
    passing: PassingSection = attrs.Factory(PassingSection)
    """What counts as a pass."""


@frozen
class EndpointSection:
    """An OpenAI-compatible address on this machine. Environments open one for an episode by `model.endpoint()`,
    whatever `serve` says. Both listen at the same host and port; each has a key of its own.
    """

    serve: bool = field(default=False, metadata={"off": False})
    """Also answer whoever has the key that stands in `endpoint.json` of the run folder, while the run lasts. What is
    asked there is not trained on."""
    host: str = field(default="127.0.0.1", validator=min_len(1))
    """Where to listen. What goes beyond this machine is not encrypted."""
    port: int = field(default=0, validator=[ge(0), le(65535)])
    """0: one that is free."""
    max_tokens: int = field(default=0, validator=between(0, TOKENS))
    """Of `serve`: the longest answer; 0: as in `rollout`. With `rollout.on_weight_update: drain` new weights
    wait for it."""
    max_body: int = field(default=8 << 20, validator=between(1, BYTES))
    """Largest request, in bytes."""
    max_connections: int = field(default=1024, validator=between(1, RETRIES))
    """Connections open at a time."""
    record: int = field(default=256 << 20, validator=between(0, BYTES), metadata={"off": 0})
    """Of `serve`: how large `endpoint.jsonl` of the run folder may become, in bytes. It has prompt, answer, logprobs
    and versions of each answer, as tokens. What comes later is answered and counted. 0: nothing is recorded."""


@frozen
class DataFile:
    """One file, folder or hub data set."""

    path: str = field(metadata={"path": True})
    """A `.jsonl`, `.json`, `.csv`, `.tsv` (each also with `.gz`) or `.parquet` file, a folder with one such file for
    each split, a folder that `save_to_disk` of the library `datasets` wrote, or a name on the Hugging Face hub."""
    split: str = "train"
    """Of a hub data set or a `DatasetDict`, or the name of the file in a folder."""
    subset: str = ""
    """Of a hub data set that has several, e.g. `main`."""
    limit: int = field(default=0, validator=between(0, RECORDS))
    """Use only the first so many records; 0: all."""
    format: Literal["auto", "jsonl", "json", "csv", "tsv", "parquet", "saved", "hub"] = "auto"
    """How the file is written. `auto`: as its name ends. `saved`: a folder of `save_to_disk`. `hub`: a data set of the
    Hugging Face hub, also where a folder has that name."""
    layout: Literal["auto", "plain", "sharegpt", "alpaca"] = "auto"
    """How a record is laid out. `plain`: in the columns that the algorithm reads. `sharegpt`: `conversations`, a list
    of turns with `from` and `value`. `alpaca`: `instruction`, `input` and `output`. `auto`: as its columns show; `whet
    check` prints what it recognised."""
    fields: dict[str, str] = field(factory=dict, validator=_known_columns)
    """Names of this file's columns where they are not the usual ones, e.g. `{prompt: question, completion: answer}`;
    they come before `algorithm.fields`."""
    weight: float | None = field(default=None, validator=_SHARE)
    """Of training: share of the records that come from this file, relative to the weights of the others. All files
    have one, or none; with none, an epoch holds every record once."""


@frozen
class DataSection:
    """Data of offline algorithms."""

    train: list[DataFile]
    """What to train on."""
    validation: list[DataFile] = attrs.Factory(list)
    """What to compute the validation loss on."""
    max_length: int = field(default=0, validator=between(0, TOKENS))
    """Longer records are left out and counted, in tokens; 0: the model's limit."""
    max_bad_records: float = field(default=0.01, validator=[ge(0), le(1)])
    """Share of records that may be malformed before the run refuses the data. Each is reported with file and line."""


@frozen
class Config:
    """A whole config file."""

    run: RunSection
    """The run itself."""
    model: ModelSection
    """The model that is trained."""
    algorithm: Selection = selection("algorithms")
    """The loop."""
    backend: Selection = selection("backends")
    """Holds the model and trains it."""
    roles: dict[str, RoleSection] = attrs.Factory(dict)
    """Further models that the algorithm or an environment asks for, by name, e.g. `critic` or `teacher`."""
    generator: Selection | None = optional_selection("generators")
    """Samples from the model; needed by algorithms that are fed by rollouts, and for evaluation."""
    rollout: RolloutSection = attrs.Factory(RolloutSection)
    """How episodes are played."""
    weight_sync: WeightSyncSection = field(factory=WeightSyncSection, metadata=renamed("refit"))
    """How the generator gets new weights."""
    environments: list[EnvironmentSection] = attrs.Factory(list)
    """What is trained on, of algorithms that are fed by rollouts."""
    evaluation: EvaluationSection = attrs.Factory(EvaluationSection)
    """Evaluation within the run."""
    endpoint: EndpointSection = attrs.Factory(EndpointSection)
    """Where foreign agents, and whoever is let in, ask the model."""
    data: DataSection | None = None
    """What is trained on, of offline algorithms."""
    cluster: ClusterSection = attrs.Factory(ClusterSection)
    """Where it runs."""
    loggers: list[Selection] = attrs.field(
        factory=list, metadata={"kind": "loggers", "default": None, "inline": False}, kw_only=True
    )
    """Who sees the metrics, beside the run folder."""
    plugins: list[str] = attrs.Factory(list)
    """Single Python files that are loaded as plugins, relative to the config file."""
