"""Messages between the driver and a supervisor: a JSON header and some byte strings.

    length of the header (4 bytes) | length of all blobs (8 bytes) | header | blobs

The header's key `blobs` has the length of each blob. Nothing here was written by a program: what a program wrote is
always in a blob, with a limit that the supervisor has enforced.
"""

import json
import struct
from collections.abc import Sequence
from typing import Any, Final

PREFIX: Final = struct.Struct("!IQ")
LARGEST_HEADER: Final = 1 << 24
LARGEST_BLOBS: Final = 1 << 30


class FrameError(Exception):
    """A message was damaged or too large."""


def pack(header: dict[str, Any], blobs: Sequence[bytes] = ()) -> bytes:
    """Return a message as bytes."""
    text = json.dumps({**header, "blobs": [len(blob) for blob in blobs]}).encode()
    size = sum(map(len, blobs))
    if len(text) > LARGEST_HEADER or size > LARGEST_BLOBS:
        raise FrameError(f"a message of {len(text)} + {size} bytes is too large")
    return b"".join((PREFIX.pack(len(text), size), text, *blobs))


def sizes(prefix: bytes) -> tuple[int, int]:
    """Return the lengths of header and blobs. Raises `FrameError` where they are too large."""
    header, blobs = PREFIX.unpack(prefix)
    if header > LARGEST_HEADER or blobs > LARGEST_BLOBS:
        raise FrameError(f"a message of {header} + {blobs} bytes was announced")
    return header, blobs


def unpack(header: bytes, body: bytes) -> tuple[dict[str, Any], list[bytes]]:
    """Return header and blobs of a message. Raises `FrameError` where they do not fit each other."""
    try:
        parsed = json.loads(header)
        lengths = parsed.pop("blobs")
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise FrameError(f"a damaged message: {error}") from error
    blobs, at = [], 0
    for length in lengths:
        blobs.append(body[at : at + length])
        at += length
    if at != len(body):
        raise FrameError("the lengths of a message do not fit")
    return parsed, blobs
