"""The predicted peaks of each role of a plan, from the best source that there is.

trace      a training step of the component's own code, on tensors without memory
formulas   of the component
terms      the least that the plan knows: `WorkerFacts.memory`, without activations
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

from attrs import evolve, frozen

from whet.component import LossFacts
from whet.config.sections import Config
from whet.plan.placement import RolePlan
from whet.plan.plan import Plan
from whet.plan.roles import Role, Roles
from whet_memory.case import PHASES, Case, Forecast, Peak, Peaks, Phase
from whet_memory.tracer import TraceError, Tracer

Source = Literal["trace", "formulas", "terms"]
GPU_RESERVE: Final = 1 << 30
"""Bytes of a GPU that are assumed for the CUDA context, NCCL and libraries. They were not measured."""


@frozen
class Predicted:
    """The peaks of one rank of a role."""

    role: str
    source: Source
    peaks: Peaks
    why: str = ""
    """Why there is no trace, if one was wanted."""
    traceable: bool = False
    """Whether the component can be traced."""
    stages: tuple[Peaks, ...] = ()
    """The peaks of a rank of each pipeline stage, where there are several. Then `peaks` are of the fullest one."""

    def of_rank(self, rank: int, ranks: int) -> Peaks:
        """Return the peaks of one of the role's ranks."""
        return self.stages[rank * len(self.stages) // ranks] if self.stages else self.peaks

    def to_dict(self) -> dict[str, Any]:
        """Return bytes by phase, `{"train": {"device": ..., "host": ...}, ..., "source": ...}`."""
        phases: dict[str, Any] = {name: {"device": peak.device, "host": peak.host} for name, peak in self.peaks.items()}
        return {**phases, "source": self.source}


def predict(
    config: Config, roles: Roles, plan: Plan, tracers: Mapping[str, Tracer], *, start: bool
) -> dict[str, Predicted]:
    """Return the peaks of all roles. `tracers` are by role; unless they may `start`, only known traces count."""
    return {
        one.role: _with_lent(_of_role(config, roles, plan, one, tracers.get(one.role), start=start), one)
        for one in plan.roles
    }


def _of_role(
    config: Config, roles: Roles, plan: Plan, one: RolePlan, tracer: Tracer | None, *, start: bool
) -> Predicted:
    role = roles[one.role]
    forecast = role.facts.forecast
    gpu = one.devices[0] != "cpu"
    if not isinstance(forecast, Forecast):
        return Predicted(one.role, "terms", _ordered(_of_terms(one, role, gpu)))
    case = case_of(config, roles, plan, one, forecast)
    if case.sizes.pipeline > 1:
        found = [forecast.formulas(evolve(case, stage=stage)) for stage in range(case.sizes.pipeline)]
        stages = tuple(_ordered(_with_copies(peaks, one)) for peaks in found)
        return Predicted(one.role, "formulas", _fullest(stages), stages=stages)
    closed = _with_copies(forecast.formulas(case), one)
    if not (forecast.trace and tracer):
        return Predicted(one.role, "formulas", _ordered(closed), traceable=bool(forecast.trace))
    try:
        traced = tracer.peaks(forecast.trace, case) if start else tracer.known(forecast.trace, case)
    except TraceError as error:
        return Predicted(one.role, "formulas", _ordered(closed), str(error), traceable=True)
    if traced is None:
        return Predicted(one.role, "formulas", _ordered(closed), traceable=True)
    return Predicted(one.role, "trace", _ordered(_joined(closed, traced)))


def _with_lent(found: Predicted, one: RolePlan) -> Predicted:
    """Leave on the device, while the role sleeps, the weights with which a generator computes in place."""
    lent = sum(term.bytes for term in one.memory if term.lent and term.when == "working")

    def awake(peaks: Peaks) -> Peaks:
        if "asleep" not in peaks or not lent:
            return peaks
        asleep = peaks["asleep"]
        return {**peaks, "asleep": Peak(asleep.device + lent, max(0, asleep.host - lent))}

    return evolve(found, peaks=awake(found.peaks), stages=tuple(map(awake, found.stages)))


def _fullest(stages: Sequence[Peaks]) -> Peaks:
    """Return the most of each phase over stages."""
    return {
        phase: Peak(max(one[phase].device for one in stages), max(one[phase].host for one in stages))
        for phase in stages[0]
    }


def _joined(closed: Peaks, traced: Peaks) -> dict[Phase, Peak]:
    """Return traced peaks. Phases without a trace have the peaks of formulas, corrected by the traced `idle`."""
    more = traced["idle"].device - closed["idle"].device if "idle" in traced and "idle" in closed else 0
    found = dict[Phase, Peak]()
    for phase, peak in closed.items():
        if phase in traced:
            found[phase] = evolve(peak, device=traced[phase].device)
        elif phase in ("loading", "asleep"):
            found[phase] = peak
        else:
            found[phase] = evolve(peak, device=peak.device + more)
    return found


def _with_copies(closed: Peaks, one: RolePlan) -> dict[Phase, Peak]:
    """Add the copy of the weights that processes of one machine share, which the plan adds to the terms."""
    shared = sum(term.bytes for term in one.memory if term.place == "host" and term.when == "working")
    return {
        phase: evolve(peak, host=peak.host + shared) if phase != "loading" else peak for phase, peak in closed.items()
    }


def _of_terms(one: RolePlan, role: Role, gpu: bool) -> dict[Phase, Peak]:
    def total(when: str, places: tuple[str, ...], asleep: bool = False) -> int:
        return sum(
            term.bytes for term in one.memory
            if term.when == when and term.place in places and (term.kept_asleep or not asleep)
        )  # fmt: skip

    device: tuple[str, ...] = ("", "gpu") if gpu else ("",)
    held = Peak(total("working", device), total("working", ("host",)))
    found: dict[Phase, Peak] = {"idle": held, "asleep": Peak(0, total("working", device, asleep=True) + held.host)}
    if any(term.when == "loading" for term in one.memory):
        found["loading"] = Peak(total("loading", device), total("loading", ("host",)))
    found["generation" if role.generates else "train" if role.trained else "score"] = held
    return found


def _ordered(peaks: Mapping[Phase, Peak]) -> Peaks:
    return {phase: peaks[phase] for phase in PHASES if phase in peaks}


def case_of(config: Config, roles: Roles, plan: Plan, one: RolePlan, forecast: Forecast) -> Case:
    """Return the case of a role: the largest forward and backward pass that a rank computes."""
    role, facts = roles[one.role], roles.algorithm
    sizes = forecast.sizes(one.ranks)
    limit = (config.data.max_length if config.data else 0) if plan.feeds_on == "data" else config.rollout.max_context
    longest = limit or forecast.model.max_positions or forecast.tokens
    sequences = facts.records_per_step or (facts.group_size or 0) * (facts.groups_per_step or 0)
    sequences *= 2 if facts.data_format == "pairs" else 1
    tokens = max(forecast.tokens, limit)  # a longer sequence than micro_batch_tokens is computed in one pass
    of_step = longest * -(-sequences // sizes.data)
    if sequences:
        tokens = min(tokens, of_step)
    return Case(
        forecast.settings, forecast.model, sizes, role.trained, "cpu" if one.devices[0] == "cpu" else "gpu", tokens,
        min(longest, tokens), -(-of_step // max(1, tokens)), outputs=_outputs(roles, one.role, role),
    )  # fmt: skip


def _outputs(roles: Roles, name: str, role: Role) -> tuple[str, ...]:
    wanted = set(roles.needs[name].outputs) if name in roles.needs else set[str]()
    for loss in roles.of(LossFacts).values():
        wanted |= loss.outputs_needed if loss.role == name else frozenset()
    usual = {"logprobs"} & roles.outputs_of(name) or {"values"} & roles.outputs_of(name)
    return tuple(sorted((wanted & roles.outputs_of(name)) or usual))
