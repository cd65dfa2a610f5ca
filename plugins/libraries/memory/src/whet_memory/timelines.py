"""From traces of few layers to the peak of all: memory grows by the same amount with every further layer.

A trace records the live bytes after every operation of a phase. Two traces differ by the operations of one layer, or of
as many layers as it takes until the kinds of layers repeat:

    few      [ first layers ....... ]         [ ....... last layers ]
    more     [ first layers ....... ] [layer] [ ....... last layers ]

An operation in the common beginning, or in the common end, is the same moment in both. So its bytes are a straight line
in the number of layers. Layers between lie on a line from the first to the last, so the ends bound them.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Timeline = Sequence[tuple[str, int]]
"""The operations of a phase, each with the bytes that are live at most until the next one."""


def peak(line: Timeline) -> int:
    """Return the most bytes of a phase."""
    return max((size for _, size in line), default=0)


def extrapolate(few: Timeline, more: Timeline, times: float) -> int:
    """Return the peak of a phase whose difference from `more` is `times` the difference of `more` from `few`."""
    return round(max((after + times * (after - before) for before, after in _pairs(few, more)), default=0.0))


def _pairs(few: Timeline, more: Timeline) -> Iterator[tuple[int, int]]:
    """Yield the bytes of equal moments in both traces, from the beginning and from the end."""
    layer = len(more) - len(few)
    begin, end = _common(few, more), _common(few[::-1], more[::-1])
    if layer < 0 or begin + end < len(few):  # the operations differ: compare the peaks as a whole
        yield peak(few), peak(more)
        return
    # Up to the end of the common beginning, the last layer of one trace is compared with an inner layer of the other.
    for i in range(begin - layer if begin > layer else begin):
        yield few[i][1], more[i][1]
    for i in range(1, (end - layer if end > layer else end) + 1):
        yield few[-i][1], more[-i][1]


def _common(one: Timeline, other: Timeline) -> int:
    """Return the number of operations with which both begin."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a[0] != b[0]), min(len(one), len(other)))


def depths(config: Mapping[str, Any]) -> tuple[int, int, int]:
    """Return the layers of two small models and of the whole model, from its `config.json`.

    The small models differ by the layers after which the kinds of layers repeat.
    """
    inner = config.get("text_config") if "num_hidden_layers" not in config else None
    values = inner if isinstance(inner, Mapping) else config
    layers = int(values.get("num_hidden_layers") or 0)
    first = int(values.get("first_k_dense_replace") or 0)
    period = max(_period(values.get("layer_types")), int(values.get("decoder_sparse_step") or 1))
    few = max(3, first + 2, period + 1)
    return (few, few + period, layers) if few + period < layers else (layers, layers, layers)


def _period(kinds: Any) -> int:
    """Return the least number of layers after which a list of kinds repeats itself."""
    if not isinstance(kinds, list) or not kinds:
        return 1
    return next(p for p in range(1, len(kinds) + 1) if all(kinds[i] == kinds[i - p] for i in range(p, len(kinds))))


def shortened(config: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """Return the `config.json` of the same model with fewer layers."""
    found = dict(config)
    if "num_hidden_layers" not in found and isinstance(found.get("text_config"), Mapping):
        return {**found, "text_config": shortened(found["text_config"], layers)}
    found["num_hidden_layers"] = layers
    if isinstance(kinds := found.get("layer_types"), list):
        found["layer_types"] = kinds[:layers]
    if isinstance(window := found.get("max_window_layers"), int):
        found["max_window_layers"] = min(window, layers)
    return found
