"""A worker that counts the bytes of its tensors while it sends its weights."""

from operator import itemgetter

from whet_megatron.cpu_shim import as_on_gpu
from whet_megatron.worker import Worker
from whet_memory.live_bytes import LiveBytes


class Measured(Worker):
    """A worker of the backend."""

    @as_on_gpu
    def measure(self):
        """Return names, the bytes of this rank's parameters, the largest parameter of all ranks, and the peak.

        The peak is the smallest of three: a thread of Gloo can hold a tensor for a moment after its call has returned.
        """
        weights = self._model.weights
        held = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in self._model.parameters()}
        largest = max(one.parameter.nbytes * weights.place(one).ranks for one in weights.ruled.values())
        peaks = []
        for _ in range(3):
            with LiveBytes() as live, live.phase("sent"):
                names = list(map(itemgetter(0), weights.sent()))  # drops each tensor before the next
            peaks.append(max(size for _, size in live.timelines["sent"]))
        largest = int(self._ranks.max(largest))
        return {"names": names, "held": sum(held.values()), "largest": largest, "peak": min(peaks)}
