"""Writes the metrics of a run to TensorBoard event files, with TensorBoard's record writer."""

from __future__ import annotations

import json
import os
import re
import socket
import time
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any, ClassVar

from onstep.files.bounded_reading import brief
from onstep.files.durability import append_all
from onstep.trackers.numbers import is_step
from onstep.trackers.tracker import CannotContinueError, RunIdentity, require_package

EVENT_FILES = "events.out.tfevents.*"
SAMPLES_DIR = "vs_samples"
"""Subdirectory for curves over samples."""
_FILE_NAME = re.compile(r"events\.out\.tfevents\.(\d+)\.")


class TensorBoardTracker:
    """Writes scalars and texts to a new event file for each start of the run, each point immediately.

    A resumed run masks points that an earlier process wrote and that it writes again (by a session start in
    TensorBoard's format), so TensorBoard shows each step once. A new run masks all existing points. The run's
    configuration is shown as the text ``config``. Curves over consumed samples are in the subdirectory ``vs_samples``,
    since masks are positions on the x axis.

    Args:
        log_dir: Directory of the event files; None is ``tensorboard`` in the run's directory.

    Raises:
        MissingExtraError: if TensorBoard is not installed.
    """

    name = "tensorboard"
    package = "tensorboard"
    options: ClassVar[Mapping[str, tuple[str, ...]]] = {"log_dir": ("logger.tensorboard_dir",)}
    place = "`tensorboard/` in the run directory"
    artifacts = (EVENT_FILES, "tensorboard")
    keeps_names = False
    takes_back = True

    def __init__(self, log_dir: str | Path | None = None) -> None:
        require_package(self.name, self.package)
        self._log_dir = None if log_dir is None else Path(log_dir)
        self._writer: EventFile | None = None
        self._over_samples: EventFile | None = None
        self._summary_writer: Any = None
        self._second = 0
        """The time in the name of the event file."""
        self._ends: dict[str, int] = {}
        """The next step, and the next number of samples."""
        self.location: Path | None = self._log_dir
        """The directory; None until the run's directory is known."""

    def open(self, run: RunIdentity, state: Mapping[str, Any]) -> None:
        """Start an event file, masking points of earlier files that are no longer valid."""
        self.close("completed")
        self.location = directory = self._log_dir or run.directory / "tensorboard"
        self._ends = {axis: state.get(axis, 0) for axis in ("step", "samples")}
        is_there = self._ends["step"] == 0 or any(directory.glob(EVENT_FILES))
        if not is_there or not all(map(is_step, self._ends.values())):
            raise CannotContinueError(f"{directory} does not have what was written before {brief(dict(state))}.")
        self._writer, self._second = _event_file(directory, self._ends["step"])
        if not state and run.config:
            lines = json.dumps(run.config, indent=2, default=str).splitlines()
            self.text("config", "\n".join("    " + line for line in lines), 0)

    def log(self, metrics: Mapping[str, float], step: int, timestamp: float) -> None:
        """Write the scalars of a step as one event."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        if values and self._writer is not None:
            _write(self._writer, timestamp, step=step, summary=Summary(value=values))
            self._ends["step"] = max(self._ends["step"], step + 1)

    def log_over_samples(self, metrics: Mapping[str, float], samples: int, timestamp: float) -> None:
        """Write the scalars at a number of samples."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        if self._over_samples is None and self.location is not None:
            self._over_samples, _ = _event_file(self.location / SAMPLES_DIR, self._ends["samples"])
        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        if values and self._over_samples is not None:
            _write(self._over_samples, timestamp, step=samples, summary=Summary(value=values))
            self._ends["samples"] = max(self._ends["samples"], samples + 1)

    def text(self, tag: str, text: str, step: int) -> None:
        """Write a text, shown as Markdown."""
        from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
        from tensorboard.compat.proto.types_pb2 import DT_STRING

        shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
        tensor = TensorProto(dtype=DT_STRING, string_val=[text.encode()], tensor_shape=shape)
        plugin = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
        value = Summary.Value(tag=tag, metadata=plugin, tensor=tensor)
        if self._writer is not None:
            _write(self._writer, step=step, summary=Summary(value=[value]))

    @property
    def client(self) -> Any:
        """A `SummaryWriter` with an event file of its own beside this one's; None while it is closed.

        Its file must be read after this one's, whose first event masks points of earlier files.
        """
        if self._writer is not None and self._summary_writer is None:
            from torch.utils.tensorboard import SummaryWriter

            while time.time() < self._second + 1:
                time.sleep(0.01)
            self._summary_writer = SummaryWriter(str(self.location))
        return self._summary_writer

    def local_files(self) -> list[Path]:
        """The event files."""
        return [] if self.location is None else sorted(self.location.rglob(EVENT_FILES))

    def state_dict(self) -> dict[str, Any]:
        """The step and the number of samples from which on nothing is written yet."""
        return dict(self._ends)

    def close(self, status: str) -> None:
        """Close the event files."""
        open_ones = (self._writer, self._over_samples, self._summary_writer)
        self._writer = self._over_samples = self._summary_writer = None
        for one in open_ones:
            if one is not None:
                one.close()


class EventFile:
    """An event file that is whole after each event; one that its disk refuses leaves nothing in it.

    Raises:
        FileExistsError: if there is a file of this name.
    """

    _descriptor: int | None = None

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o666)

    def write(self, event: Any) -> None:
        """Append an event."""
        from tensorboard.summary.writer.record_writer import RecordWriter

        assert self._descriptor is not None
        content = BytesIO()
        RecordWriter(content).write(event.SerializeToString())
        append_all(self._descriptor, content.getvalue())

    def close(self) -> None:
        """Close the file; idempotent."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    __del__ = close


def _event_file(directory: Path, first: int) -> tuple[EventFile, int]:
    """A new event file that masks what earlier ones have from `first` on, and the time in its name.

    The name sorts after those of all existing files, regardless of the clocks of their machines: TensorBoard reads the
    files of a directory in the order of their names, which begin with the time in seconds.
    """
    directory.mkdir(parents=True, exist_ok=True)
    seconds = max(int(time.time()), newest_second(directory) + 1)
    name = f"events.out.tfevents.{seconds:010d}.{socket.gethostname()}.{os.getpid()}.onstep"
    writer = EventFile(directory / name)
    _write(writer, file_version="brain.Event:2")
    writer.write(session_start(first))
    return writer, seconds


def _write(writer: EventFile, wall_time: float | None = None, **content: Any) -> None:
    from tensorboard.compat.proto.event_pb2 import Event

    writer.write(Event(wall_time=time.time() if wall_time is None else wall_time, **content))


def session_start(step: int) -> Any:
    """The event that makes readers drop points of earlier files from `step` on."""
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog

    return Event(wall_time=time.time(), step=step, session_log=SessionLog(status=SessionLog.START))


def newest_second(directory: Path) -> int:
    """The timestamp in the name of the newest event file, in seconds; 0 if there is none."""
    matches = [_FILE_NAME.match(path.name) for path in directory.glob(EVENT_FILES)]
    return max((int(match.group(1)) for match in matches if match is not None), default=0)
