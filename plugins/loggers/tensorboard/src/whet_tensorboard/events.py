"""Event files, written with TensorBoard's own record writer and messages. The only module that imports TensorBoard.

`tensorboard.summary.Writer` is not used. It writes through a queue and a thread, imports TensorFlow if that is
installed, and cannot mark a restart.
"""

import math
import os
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.compat.proto.types_pb2 import DT_DOUBLE, DT_STRING
from tensorboard.plugins.histogram import metadata as shapes
from tensorboard.plugins.hparams import api_pb2, plugin_data_pb2
from tensorboard.plugins.hparams import metadata as hparams
from tensorboard.plugins.text import metadata as texts
from tensorboard.summary.writer.record_writer import RecordWriter

VERSION = "brain.Event:2"
"""Version of the format. Readers support restarts since this version."""
LARGEST = 3.4028234e38
"""Scalars are float32. Larger numbers become infinite."""


class EventFile:
    """A new event file in a folder. TensorBoard reads it after the existing files."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        # Readers read the files of a folder in the order of their names. A name must not be used twice.
        names = [path.name.split(".")[3] for path in folder.glob("events.out.tfevents.*")]
        last = max((int(name) for name in names if name.isdecimal()), default=0)
        name = f"events.out.tfevents.{max(int(time.time()), last + 1):010d}.{socket.gethostname()}.{os.getpid()}"
        self._writer = RecordWriter((folder / name).open("xb"))
        self._write(Event(wall_time=time.time(), file_version=VERSION))

    @property
    def closed(self) -> bool:
        """Return whether the file is closed."""
        return bool(self._writer.closed)

    def restart(self, step: int) -> None:
        """Write an event that makes readers drop this step and later steps of earlier files."""
        self._write(Event(wall_time=time.time(), step=step, session_log=SessionLog(status=SessionLog.START)))

    def write(self, step: int, summary: Summary) -> None:
        """Write the summary of a step."""
        self._write(Event(wall_time=time.time(), step=step, summary=summary))

    def flush(self) -> None:
        """Pass all data to the operating system, so that it survives a kill of this process."""
        self._writer.flush()

    def close(self) -> None:
        """Write the remaining data and close the file."""
        self._writer.close()

    def _write(self, event: Event) -> None:
        self._writer.write(event.SerializeToString())


def scalars(metrics: Mapping[str, float]) -> Summary:
    """Return one summary with the numbers of a step."""
    return Summary(value=[Summary.Value(tag=name, simple_value=_float32(metrics[name])) for name in sorted(metrics)])


def histograms(rows: Sequence[Mapping[str, Any]]) -> Summary:
    """Return one summary with the histograms of a step, for rows as in `whet.interfaces.logger.Event`."""
    return Summary(value=[_histogram(row["name"], row["edges"], row["counts"]) for row in rows])


def _histogram(name: str, edges: Sequence[float], counts: Sequence[int]) -> Summary.Value:
    """Return a histogram as [left, right, count] of each bin. The bins at both ends are as wide as their neighbours, or
    1 where they have none.
    """
    first, last = edges[:2], edges[-2:]
    bounds = [first[0] - (first[-1] - first[0] or 1.0), *edges, last[-1] + (last[-1] - last[0] or 1.0)]
    bins = [number for bin in zip(bounds[:-1], bounds[1:], counts, strict=True) for number in bin]
    shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=len(counts)), TensorShapeProto.Dim(size=3)])
    tensor = TensorProto(dtype=DT_DOUBLE, double_val=bins, tensor_shape=shape)
    return Summary.Value(tag=name, metadata=shapes.create_summary_metadata(name, ""), tensor=tensor)


def text(name: str, markdown: str) -> Summary:
    """Return a summary with a text, which TensorBoard shows as Markdown."""
    shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
    tensor = TensorProto(dtype=DT_STRING, string_val=[markdown.encode()], tensor_shape=shape)
    return Summary(value=[Summary.Value(tag=name, metadata=texts.create_summary_metadata(name, ""), tensor=tensor)])


def session_start(name: str, values: Mapping[str, bool | float | str]) -> Summary:
    """Return the summary that starts a session with its config values. TensorBoard finds the metrics itself."""
    info = plugin_data_pb2.SessionStartInfo(group_name=name, start_time_secs=time.time())
    for key, value in values.items():
        if isinstance(value, bool):
            info.hparams[key].bool_value = value
        elif isinstance(value, int | float):
            info.hparams[key].number_value = value
        else:
            info.hparams[key].string_value = value
    return _session(hparams.SESSION_START_INFO_TAG, plugin_data_pb2.HParamsPluginData(session_start_info=info))


def session_end(failed: bool) -> Summary:
    """Return the summary that ends a session, with its status."""
    status = api_pb2.STATUS_FAILURE if failed else api_pb2.STATUS_SUCCESS
    info = plugin_data_pb2.SessionEndInfo(status=status, end_time_secs=time.time())
    return _session(hparams.SESSION_END_INFO_TAG, plugin_data_pb2.HParamsPluginData(session_end_info=info))


def _session(tag: str, data: plugin_data_pb2.HParamsPluginData) -> Summary:
    metadata: SummaryMetadata = hparams.create_summary_metadata(data)
    return Summary(value=[Summary.Value(tag=tag, metadata=metadata, tensor=hparams.NULL_TENSOR)])


def _float32(number: float) -> float:
    number = float(number)
    return math.copysign(math.inf, number) if abs(number) > LARGEST else number
