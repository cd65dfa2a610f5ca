"""The sections of a config file. A default is defined here alone; the string beneath it is its documentation.

Fields of type `Selection` hold a component chosen by `use:`; `selection(kind)` fixes its kind. A field's metadata:

    off         the value that switches the section off
    path        True: the value may name a file or folder
    policy      True: only for the trained model; roles that are `like: backend` do not inherit it
    infinite    True: the value may be an infinity
    names_path  True: the value holds names or paths
    writes      True: a component writes to this path, which is relative to the run folder

`renamed_key` and `renamed_values` hold the former names of a key and of its values (`whet.config.renamed`).
"""

from collections.abc import Iterator
from typing import Any, Literal

import attrs
from attrs import field, frozen
from attrs.validators import deep_iterable, deep_mapping, ge, gt, le, min_len, optional

from whet.component import Kind, Selection
from whet.config.bounds import BYTES, FACTOR, GIB, GROUP, PROCESSES, RECORDS, RETRIES, STEPS, TOKENS, above, between
from whet.config.cluster import ClusterSection as ClusterSection
from whet.config.cluster import DeadlinesSection as DeadlinesSection
from whet.config.cluster import RecoverySection as RecoverySection
from whet.config.renamed import renamed
from whet.config.run import KeepBestSection as KeepBestSection
from whet.config.run import RunSection as RunSection

_COUNTS: Any = deep_iterable(between(1, GROUP))


def _file_name(instance: object, attribute: Any, value: str) -> None:
    """Refuse text that cannot be part of the names of files and metrics."""
    if not value.isprintable() or "/" in value or value.startswith((".", " ")):
        raise ValueError(f"is {value!r:.60}, wanted a word: it becomes part of the names of files and metrics")


COLUMNS = (
    "messages", "prompt", "completion", "text", "tools", "chosen", "rejected", "label", "margin",
    "conversations", "instruction", "input", "output", "system", "history",
)  # fmt: skip
"""Columns that a data file may have, under these names or under its own."""


def _known_columns(instance: object, attribute: Any, value: dict[str, str]) -> None:
    if unknown := [name for name in value if name not in COLUMNS]:
        words = f"names {', '.join(unknown)}, wanted {', '.join(COLUMNS)}"
        raise ValueError(f"{words}: what a column is, then its name in the file")


def selection(kind: Kind, default: str | None = None, *, inline: bool = False, or_kind: Kind | None = None) -> Any:
    """Return a field that holds a component of a kind, chosen by `use:`.

    `default` names the component that is used where the key is left out. An `inline` component takes all keys beside
    `use:` that the class around it does not have. `or_kind` is looked at for names that `kind` does not have.
    """
    metadata = {"kind": kind, "default": default, "inline": inline, "or_kind": or_kind}
    return field(metadata=metadata, default=attrs.NOTHING if default is None else None, kw_only=True)


def optional_selection(kind: Kind) -> Any:
    """Return a field that holds a component of a kind, or None where the key is left out."""
    return field(metadata={"kind": kind}, default=None, kw_only=True)


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
    template: dict[str, Any] = field(factory=dict)
    """Arguments of the chat template, e.g. `{enable_thinking: false}`. One that it does not use is refused."""


@frozen
class RoleSection:
    """A further model of a run, e.g. a critic or a judge. Keys that are not named here belong to its component."""

    component: Selection = selection("backends", inline=True, or_kind="generators")
    """The backend that holds the model, or, for a model that writes responses, the generator."""
    like: Literal["", "backend", "generator"] = ""
    """A key that is missing here has the value of this section, except keys of the policy alone."""
    model: ModelSection | None = None
    """The model; by default the model that the run starts from."""
    sync_every: int = field(default=0, validator=between(0, STEPS))
    """For a generator: steps from one sync of the policy's weights to the next. 0: its weights do not change."""


@frozen
class PassingSection:
    """What counts as a pass in `pass_at` and `majority_at`, and in the training metric `pass_rate`."""

    reward: str = ""
    """Name of the reward that decides; empty: the weighted sum of all rewards."""
    at_least: float = field(default=1.0, validator=between(-FACTOR, FACTOR))
    """The smallest value that passes."""


@frozen
class SamplingSection:
    """How responses are sampled in one environment."""

    max_tokens: int = field(default=0, validator=between(0, TOKENS))
    """Longest completion of one turn, in tokens; 0: as in `rollout` or `evaluation`."""
    temperature: float | None = field(default=None, validator=optional(between(0, 100)))
    """The temperature; null: as in `rollout` or `evaluation`. Training needs more than 0."""
    stop: list[str] = field(factory=list, validator=deep_iterable(min_len(1)))
    """Stop strings, beside those of `rollout`."""


@frozen
class WorkerSection:
    """The worker processes of an environment. One that crashes or hangs is replaced; its episodes are played again."""

    processes: int = field(default=1, validator=between(1, PROCESSES))
    """Number of processes. Episodes are spread over them."""
    python: str = field(default="", metadata={"names_path": True})
    """Their Python environment, if it is not the driver's: a name or a path, as in `cluster.python`."""
    memory_gib: float = field(default=0.0, validator=between(0, GIB))
    """Most memory of each process. An episode that asks for more fails. 0: no limit."""


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
    weight_schedule: dict[int, float] = field(
        factory=dict, validator=deep_mapping(between(0, STEPS), between(0, FACTOR))
    )
    """Factors of `weight` by step, e.g. `{0: 1, 100: 0.2}`, linear in between; the last one stays. Empty: 1."""
    group_size: int = field(default=0, validator=between(0, GROUP))
    """For training: number of samples of one task; 0: as the algorithm has it."""
    sampling: SamplingSection = attrs.Factory(SamplingSection)
    """How responses are sampled here, where it differs from `rollout` or `evaluation`."""
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
    worker: WorkerSection | None = None
    """Play its episodes in worker processes. Missing: the driver plays them."""

    @property
    def weights(self) -> float | dict[int, float]:
        """Return the weight, or the weights by step."""
        return {step: factor * self.weight for step, factor in self.weight_schedule.items()} or self.weight


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
    """As `retries`, if the infrastructure failed and not the episode: a grader's process, a sandbox, a connection."""
    max_failed_groups: int = field(default=16, validator=between(1, RETRIES))
    """Number of dropped groups in a row after which the run ends with the last error."""
    max_infrastructure_groups: int = field(default=16, validator=between(1, RETRIES))
    """As `max_failed_groups`, for groups that were dropped because the infrastructure failed."""
    max_filtered_groups: int = field(default=0, validator=between(0, RETRIES))
    """Number of groups that filters may drop in a row before the run ends; 0: 20 times the groups of a step."""
    record: RecordSection = attrs.Factory(RecordSection)
    """Which training rollouts are recorded token by token, for reports."""


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

    content: Literal["auto", "merged", "adapter"] = "auto"
    """If the backend trains an adapter: send it `merged` into all weights, or the `adapter` alone, which the generator
    applies. `auto`: the adapter, if the generator can."""
    probe: ProbeSection = attrs.Factory(ProbeSection)
    """Whether the generator really computes with the trainer's weights."""


@frozen
class EvaluationSection:
    """Evaluation within a run, and without one."""

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
    """Estimate pass@k for each of these k, up to `samples`: the probability that at least one of k responses passes."""
    majority_at: list[int] = field(factory=list, validator=_COUNTS)
    """Estimate maj@k for each of these k: the probability that the most frequent answer of k samples passes. No k may
    be above `samples`. Needs environments that extract final answers."""
    unanswered: Literal["silent", "vote"] = "silent"
    """How samples without a final answer vote in maj@k. `silent`: they have no vote. `vote`: together they vote for an
    answer that never passes, as in NeMo RL."""
    passing: PassingSection = attrs.Factory(PassingSection)
    """The smallest reward that counts as a pass."""


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
    unsupported: Literal["refuse", "ignore"] = "refuse"
    """What happens to a parameter of a request that is unknown, or cannot be kept: `refuse` answers with an error that
    names it; `ignore` leaves it out, and the header `x-whet-ignored` of the response names it."""
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
    name: str = field(default="", validator=_file_name)
    """For validation on several files: its name in metrics; by default that of the file, without its ending."""
    split: str = ""
    """The split of a hub data set or of a `DatasetDict`, or the name of the file in a folder. Empty: for training
    `train`; for validation `validation` or `test`, if just one of them is there. Other data has no splits."""
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
    weight: float | None = field(default=None, validator=optional(above(0, FACTOR)))
    """For training: share of the records that come from this file, relative to the weights of the others. All files
    have a weight, or none; without weights, an epoch has every record once."""


HELD_OUT = "validation or test"
"""The `split` of a validation file that names none: the one of the two that the data has."""


def _held_out(files: list[DataFile]) -> list[DataFile]:
    return [attrs.evolve(file, split=file.split or HELD_OUT) for file in files]


@frozen
class DataSection:
    """Data of offline algorithms."""

    train: list[DataFile]
    """The files to train on."""
    validation: list[DataFile] = field(factory=list, converter=_held_out)
    """The files to compute the validation loss on: over all of them, and over each one if there are several."""
    max_length: int = field(default=0, validator=between(0, TOKENS))
    """Longest record, in tokens; 0: the model's limit. Longer records are left out and counted."""
    max_too_long: float = field(default=0.5, validator=[ge(0), le(1)])
    """Share of records that may be longer than that before the run refuses the data."""
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
    loggers: list[Selection] = field(factory=list, metadata={"kind": "loggers"}, kw_only=True)
    """Further receivers of the metrics, beside the run folder."""
    hooks: list[Selection] = field(factory=list, metadata={"kind": "hooks"}, kw_only=True)
    """Hooks with settings, e.g. a profiler. Hooks without settings need no entry."""
    plugins: list[str] = attrs.Factory(list)
    """Single Python files that are loaded as plugins, relative to the config file."""

    def played(self) -> Iterator[tuple[str, EnvironmentSection]]:
        """Yield the path and the section of each environment, those of evaluation last."""
        for path, sections in ("", self.environments), ("evaluation.", self.evaluation.environments):
            yield from ((f"{path}environments.{i}", section) for i, section in enumerate(sections))
