import contextlib
import json
import math
import tracemalloc
import zlib
from collections import OrderedDict
from types import MappingProxyType
from typing import Any

import attrs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from whet.component import Spec
from whet.data.batch import from_sequences
from whet.data.messages import Message
from whet.data.metrics import Metric
from whet.data.records import Completion, Episode, Group, Request, Sampling, Task, Trajectory
from whet.errors import WhetError
from whet.interfaces.workers import WorkerRank
from whet.runtime import WIRE_FORMAT, wire
from whet.runtime.wire import DTYPES, RECORDS, WireError, _record, decode, encode


def same(a: Any, b: Any) -> bool:
    """Equal in type and value, NaN equal to NaN, arrays compared by element."""
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and np.array_equal(a, b, equal_nan=a.dtype.kind == "f")
    if isinstance(a, float):
        return math.copysign(1, a) == math.copysign(1, b) and (a == b or (a != a and b != b))
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if attrs.has(type(a)):
        return all(same(getattr(a, f.name), getattr(b, f.name)) for f in attrs.fields(type(a)))
    return bool(a == b)


def over_the_wire(value: Any) -> Any:
    """As if through a socket: every buffer arrives as fresh, writable memory."""
    return decode([bytearray(buffer) for buffer in encode(value)])


keys = st.text(max_size=4) | st.sampled_from(["~", "of", "at"])
shapes = npst.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)
dtypes: Any = st.sampled_from(list(DTYPES.values()))
arrays = npst.arrays(dtypes, shapes)
flat_dtypes: Any = st.sampled_from([np.dtype(np.int64), np.dtype(np.float32)])
flat: Any = npst.arrays(flat_dtypes, st.integers(0, 5))
scalars = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.just(math.nan) | st.text(max_size=5)
)
samplings = st.builds(
    Sampling, st.integers(1, 9), st.floats(0, 2), stop=st.lists(st.text(min_size=1, max_size=3)).map(tuple)
)
completions = st.builds(
    Completion, st.text(max_size=3), flat, flat, st.just("stop"),
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=3).map(tuple),
    st.dictionaries(st.sampled_from(["a", "b"]), flat),
)  # fmt: skip
requests = st.builds(Request, st.text(max_size=3), flat, samplings, st.integers(0, 2**63 - 1), st.text(max_size=2))
leaves = scalars | st.binary(max_size=8) | arrays | completions | requests | samplings


def containers(inside: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return (
        st.lists(inside, max_size=4)
        | st.lists(inside, max_size=4).map(tuple)
        | st.dictionaries(keys, inside, max_size=3)
        | st.tuples(inside, st.integers(2, 4)).map(lambda pair: [pair[0]] * pair[1])
        | st.lists(st.fixed_dictionaries({"x": inside, "y": inside}), max_size=3)
        | st.lists(st.tuples(inside, inside), max_size=3)
        | st.lists(flat, max_size=4)
        | st.lists(completions, max_size=4)
        | st.lists(requests, max_size=4)
    )


@given(st.recursive(leaves, containers, max_leaves=12))
@settings(max_examples=100)
def test_every_value_arrives_as_it_left(value: Any) -> None:
    assert same(over_the_wire(value), value)


@given(st.recursive(leaves, containers, max_leaves=6), st.data())
@settings(max_examples=60)
def test_a_damaged_message_is_refused_or_gives_some_value_but_nothing_worse(value: Any, data: st.DataObject) -> None:
    buffers = [bytearray(buffer) for buffer in encode(value)]
    victim = buffers[data.draw(st.integers(0, len(buffers) - 1))]
    how = data.draw(st.sampled_from(["cut", "flip", "grow", "drop"]))
    if how == "cut":
        del victim[data.draw(st.integers(0, max(len(victim) - 1, 0))) :]
    elif how == "flip" and victim:
        victim[data.draw(st.integers(0, len(victim) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    elif how == "grow":
        victim += b"x"
    else:
        buffers.pop()
    with contextlib.suppress(WhetError):
        decode(buffers)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2**70) | st.floats() | st.sampled_from(["tuple", "x", *RECORDS]),
    lambda inside: (
        st.lists(inside, max_size=3)
        | st.fixed_dictionaries(
            {"~": st.sampled_from(["array", "bytes", "tuple", "dict", "repeat", "ragged", "rows", "Batch", "Task"])},
            optional=dict.fromkeys(("at", "of", "count", "lengths", "columns", "keys", "values"), inside),
        )
    ),
    max_leaves=8,
)


@given(json_values, st.lists(st.tuples(st.sampled_from(["int64", "bool", "object", "x"]), st.integers(-1, 3))))
@settings(max_examples=100)
def test_a_forged_header_is_refused_or_gives_some_value_but_nothing_worse(tree: Any, specs: list[Any]) -> None:
    header = json.dumps({"value": tree, "arrays": specs}).encode()
    buffers = [header, *(bytes(max(size, 0) * 8) for _, size in specs)]
    with contextlib.suppress(WhetError):
        decode(buffers)


@pytest.mark.parametrize(
    ("header", "rest"),
    [
        (b"", []),
        (b"\xff\xfe", []),
        (b"[]", []),
        (b"{}", []),
        (b'{"value":{"~":"array","at":0},"arrays":[]}', []),
        (b'{"value":{"~":"array","at":-1},"arrays":[["int64",1]]}', [bytes(8)]),
        (b'{"value":{"~":"array","at":true},"arrays":[["int64",1],["int64",1]]}', [bytes(8), bytes(8)]),
        (b'{"value":{"~":"array","at":0},"arrays":[["int64",2]]}', [bytes(8)]),
        (b'{"value":{"~":"array","at":0},"arrays":[["int64",-1,-1]]}', [bytes(8)]),
        (b'{"value":{"~":"array","at":0},"arrays":[["int64",0,99999999999999999999999]]}', [b""]),
        (b'{"value":{"~":"array","at":0},"arrays":[["object",1]]}', [bytes(8)]),
        (b'{"value":{"~":"array","at":0},"arrays":[["V8",1]]}', [bytes(8)]),
        (b'{"value":{"~":"ragged","at":0,"lengths":[5,-4]},"arrays":[["int64",1]]}', [bytes(8)]),
        (b'{"value":{"~":"ragged","at":0,"lengths":[2]},"arrays":[["int64",1]]}', [bytes(8)]),
        (b'{"value":{"~":"repeat","of":0,"count":1000000000000},"arrays":[]}', []),
        (b'{"value":{"~":"rows","of":"tuple","columns":[]},"arrays":[]}', []),
        (b'{"value":{"~":"rows","of":"tuple","columns":[[1],[1,2]]},"arrays":[]}', []),
        (b'{"value":{"~":"Popen","of":["sh"]},"arrays":[]}', []),
        (b'{"value":{"~":"os.system","of":["sh"]},"arrays":[]}', []),
        (b'{"value":{"~":"Sampling","of":[1,2]},"arrays":[],"x":' + b"[" * 100_000, []),
        (b'{"value":' + b"[" * 50_000 + b"]" * 50_000 + b',"arrays":[]}', []),
        (b'{"value":{"~":"Batch","of":[{},{},{}]},"arrays":[]}', []),
        (b'{"value":{"~":"Sampling","of":[1,2,3,4,5,6,7,8]},"arrays":[]}', []),
    ],
)
def test_hostile_messages_are_refused(header: bytes, rest: list[bytes]) -> None:
    with pytest.raises(WireError):
        decode([header, *rest])


REPEAT = {"~": "repeat", "of": 0, "count": 1 << 20}
ZEROS = {"~": "bytes", "at": 0}


def nested(depth: int) -> Any:
    tree: Any = {"~": "repeat", "of": 0, "count": 1 << 16}
    for _ in range(depth):
        tree = {"~": "rows", "of": "tuple", "columns": [tree]}
    return tree


BOMBS: dict[str, tuple[Any, bytes]] = {
    "one repetition": (REPEAT, b""),
    "many repetitions": ([REPEAT] * 2000, b""),
    "many small repetitions": ([{**REPEAT, "count": 1 << 10}] * 10_000, b""),
    "rows of repetitions": ({"~": "rows", "of": "dict", "keys": list("abcdefgh"), "columns": [REPEAT] * 8}, b""),
    "rows of rows": (nested(200), b""),
    "one buffer in many places": ([ZEROS] * 10_000, bytes(1 << 20)),
    "an array in many places": ([{"~": "array", "at": 0}] * 100_000, bytes(8)),
}


def peak(message: list[bytes], **options: Any) -> tuple[int, bool]:
    """Return the most memory that decoding took, in bytes, and whether the message was refused."""
    tracemalloc.start()
    try:
        decode(message, **options)
        return tracemalloc.get_traced_memory()[1], False
    except WireError:
        return tracemalloc.get_traced_memory()[1], True
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("what", BOMBS)
def test_a_message_never_unpacks_to_much_more_than_it_was(what: str) -> None:
    tree, buffer = BOMBS[what]
    arrays = [["uint8", len(buffer)]] * bool(buffer)
    message = [json.dumps({"value": tree, "arrays": arrays}).encode(), *([buffer] if buffer else [])]
    size = sum(map(len, message))
    trusted, refused = peak(message)
    assert refused is (what != "one repetition")
    assert trusted < (64 << 20) + 50 * size
    stranger, refused = peak(message, records=False, packed=False)
    assert refused
    assert stranger < (1 << 20) + 50 * size


@pytest.mark.parametrize("filling", [b"[],", b"{},", b"1.5,", b'{"a":{}},', b'{"~":"tuple","of":[]},', b"[[[[[]]]]],"])
def test_an_untrusted_message_of_many_values_is_refused_before_it_is_read(filling: bytes) -> None:
    header = b'{"value":[' + filling * ((16 << 20) // len(filling)) + b'0],"arrays":[]}'
    most, refused = peak([header], records=False, packed=False)
    assert refused
    assert most < 3 * len(header)
    few = b'{"value":[' + filling * 20_000 + b'0],"arrays":[]}'
    assert peak([few], records=False, packed=False)[0] < 64 << 20


@given(st.recursive(leaves, containers, max_leaves=12))
@settings(max_examples=60)
def test_what_is_not_packed_arrives_as_it_left_where_nothing_packed_is_taken(value: Any) -> None:
    buffers = [bytearray(buffer) for buffer in encode(value, packed=False)]
    assert same(decode(buffers, packed=False), value)


def test_repetitions_beyond_the_limit_cross_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "_MOST_REPEATS", 1000)
    once = Message("user", "x")
    value = [[once] * 400, [once] * 400, [once] * 400]
    assert bytes(encode(value)[0]).count(b'"repeat"') == 2
    assert same(over_the_wire(value), value)
    pair = (np.arange(2), once)
    for count in (100, 200):
        rows = [(pair, pair) for _ in range(count)]
        assert same(over_the_wire(rows), rows)


def test_no_buffers_at_all_is_refused() -> None:
    with pytest.raises(WireError):
        decode([])


@pytest.mark.parametrize(
    ("value", "where", "what"),
    [
        ({"a": [1, {2, 3}]}, r"the value\['a'\]\[1\]", "set"),
        ([Spec("m:C", "", {"folder": object()})], r"the value\[0\]\.config\['folder'\]", "object"),
        ({1: 2}, "the value", "a dict with the key 1"),
        (np.array([object()]), "the value", "array of object"),
        ((np.array([1j]),), r"the value\[0\]", "array of complex128"),
        (lambda: 0, "the value", "function"),
        ([{"a": 1, 2: 3}] * 2, r"the value\[0\]", "key 2"),
    ],
)
def test_what_cannot_cross_is_named_with_its_place(value: Any, where: str, what: str) -> None:
    with pytest.raises(WireError, match=f"{where} is .*{what}"):
        encode(value)


def test_a_value_inside_itself_is_refused() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(WireError):
        encode(value)


def test_a_class_that_only_shares_a_record_s_name_is_refused() -> None:
    impostor = attrs.make_class("Sampling", ["x"])
    with pytest.raises(WireError, match="Sampling"):
        encode(impostor(1))


def test_records_can_be_refused_from_untrusted_senders() -> None:
    with pytest.raises(WireError, match="Sampling"):
        decode(encode([Sampling()]), records=False)
    assert decode(encode([1, "a", {"b": 2.5}]), records=False) == [1, "a", {"b": 2.5}]


def test_arrays_are_views_of_what_arrived_and_writable() -> None:
    buffers = [bytearray(buffer) for buffer in encode(np.arange(4))]
    array = decode(buffers)
    array[0] = 7
    assert np.frombuffer(buffers[1], np.int64)[0] == 7


def test_a_contiguous_array_is_sent_from_its_own_memory() -> None:
    array = np.arange(1000)
    assert np.shares_memory(np.frombuffer(encode(array)[1], np.int64), array)


def test_strided_and_big_endian_arrays_arrive_with_their_values() -> None:
    grid = np.arange(12).reshape(3, 4)
    assert np.array_equal(over_the_wire(grid.T), grid.T)
    assert np.array_equal(over_the_wire(grid[:, ::2]), grid[:, ::2])
    assert np.array_equal(over_the_wire(np.array([1, 2], ">i4")), [1, 2])


def test_numpy_numbers_and_mappings_arrive_as_builtins() -> None:
    value = [np.float32(0.5), np.int64(3), np.bool_(True), MappingProxyType({"a": 1}), OrderedDict(b=2)]
    arrived = over_the_wire(value)
    assert same(arrived, [0.5, 3, True, {"a": 1}, {"b": 2}])


def test_every_record_listed_exists_and_its_fields_are_what_its_constructor_takes() -> None:
    for name in RECORDS:
        cls, fields = _record(name)
        assert cls.__name__ == name
        assert cls.__module__ == RECORDS[name]
        assert [f.alias for f in attrs.fields(cls) if f.init and not f.kw_only] == list(fields)


def test_one_of_each_larger_record_arrives_as_it_left() -> None:
    trajectory = Trajectory(
        np.arange(3), np.array([False, True, True]), np.zeros(3, np.float32), np.zeros(3, np.int32), 1, "stop"
    )
    episode = Episode("math", 3, 0, (trajectory,), {"correct": 1.0}, 1.0, 1, (("user", "hi"),))
    batch = from_sequences(
        [{"tokens": [1, 2], "loss_mask": [False, True]}, {"tokens": [3], "loss_mask": [True]}], prompt_lengths=[1, 0]
    )
    value = [
        Group(0, "math", 3, (episode, episode)), batch, Metric("mean", 1.5, 3), Task("hi", {"answer": "4"}),
        Message("user", "hi"), WorkerRank("backend", 0, 2), Spec("m:C", "m:D", {"a": {"b": [1]}}),
    ]  # fmt: skip
    assert same(over_the_wire(value), value)


def test_a_step_s_completions_cross_in_three_buffers() -> None:
    draw = np.random.default_rng(0)
    completions = [
        Completion(f"request-{i}", draw.integers(0, 1000, 30), np.zeros(30, np.float32), "stop", ((0, 3),))
        for i in range(128)
    ]
    assert len(encode(completions)) == 3  # header, all tokens, all logprobs


def test_records_that_change_are_another_wire_format() -> None:
    fields = "".join(f"{name}{_record(name)[1]}" for name in sorted(RECORDS))
    found = (WIRE_FORMAT, zlib.crc32(fields.encode()))
    assert found == (15, 1812893543), (
        "raise WIRE_FORMAT: another core misunderstands these records; then note both here"
    )
