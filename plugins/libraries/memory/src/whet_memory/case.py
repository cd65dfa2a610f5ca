"""The records of a prediction: what it depends on, and what comes out. No torch; a `Case` travels as JSON.

Forecast   what a component declares (`WorkerFacts.forecast`): closed formulas, a trace, and changes that save memory
Case       one rank of a role, with everything that its memory depends on
Peak       bytes on the device and on the host, the most of one phase
"""

from collections.abc import Callable, Mapping
from typing import Any, Final, Literal

import attrs
from attrs import frozen

from whet.data.model_info import ModelInfo

Phase = Literal["loading", "score", "train", "optimizer", "idle", "weight_sync", "generation", "asleep"]
PHASES: Final[tuple[Phase, ...]] = (
    "loading", "score", "train", "optimizer", "idle", "weight_sync", "generation", "asleep"
)  # fmt: skip
"""`train`: forward and backward passes. `idle`: awake, while other roles work. `asleep`: see `cluster.offload`."""

TOPK: Final = 64
"""The likeliest tokens of a position that are read where nothing states how many: the default of `distill`."""


@frozen
class Sizes:
    """Sizes of the parallel axes of a role: ranks = shards x tensor x context x replicate x pipeline."""

    shards: int = 1
    """Ranks over which weights, gradients and moments are sharded; each has other data."""
    tensor: int = 1
    """Ranks that share each matrix product."""
    context: int = 1
    """Ranks that share each sequence."""
    expert: int = 1
    """Ranks that share the experts of a layer. They are laid over the other axes."""
    replicate: int = 1
    """Copies of all that."""
    pipeline: int = 1
    """Stages of a pipeline. Consecutive ranks hold one stage."""

    @property
    def ranks(self) -> int:
        """Return the number of ranks."""
        return self.data * self.tensor * self.context * self.pipeline

    @property
    def data(self) -> int:
        """Return the number of ranks that have data of their own."""
        return self.shards * self.replicate


@frozen
class Case:
    """One rank of a role."""

    settings: Mapping[str, Any]
    """The component's section, as built-in types."""
    model: ModelInfo
    sizes: Sizes = Sizes()
    trained: bool = True
    device: Literal["cpu", "gpu"] = "cpu"
    tokens: int = 0
    """Tokens of the largest forward and backward pass of this rank."""
    longest: int = 0
    """Tokens of the longest sequence."""
    passes: int = 0
    """Forward and backward passes of a step on one rank, at the most. 0: it is not known."""
    stage: int = 0
    """The pipeline stage of the rank."""
    outputs: tuple[str, ...] = ("logprobs",)
    """The outputs of the model that losses read, with numbers, e.g. `topk_ids:64`."""
    teacher: ModelInfo | None = None
    """A frozen model beside the role's own, of any shape; see `Forecast.teacher`."""

    @property
    def topk(self) -> int:
        """Return the tokens at each position whose logprobs are read."""
        return next((int(name.partition(":")[2]) for name in self.outputs if name.startswith("topk")), TOPK)

    def to_json(self) -> dict[str, Any]:
        """Return the case as built-in types. The model's folder is part of it only if its code lies there."""
        found = attrs.asdict(self)
        for name, model in (("model", self.model), ("teacher", self.teacher)):
            if model is not None and not model.trust_remote_code:
                found[name] = {**found[name], "path": "", "chat_template": ""}
        return found

    @staticmethod
    def from_json(found: Mapping[str, Any]) -> "Case":
        """Return the case that `to_json` wrote."""
        return Case(
            **{
                **found, "model": ModelInfo(**found["model"]), "sizes": Sizes(**found["sizes"]),
                "outputs": tuple(found["outputs"]),
                "teacher": ModelInfo(**found["teacher"]) if found["teacher"] else None,
            }
        )  # fmt: skip


@frozen
class Peak:
    """The most memory of one phase."""

    device: int
    """Bytes where the rank computes."""
    host: int = 0
    """Bytes in the host's memory, if the rank computes on a GPU."""


Peaks = Mapping[Phase, Peak]


@frozen
class Saving:
    """A change of a component's section that saves memory."""

    key: str
    """Key below the section, e.g. `gradient_checkpointing`."""
    value: Any
    cost: str
    """What it costs, as the end of a sentence."""
    other_result: bool = False
    """Whether the run learns something else, e.g. an adapter in place of all weights. Such changes come last."""
    new_run: bool = False
    """Whether a checkpoint that was saved without the change does not load with it. A run with checkpoints is not
    offered such a change."""


@frozen
class Forecast:
    """How the peaks of a component are predicted."""

    settings: Mapping[str, Any]
    """The component's section, as built-in types."""
    model: ModelInfo
    formulas: Callable[[Case], Peaks]
    """Closed formulas, for a rank of the stage `Case.stage`. They import no torch."""
    tokens: int = 0
    """Tokens of one forward and backward pass, of the component's section. 0: it computes no such passes."""
    trace: str = ""
    """`package.module:function`, called as `function(case, layers)` in a process of the role's Python. It computes a
    training step of a model of so many layers on tensors without memory and returns a `Timeline` for each phase.
    Empty: there are formulas alone."""
    savings: Callable[[Case], tuple[Saving, ...]] = lambda case: ()
    """Changes that can save memory of this case, the cheapest first."""
    sizes: Callable[[int], Sizes] = Sizes
    """Sizes of the parallel axes for a number of ranks."""
    teacher: ModelInfo | None = None
    """A frozen model of another shape that the same ranks hold."""
