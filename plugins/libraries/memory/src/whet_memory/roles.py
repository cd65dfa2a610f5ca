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
from whet.plan.placement import RolePlan, gpus_of
from whet.plan.plan import Plan
from whet.plan.roles import Role, Roles
from whet_memory.case import PHASES, TOPK, Case, Forecast, Peak, Peaks, Phase
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
    share: float = 0.0
    """The share of a GPU that a generator takes. `peaks` are without its cache, which takes the rest of it."""
    note: str = ""
    """What was assumed, or is known otherwise, as the end of a sentence that begins with roles."""

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
        share = sum(term.gpu_share for term in one.memory) if gpu else 0.0
        note = _share_note(share, len(gpus_of(one.devices[0]))) if share else ""
        return Predicted(one.role, "terms", _ordered(_of_terms(one, role, gpu)), share=share, note=note)
    case = case_of(config, roles, plan, one, forecast)
    found = _of_forecast(forecast, case, one, tracer, start=start)
    key, limit = _limit(config, plan)
    if not limit and case.longest < (forecast.model.max_positions or case.longest + 1):
        return evolve(found, note=f"sequences of {case.longest:,} tokens were assumed, as {key} is 0, no limit")
    return found


def _share_note(share: float, gpus: int) -> str:
    each = f"each of a rank's {gpus} GPUs, over which the weights are spread" if gpus > 1 else "its GPU"
    return f"the cache takes the rest of memory_fraction, {share:.0%} of {each}"


def _limit(config: Config, plan: Plan) -> tuple[str, int]:
    """Return the key that limits sequences, and its value; 0: there is no limit."""
    if plan.feeds_on == "data":
        return "data.max_length", config.data.max_length if config.data else 0
    return "rollout.max_context", config.rollout.max_context


def _of_forecast(forecast: Forecast, case: Case, one: RolePlan, tracer: Tracer | None, *, start: bool) -> Predicted:
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
            and not (gpu and term.gpu_share)
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
    limit = _limit(config, plan)[1]
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
        teacher=forecast.teacher,
    )  # fmt: skip


def _outputs(roles: Roles, name: str, role: Role) -> tuple[str, ...]:
    wanted = set(roles.needs[name].outputs) if name in roles.needs else set[str]()
    for loss in roles.of(LossFacts).values():
        wanted |= loss.outputs_needed if loss.role == name else frozenset()
    usual = {"logprobs"} & roles.outputs_of(name) or {"values"} & roles.outputs_of(name)
    found = (wanted & roles.outputs_of(name)) or usual
    return tuple(sorted(f"{one}:{TOPK}" if one in ("topk_ids", "topk_logprobs") else one for one in found))
