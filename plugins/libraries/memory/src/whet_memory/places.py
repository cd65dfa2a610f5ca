"""What GPUs and hosts hold at their fullest moment: the peaks of roles, put where their ranks live.

A moment is a phase of one role on all its ranks. Every other role holds what it holds while it is idle, or, if the two
take turns, what it holds while it is asleep; in a weight sync, also the weights for which a generator wakes. While a
role loads, the others are not there yet.
"""

from collections.abc import Iterator, Mapping, Sequence

from attrs import frozen

from whet.plan.memory import HOST
from whet.plan.placement import Machine
from whet.plan.rank_placement import RankPlacement
from whet_memory.case import Peak, Phase
from whet_memory.roles import GPU_RESERVE, Predicted


@frozen
class Moment:
    """The memory of one GPU or host during a phase of a role."""

    role: str
    phase: Phase
    place: str
    node: int
    needs: int
    has: int | None

    @property
    def fits(self) -> bool:
        """Return whether the need fits. It counts as fitting if the memory is not known."""
        return self.has is None or self.needs <= self.has

    def where(self, found: "Sequence[Moment]") -> str:
        """Return the place as text, with its machine if there are moments on several."""
        several = len({moment.node for moment in found}) > 1
        return ("host" if self.place == HOST else self.place) + (f" of machine {self.node + 1}" if several else "")

    @property
    def share(self) -> float:
        """Return the needed share of the memory, 0 if it is not known how much there is."""
        return self.needs / self.has if self.has else 0.0


def moments(
    predicted: Mapping[str, Predicted], placed: Sequence[RankPlacement], turns: Sequence[Sequence[str]],
    machine: Machine,
) -> list[Moment]:  # fmt: skip
    """Return every moment of every GPU and host that holds a rank."""
    found = []
    for number, node in enumerate(machine.nodes):
        here = [one for one in placed if one.node == number]
        gpus = sorted({gpu for one in here for gpu in one.gpus})
        for role, phase in _phases(predicted, here):
            for gpu in gpus:
                there = [one for one in here if gpu in one.gpus]
                has = node.gpu_bytes[gpu] if gpu < len(node.gpu_bytes) else None
                needs = sum(_held(predicted, one, role, phase, turns, has)[0] for one in there)
                needs += GPU_RESERVE * len({one.role.processes for one in there})
                if any(one.role.role == role for one in there):
                    found.append(Moment(role, phase, f"GPU {gpu}", number, needs, has))
            sizes = [_held(predicted, one, role, phase, turns, None) for one in here]
            needs = sum(host + (0 if one.gpus else device) for one, (device, host) in zip(here, sizes, strict=True))
            if needs:
                found.append(Moment(role, phase, HOST, number, needs, node.memory_bytes))
    return found


def _phases(predicted: Mapping[str, Predicted], here: Sequence[RankPlacement]) -> Iterator[tuple[str, Phase]]:
    for role in dict.fromkeys(one.role.role for one in here):
        yield from ((role, phase) for phase in predicted[role].peaks if phase not in ("idle", "asleep"))


def _held(
    predicted: Mapping[str, Predicted], one: RankPlacement, role: str, phase: Phase, turns: Sequence[Sequence[str]],
    has: int | None,
) -> tuple[int, int]:  # fmt: skip
    """Return the bytes of a rank on its GPU, or where it computes, and on its host, during a phase of a role."""
    name = one.role.role
    peaks = predicted[name].of_rank(one.rank, one.role.ranks)
    asleep, sides = peaks.get("asleep", Peak(0)), [side for side in turns if role in side]
    syncs = (role, phase) == ("backend", "weight_sync")
    woken = sum(term.bytes for term in one.role.memory if term.woken) if syncs else 0
    if name == role:
        held = peaks[phase]
        if sides and woken and one.gpus:  # it sends from what it holds then, and frees the rest
            held = Peak(held.device - max(0, peaks["idle"].device - woken), max(0, asleep.host - woken))
    elif phase == "loading":
        return 0, 0
    elif sides and any(name in side and (syncs or role not in side) for side in turns):
        return (asleep.device + woken) // max(1, len(one.gpus)), max(0, asleep.host - woken)
    else:
        held = peaks.get("idle", Peak(0))
    device = held.device // max(1, len(one.gpus))
    if has is not None and held.device and phase != "loading" and predicted[name].source == "terms":
        device = max(int(predicted[name].share * has), device)
    return device, held.host
