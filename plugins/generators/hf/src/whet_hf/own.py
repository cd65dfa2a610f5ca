"""Weights of the generator's own: a copy of the model, to which weight syncs bring new weights or an adapter."""

from pathlib import Path
from typing import Any

from whet.interfaces.weights import TransferSpec
from whet_hf.adapter import Base
from whet_hf.loading import take_weights
from whet_weights.offload import Offload
from whet_weights.stored_names import StoredNames
from whet_weights.transfer import receive


class OwnWeights:
    """The weights of a model that this worker has loaded."""

    def __init__(self, model: Any, file: Path) -> None:
        """`file`: where weights of a CPU wait while they sleep."""
        self.model = model
        self._base, self._stored = Base(model), StoredNames(model)
        self._offload = Offload(file)

    @property
    def asleep(self) -> bool:
        """Return whether the memory of the weights is released."""
        return self._offload.asleep

    def take(self, spec: TransferSpec, receiver: int) -> bool:
        """Take what a weight sync brings. Return whether the model has it now.

        An adapter is small: it waits until the weights are back, so that both models are never on a GPU at once.
        """
        held = spec.adapter is not None and self.asleep
        if not held:
            self._offload.wake(contents=spec.adapter is not None)
        tensors = receive(spec, receiver)
        if spec.adapter is not None:
            (self._base.hold if held else self._base.apply)(tensors, spec.adapter)
        else:
            self._base.forget()
            take_weights(self.model, tensors, self._stored)
        return not held

    def sleep(self) -> int:
        """Free the memory of the weights. Return the number of bytes."""
        return self._offload.sleep(self.model.parameters())

    def wake(self) -> None:
        """Bring the weights back."""
        self._offload.wake()

    def apply_held(self) -> bool:
        """Apply an adapter that arrived while the weights slept. Return whether there was one."""
        return self._base.apply_held()

    def close(self) -> None:
        """Release the offloaded weights."""
        self._offload.close()
