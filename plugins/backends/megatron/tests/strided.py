"""A worker whose weights do not lie one number after another."""

from whet_megatron.worker import Worker


def strided(tensor):
    """Return an equal tensor whose columns lie one after another."""
    return tensor.detach().t().contiguous().t() if tensor.ndim == 2 else tensor.detach()


class Strided(Worker):
    """A worker of the backend."""

    def stride(self):
        """Lay out anew what is sent: weights, or an adapter's matrices."""
        if (adapters := self._model.adapters) is None:
            self._model.weights.computing = lambda one: strided(one.parameter)
        else:
            adapters.pairs = {name: (strided(a), strided(b)) for name, (a, b) in adapters.pairs.items()}
