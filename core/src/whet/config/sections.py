"""The sections of a config file. A default is defined here and nowhere else; its documentation is the string beneath
it.

Fields of type `Selection` hold a component chosen by `use:`; `selection(kind)` fixes its kind. Keys of a field's
metadata:

    off         the value that switches the section off
    path        True: the value may name a file or folder
    policy      True: only for the trained model; roles that are `like: backend` do not inherit it
    infinite    True: the value may be an infinity
    names_path  True: the value holds names or paths
    writes      True: a component writes to this path, which is relative to the run folder

`renamed_key` and `renamed_values` hold the former names of a key and of its values (`whet.config.renamed`).
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
    """Refuse text that cannot be part of the names of files and metrics."""
    if not value.isprintable() or "/" in value or value.startswith((".", " ")):
        raise ValueError(f"is {value!r:.60}, wanted a word: it becomes part of the names of files and metrics")


def _folder(instance: object, attribute: Any, value: str) -> None:
    """Refuse text that does not fit on one line: messages, logs and commands contain the run folder."""
    if not value.isprintable():
        raise ValueError(f"is {value!r:.60}, wanted the path of a folder without line breaks or control characters")


_FOLDER: Any = [min_len(1), _folder]


def _heartbeat(instance: object, attribute: Any, value: float) -> None:
    """Refuse a bound that would end healthy workers."""
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
    """Return a field that holds a component of a kind, chosen by `use:`.

    `default` names the component that is used where the key is left out. An `inline` component takes all keys beside
    `use:` that the class around it does not have.
    """
    metadata = {"kind": kind, "default": default, "inline": inline}
    if default is None:
        return attrs.field(metadata=metadata, kw_only=True)
    return attrs.field(metadata=metadata, default=None, kw_only=True)


def optional_selection(kind: Kind) -> Any:
    """Return a field that holds a component of a kind, or None where the key is left out."""
    return attrs.field(metadata={"kind": kind, "default": None, "inline": False}, default=None, kw_only=True)


@frozen
class RunSection:
    """The run itself."""

    folder: str = field(validator=_FOLDER, metadata={"path": True})
    """The folder that the run writes to."""
    steps: int | None = field(default=None, validator=optional(between(1, STEPS)))
    """Number of steps to take, counted over resumes. State this or `epochs`."""
    epochs: float | None = field(default=None, validator=[_EPOCHS, _length])
    """For algorithms that train on data files, instead of `steps`: how often to train on every record, e.g. 3 or 0.5.
    The last step takes the records that are left, which may be fewer than `batch_size`."""
    seed: int = field(default=0, validator=between(0, SEED))
    """Every random draw of the run is derived from this seed."""
    save_every: int = field(default=0, validator=between(0, STEPS))
    """Number of steps between checkpoints; 0: only at the end."""
    keep: int = field(default=2, validator=between(0, GROUP))
    """Number of checkpoints to keep, the newest; 0 keeps all."""
    resume: Literal["auto", "never", "must"] = "auto"
    """`auto` continues the folder's run if there is one. `never` refuses a folder that holds a run. `must` refuses a
    folder that holds none."""
    allow_changed: list[str] = attrs.Factory(list)
    """Config paths that may differ from those of the resumed run, e.g. `backend.optimizer.lr`."""
    export: bool = True
    """Write the final model as a folder that `transformers` loads, in `FOLDER/model`."""
    private_records: bool = True
    """Whether only this user may read prompts and responses: the rows of rollouts, evaluations and the endpoint.
    `false`: the umask decides, as for all other files of the run folder."""


@frozen
class ModelSection:
    """The model that is trained."""

    path: str = field(validator=min_len(1), metadata={"path": True})
    """A model folder or a name on the Hugging Face hub."""
    revision: str | None = None
    """For a hub model: branch, tag or commit."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the forward and backward pass. The optimizer's weights are always float32."""
    trust_remote_code: bool = False
    """Run Python code from the model folder. Only for folders that you trust as your own code."""
    chat_template: str | None = field(default=None, metadata={"path": True})
    """A file with a Jinja chat template to use instead of the model's own."""


@frozen
class RoleSection:
    """A further model of a run, e.g. a critic or a teacher. Keys that are not named here belong to its backend."""

    component: Selection = selection("backends", inline=True)
    """The backend that holds the model."""
    like: Literal["", "backend"] = ""
    """`backend`: a key that is not given here has the value of the section `backend`, except for keys that only the
    policy has, e.g. `reference` and `teacher` of `fsdp2`."""
    model: ModelSection | None = None
    """The model; by default the model that the run starts from."""


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
    """A worker process that is silent for this long counts as hung, whatever it is doing; 0: no limit. Code that holds
    Python's interpreter lock for longer is silent too."""
    notice: float = field(default=60.0, validator=between(0, SECONDS))
    """A wait of this length that is also twice as long as the longest of its kind so far is reported: who waits for
    whom, with stacks in `logs/waits.log`. Nothing is ended. 0: never."""


@frozen
class RecoverySection:
    """What happens when a worker process dies or hangs. An exception that a worker raises always ends the run
    at once.
    """

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

    launcher: Literal["local", "ray"] = "local"
    """`local`: on this machine. `ray`: on the nodes of a Ray cluster."""
    address: str = ""
    """For the launcher `ray`: `host:port` of the head of a cluster to join, as `ray start --head` prints it. `auto`:
    the cluster that the environment variable RAY_ADDRESS names, else the one that was started on this machine. `local`:
    Ray is started on this machine for this run, and ends with it. Empty: as RAY_ADDRESS states, else `local`."""
    workers: Literal["process", "inline"] = "process"
    """`process`: every role in worker processes. `inline`: everything in this process, so that a debugger works."""
    ranks: dict[str, int] = field(factory=dict, validator=_RANKS)
    """Number of worker processes of each role; 1 for a role that is not named."""
    gpus: dict[str, int] = field(factory=dict, validator=_GPUS)
    """Number of GPUs of each role; none named: the CPU. One rank for each GPU unless `ranks` states otherwise."""
    threads: dict[str, int] = field(factory=dict, validator=_RANKS)
    """Compute threads of each rank of a role. By default the machine's cores are divided among the ranks that work at
    the same time."""
    colocate: list[list[str]] | None = field(default=None, metadata=renamed("share"))
    """Groups of roles that share their worker processes (and devices) and take turns. By default all roles of one
    Python environment share, except the generator where `rollout.max_staleness` is above 0."""
    offload: Literal["auto", "always", "never"] = field(default="auto", metadata=renamed("sleep"))
    """Whether backend and generator release their memory while the other one works: on GPUs to the host, on CPUs to
    files. `auto`: if they share GPUs, `rollout.max_staleness` is 0 and both support it. `always`: wherever they are; a
    component that does not support it is an error."""
    placement: dict[str, Literal["pack", "spread", "one-node"]] = attrs.Factory(dict)
    """For the launcher `ray`: how the ranks of a role are placed on nodes. `pack`: on as few as possible, the default.
    `spread`: on as many as possible. `one-node`: all on one node, or the run is refused. Roles that share processes
    have one placement."""
    resources: dict[str, dict[str, float]] = field(factory=dict, validator=_AMOUNTS)
    """For the launcher `ray`: the custom resources of Ray that each rank of a role takes, e.g. `{generator: {a100: 1}}`
    for nodes started with `ray start --resources='{"a100": 8}'`."""
    memory: Literal["check", "ignore"] = "check"
    """`check`: refuse a run whose weights, gradients, optimizer and caches alone need more memory than a host or a GPU
    has. `ignore`: start it anyway."""
    transport: Literal["", "shared", "cuda-ipc", "broadcast", "shared-memory", "tcp", "disk"] = ""
    """How weights are sent from backend to generator. Empty: the fastest way that both support and their placement
    allows."""
    python: dict[str, str] = field(factory=dict, converter=absolute_paths, metadata={"names_path": True})
    """The Python environment of a role's worker processes, if it is not the driver's: the name of an environment that
    `whet env create` has made, or a path, which contains a slash, e.g. `{generator: vllm}`."""
    deadlines: DeadlinesSection = attrs.Factory(DeadlinesSection)
    """How long waits may take."""
    recovery: RecoverySection = attrs.Factory(RecoverySection)
    """What happens when a worker process dies or hangs."""


@frozen
class PassingSection:
    """What counts as a pass in `pass_at` and `majority_at`, and in the training metric `pass_rate`."""

    reward: str = ""
    """Name of the reward that decides; empty: the weighted sum of all rewards."""
    at_least: float = field(default=1.0, validator=between(-FACTOR, FACTOR))
    """The smallest value that passes."""


@frozen
class EnvironmentSection:
    """One environment of a run. Keys that are not named here belong to the environment."""

    component: Selection = selection("environments", inline=True)
    """The environment."""
    name: str = field(default="", validator=_file_name)
    """Its name in metrics and records; by default the component's."""
    split: str = ""
    """The split of its tasks; by default `train` in training and `test` in evaluation."""
    weight: float = field(default=1.0, validator=between(0, FACTOR))
    """Share of the groups that come from this environment, relative to the others."""
    samples: int = field(default=1, validator=between(1, GROUP))
    """Number of episodes for each task in evaluation."""
    limit: int = field(default=0, validator=between(0, RECORDS))
    """For evaluation: use only this many tasks, the first ones; 0: all tasks."""
    pass_at: list[int] | None = field(default=None, validator=optional(_COUNTS))
    """For evaluation: replaces `evaluation.pass_at`."""
    majority_at: list[int] | None = field(default=None, validator=optional(_COUNTS))
    """For evaluation: replaces `evaluation.majority_at`."""
    passing: PassingSection | None = None
    """For evaluation: replaces `evaluation.passing`."""


@frozen
class RecordSection:
    """Which training rollouts are recorded token by token. The others are recorded as messages and rewards."""

    every: int = field(default=10, validator=between(0, STEPS), metadata={"off": 0})
    """Number of steps from one recorded step to the next; the first step is recorded too. 0: none."""
    groups: int = field(default=2, validator=between(1, GROUP))
    """Number of groups recorded on such a step, the first ones. The trainer scores them beforehand, which costs a
    forward pass over them. If the algorithm has the trainer score whole batches anyway, as many sequences are added:
    those in which sampler and trainer differ most."""
    max_tokens: int = field(default=65_536, validator=between(1, TOKENS))
    """Largest number of tokens recorded on one step. Sequences that do not fit are left out."""


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
    """How many versions older than the trainer's the weights that made a training token may be. 0 is synchronous."""
    order: Literal["fifo", "as_completed"] = field(
        default="fifo", metadata=renamed(admission="fifo", completion="as_completed")
    )
    """Which groups a step gets: the oldest, or those that finish first. From a `max_staleness` of 2 on,
    `as_completed` lets faster groups overtake a slow one for some steps; below, both give the same groups."""
    on_weight_update: Literal["drain", "continue", "abort"] = field(
        default="drain", metadata=renamed("running", keep="continue")
    )
    """What happens to running requests when new weights arrive. `drain`: they finish with the old weights first.
    `continue`: they use the new weights from their next token on. `abort`: they end at once, and their rest is
    requested again. At `max_staleness` 0 no request is running."""
    retries: int = field(default=2, validator=between(0, RETRIES))
    """How often a failed episode is played again before its group is dropped."""
    infrastructure_retries: int = field(default=3, validator=between(0, RETRIES))
    """The same if the infrastructure failed instead of the episode: a grader's process, a sandbox, a connection."""
    max_failed_groups: int = field(default=16, validator=between(1, RETRIES))
    """Number of dropped groups in a row after which the run ends with the last error."""
    max_infrastructure_groups: int = field(default=16, validator=between(1, RETRIES))
    """The same for groups that were dropped because the infrastructure failed."""
    max_filtered_groups: int = field(default=0, validator=between(0, RETRIES))
    """Number of groups that filters may drop in a row before the run ends with an error; 0: 20 times the groups of a
    step."""
    record: RecordSection = attrs.Factory(RecordSection)
    """What is recorded token by token, for `whet report`."""


@frozen
class ProbeSection:
    """A check of each weight sync: every replica of the generator samples a few tokens, and its logprobs are compared
    with the trainer's. If they differ by more than the bound, the run ends.
    """

    every: int = field(default=10, validator=between(0, STEPS), metadata={"off": 0})
    """Number of versions from one checked version to the next; 0: no check. The first two weight syncs after a start or
    resume are checked too, and any weight sync after which a replica was restarted."""
    prompts: int = field(default=4, validator=between(1, GROUP))
    """Number of prompts of random tokens that each replica continues."""
    tokens: int = field(default=8, validator=between(1, GROUP))
    """Number of tokens sampled for each prompt."""
    bound: float | None = field(default=None, validator=optional(above(0, FACTOR)))
    """Largest mean of the absolute difference, in nats, at temperature 1. Null: the bound of the coarser dtype of
    generator and trainer: 0.001 for float32, 0.02 for float16, 0.1 for bfloat16, 0.3 for any other."""


@frozen
class WeightSyncSection:
    """How the trainer's weights are sent to the generator."""

    probe: ProbeSection = attrs.Factory(ProbeSection)
    """Whether the generator really computes with the trainer's weights."""


@frozen
class EvaluationSection:
    """Evaluation within a run, and by `whet eval`."""

    environments: list[EnvironmentSection] = field(factory=list, metadata={"off": []})
    """The environments to evaluate on."""
    every: int = field(default=0, validator=between(0, STEPS))
    """Number of steps between evaluations; 0: only at the end."""
    at_start: bool = True
    """Also evaluate before the first step."""
    temperature: float = field(default=1.0, validator=between(0, 100))
    """0 picks the likeliest token."""
    top_p: float = field(default=1.0, validator=[gt(0), le(1)])
    """Sample from the smallest set of tokens with at least this probability."""
    top_k: int = field(default=0, validator=between(0, TOKENS))
    """Sample from this many likeliest tokens; 0: from all."""
    max_tokens: int = field(default=0, validator=between(0, TOKENS))
    """Longest completion of one turn, in tokens; 0: as in `rollout`."""
    pass_at: list[int] = field(factory=list, validator=_COUNTS)
    """Estimate pass@k for each of these k: the probability that at least one of k responses passes. No k may be above
    `samples`."""
    majority_at: list[int] = field(factory=list, validator=_COUNTS)
    """Estimate maj@k for each of these k: the probability that the most frequent answer of k samples passes. No k may
    be above `samples`. Needs environments that extract final answers."""
    unanswered: Literal["silent", "vote"] = "silent"
    """How samples without a final answer vote in maj@k. `silent`: they have no vote. `vote`: together they vote for an
    answer that never passes, as in NeMo RL."""
    passing: PassingSection = attrs.Factory(PassingSection)
    """What counts as a pass."""


@frozen
class EndpointSection:
    """An OpenAI-compatible endpoint on this machine.

    Environments open one for an episode with `model.endpoint()`, whatever `serve` says. All endpoints listen at the
    same host and port; each has a key of its own.
    """

    serve: bool = field(default=False, metadata={"off": False})
    """Also serve every client that has the key in `endpoint.json` of the run folder, while the run lasts. These
    requests are not trained on."""
    host: str = field(default="127.0.0.1", validator=min_len(1))
    """The address to listen at. Traffic beyond this machine is not encrypted."""
    port: int = field(default=0, validator=[ge(0), le(65535)])
    """The port to listen at; 0: any free port."""
    max_tokens: int = field(default=0, validator=between(0, TOKENS))
    """For `serve`: the longest response, in tokens; 0: as in `rollout`. With `rollout.on_weight_update: drain` new
    weights wait for it."""
    max_body: int = field(default=8 << 20, validator=between(1, BYTES))
    """Largest request, in bytes."""
    max_connections: int = field(default=1024, validator=between(1, RETRIES))
    """Largest number of open connections."""
    record: int = field(default=256 << 20, validator=between(0, BYTES), metadata={"off": 0})
    """For `serve`: the largest size of `endpoint.jsonl` in the run folder, in bytes. It holds prompt, response,
    logprobs and versions of each response, as tokens. Later requests are served and counted, not recorded. 0: nothing
    is recorded."""


@frozen
class DataFile:
    """One file, folder or hub data set."""

    path: str = field(metadata={"path": True})
    """A `.jsonl`, `.json`, `.csv`, `.tsv` (each also with `.gz`) or `.parquet` file, a folder with one such file for
    each split, a folder that `save_to_disk` of the library `datasets` wrote, or a name on the Hugging Face hub."""
    split: str = "train"
    """The split of a hub data set or of a `DatasetDict`, or the name of the file in a folder."""
    subset: str = ""
    """For a hub data set that has several subsets, e.g. `main`."""
    limit: int = field(default=0, validator=between(0, RECORDS))
    """Use only this many records, the first ones; 0: all records."""
    format: Literal["auto", "jsonl", "json", "csv", "tsv", "parquet", "saved", "hub"] = "auto"
    """How the file is written. `auto`: its name's ending decides. `saved`: a folder of `save_to_disk`. `hub`: a data
    set of the Hugging Face hub, even if a folder has that name."""
    layout: Literal["auto", "plain", "sharegpt", "alpaca"] = "auto"
    """Which columns a record has. `plain`: the columns that the algorithm reads. `sharegpt`: `conversations`, a list of
    turns with `from` and `value`. `alpaca`: `instruction`, `input` and `output`. `auto`: the columns decide;
    `whet check` prints the recognised layout."""
    fields: dict[str, str] = field(factory=dict, validator=_known_columns)
    """Names of this file's columns that differ from the usual ones, e.g. `{prompt: question, completion: answer}`. They
    take precedence over `algorithm.fields`."""
    weight: float | None = field(default=None, validator=_SHARE)
    """For training: share of the records that come from this file, relative to the weights of the others. All files
    have a weight, or none; without weights, an epoch has every record once."""


@frozen
class DataSection:
    """Data of offline algorithms."""

    train: list[DataFile]
    """The files to train on."""
    validation: list[DataFile] = attrs.Factory(list)
    """The files to compute the validation loss on."""
    max_length: int = field(default=0, validator=between(0, TOKENS))
    """Longest record, in tokens; 0: the model's limit. Longer records are left out and counted."""
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
    """The training loop."""
    backend: Selection = selection("backends")
    """Holds the model and trains it."""
    roles: dict[str, RoleSection] = attrs.Factory(dict)
    """Further models that the algorithm or an environment asks for, by name, e.g. `critic` or `teacher`."""
    generator: Selection | None = optional_selection("generators")
    """Samples from the model. Algorithms that train on rollouts need one, and so does evaluation."""
    rollout: RolloutSection = attrs.Factory(RolloutSection)
    """How episodes are played."""
    weight_sync: WeightSyncSection = field(factory=WeightSyncSection, metadata=renamed("refit"))
    """How weights are sent to the generator."""
    environments: list[EnvironmentSection] = attrs.Factory(list)
    """The environments to train on, for algorithms that train on rollouts."""
    evaluation: EvaluationSection = attrs.Factory(EvaluationSection)
    """Evaluation within the run."""
    endpoint: EndpointSection = attrs.Factory(EndpointSection)
    """Where external agents and other clients can send requests to the model."""
    data: DataSection | None = None
    """The data to train on, for offline algorithms."""
    cluster: ClusterSection = attrs.Factory(ClusterSection)
    """Where the run is placed."""
    loggers: list[Selection] = attrs.field(
        factory=list, metadata={"kind": "loggers", "default": None, "inline": False}, kw_only=True
    )
    """Further receivers of the metrics, beside the run folder."""
    plugins: list[str] = attrs.Factory(list)
    """Single Python files that are loaded as plugins, relative to the config file."""
