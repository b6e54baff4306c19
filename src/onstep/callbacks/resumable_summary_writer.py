"""Provides a TensorBoard writer that resumes from a checkpoint without showing any step twice."""

from __future__ import annotations

import functools
import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from onstep.errors import ConfigError, extra
from onstep.events import RunState, TrainerCallback
from onstep.files.durability import try_to_sync
from onstep.trackers.services.tensorboard_tracker import EVENT_FILES, newest_second, session_start
from onstep.train_state import StateDict

logger: logging.Logger = logging.getLogger(__name__)

_VALUES = frozenset(
    ("all_writers", "default_bins", "file_writer", "filename_suffix", "flush_secs", "max_queue", "purge_step")
)
"""Attributes of torch's SummaryWriter that are not methods."""


def _adds(name: str, what: str) -> Callable[..., Any]:
    """A method of `ResumableSummaryWriter` that forwards to the real writer's method of the same name."""

    def add(self: ResumableSummaryWriter, *args: object, **kwargs: object) -> Any:
        return getattr(self._open(), name)(*args, **kwargs)

    add.__name__, add.__doc__ = name, f"Add {what}."
    return add


@dataclass
class _Hidden:
    """The events written so far that must be hidden.

    This is a separate object because plain attributes of a callback are part of its id in checkpoints.
    """

    from_step: int | None = None
    """The step from which the next writer hides events; None hides nothing."""
    of_writer: int | None = None
    """The step from which the open writer has hidden events."""
    begun_at: int | None = None
    """The step at which this run started or resumed; None until known."""
    has_trained: bool = False
    own_files: set[str] = field(default_factory=set)
    """Event files that this object created before its first training, by an evaluation; they stay visible."""


class ResumableSummaryWriter(TrainerCallback):
    """A callback that replaces `torch.utils.tensorboard.SummaryWriter`; other callbacks write to it.

    The real writer is created at the first `add_...`; ranks that never write create nothing. Checkpoints record the
    directory. A run resumed from a checkpoint continues to write there, and TensorBoard hides points written after the
    checkpoint's step; points of the step itself remain. A rollback during the run works the same way. A run that starts
    from scratch in a directory with events of an earlier run hides those. Nothing is deleted: hidden points remain in
    the files.

    The position in the list of callbacks does not matter: a writer that was created before the step to resume from was
    known is closed and created again.

    The directory of another run, one with its own `run.json`, is not modified: a run that starts from its checkpoint
    writes to its own directory from that step on.

    Args:
        log_dir: Directory of the event files; created when the first event is written.

    Raises:
        ConfigError: if `log_dir` is not writable; when training begins, or else at the first event.
    """

    def __init__(self, log_dir: str | os.PathLike[str]) -> None:
        self._given = self._directory = Path(log_dir)
        self._writer: Any = None
        self._hidden = _Hidden()

    # Interface of SummaryWriter.

    @property
    def log_dir(self) -> str:
        """The directory of the event files."""
        return str(self._directory)

    def get_logdir(self) -> str:
        """The directory of the event files."""
        return self.log_dir

    add_scalar = _adds("add_scalar", "a scalar: `(tag, scalar_value, global_step=None, walltime=None, ...)`")
    add_text = _adds("add_text", "a Markdown text: `(tag, text_string, global_step=None, walltime=None)`")
    add_histogram = _adds(
        "add_histogram", 'the distribution of values: `(tag, values, global_step=None, bins="tensorflow", ...)`'
    )
    add_image = _adds("add_image", 'an image: `(tag, img_tensor, global_step=None, walltime=None, dataformats="CHW")`')
    add_images = _adds(
        "add_images", 'a batch of images: `(tag, img_tensor, global_step=None, walltime=None, dataformats="NCHW")`'
    )
    add_figure = _adds(
        "add_figure", "a matplotlib figure: `(tag, figure, global_step=None, close=True, walltime=None)`"
    )
    add_graph = _adds(
        "add_graph", "the graph of a model: `(model, input_to_model=None, verbose=False, use_strict_trace=True)`"
    )

    def add_scalars(self, main_tag: str, tag_scalar_dict: Mapping[str, float], *args: object, **kwargs: object) -> None:
        """Add several scalars to one chart, each as a separate run in a subdirectory: `(..., global_step=None)`.

        Args:
            main_tag: the group of the tags.
            tag_scalar_dict: the values by tag.
        """
        writer = self._open()
        for tag in tag_scalar_dict:
            self._open_part(writer, f"{self.log_dir}/{main_tag.replace('/', '_')}_{tag}")
        writer.add_scalars(main_tag, tag_scalar_dict, *args, **kwargs)

    def flush(self) -> None:
        """Write pending events to the files."""
        if self._writer is not None:
            self._writer.flush()

    def tags_at(self, step: int) -> set[str]:
        """The tags that TensorBoard shows at a step, also those that another process has written.

        Args:
            step: the step.
        """
        self.flush()
        found: set[str] = set()
        for path in sorted(self._directory.glob(EVENT_FILES), reverse=True):
            tags, is_first = _tags_at(path, step)
            found |= tags
            if is_first:
                break
        return found

    def close(self) -> None:
        """Close the files; later events go to new files."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()

    def __enter__(self) -> ResumableSummaryWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __getattr__(self, name: str) -> Any:
        if name in _VALUES:
            return getattr(self._open(), name)
        if name.startswith("add_") and callable(getattr(_tensorboard().SummaryWriter, name, None)):
            return functools.partial(_adds(name, "what this version of torch's writer supports"), self)
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    # Interface of callbacks.

    def on_checkpoint_load(self, args: object, state: RunState, control: object, **kwargs: object) -> None:
        """Hide points written after the checkpoint's step, at the start or in a rollback."""
        self._resume_writing(state.global_step, state.global_step + 1)

    def on_data_init_start(self, args: object, state: RunState, control: object, **kwargs: object) -> None:
        """Determine the step at which the run starts, before anything is written."""
        self._begin(state)

    def on_train_begin(self, args: object, state: RunState, control: object, **kwargs: object) -> None:
        """Determine the step at which the run starts, if it is not known yet."""
        self._begin(state)

    def on_train_end(self, args: object, state: object, control: object, **kwargs: object) -> None:
        """Write pending events; the next training determines its starting step again."""
        self.flush()
        self._hidden.begun_at = None

    def on_run_end(self, args: object, state: object, control: object, **kwargs: object) -> None:
        """Close the files; a later evaluation opens new files."""
        self.close()

    def state_dict(self) -> StateDict:
        """The directory, after writing all pending events."""
        self.flush()
        return {"log_dir": self.log_dir}

    def make_durable(self) -> None:
        """Fsync the event files, before a checkpoint that refers to them is committed."""
        writer = self._writer
        for directory in [] if writer is None else list(writer.all_writers or ()):
            for path in Path(directory).glob(EVENT_FILES):
                try_to_sync(path)

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Continue in the checkpoint's directory, if it exists and does not belong to another run.

        Args:
            state_dict: what `state_dict()` returned.
        """
        directory = Path(state_dict["log_dir"])
        if directory.resolve() == self._directory.resolve():
            return
        if not directory.is_dir():
            logger.warning(
                "the TensorBoard directory to resume, %s, is missing; writing to %s", directory, self._directory
            )
        elif _belongs_to_another(directory, self._given):
            logger.info("%s belongs to another run and is left unchanged; writing to %s", directory, self._directory)
        else:
            self.close()
            self._directory = directory

    def _begin(self, state: RunState) -> None:
        """Once per run, hide everything that was written after its first step."""
        if state.is_world_process_zero:
            _require_writable(self._directory)
        step = state.global_step
        if self._hidden.begun_at == step:
            return
        hides_from = step + 1 if step > 0 else None
        if step == 0 and _event_files(self._directory) - self._hidden.own_files:
            if state.is_world_process_zero:
                logger.warning("%s has events of an earlier run; TensorBoard will hide them", self._directory)
            # points that this object wrote before the starting step was known are at step 0
            hides_from = 1 if self._hidden.own_files else 0
        self._resume_writing(step, hides_from)

    def _resume_writing(self, step: int, hides_from: int | None) -> None:
        """Start or resume the run at a step; of the points written so far, those from `hides_from` on are hidden."""
        if hides_from is not None:
            self._hidden.from_step = hides_from
            self.close()
        self._hidden.begun_at, self._hidden.has_trained = step, True
        self._hidden.own_files.clear()

    def _open(self) -> Any:
        """The real writer; a new one starts by recording which points are hidden."""
        if self._writer is not None:
            return self._writer
        before = _event_files(self._directory)
        self._hidden.of_writer = self._hidden.from_step
        if self._hidden.from_step is not None:
            _wait_for_a_later_name(self._directory)
        try:
            self._writer = _tensorboard().SummaryWriter(self.log_dir)
        except OSError as error:
            raise _cannot_write(self.log_dir, error) from error
        if self._hidden.from_step is not None:
            _hide_from(self._writer.file_writer, self._hidden.from_step)
        self._hidden.from_step = None  # recorded once: points added from now on are visible
        if not self._hidden.has_trained:
            self._hidden.own_files |= _event_files(self._directory) - before
        return self._writer

    def _open_part(self, writer: Any, directory: str) -> None:
        """Open a subdirectory of `add_scalars`, which torch's writer would open without hiding anything."""
        if directory in writer.all_writers or self._hidden.of_writer is None:
            return
        _wait_for_a_later_name(Path(directory))
        part = _tensorboard().FileWriter(directory, writer.max_queue, writer.flush_secs, writer.filename_suffix)
        _hide_from(part, self._hidden.of_writer)
        writer.all_writers[directory] = part


def _tensorboard() -> Any:
    with extra("tensorboard", "writing for TensorBoard requires the package tensorboard"):
        import torch.utils.tensorboard
    return torch.utils.tensorboard


def _require_writable(directory: Path) -> None:
    """Reject a directory that could not be created or written to, without creating it."""
    directory = directory.absolute()
    nearest = next(one for one in (directory, *directory.parents) if os.path.lexists(one))
    if not nearest.is_dir():
        raise _cannot_write(directory, f"{nearest} is not a directory")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise _cannot_write(directory, f"missing write permission for {nearest}")


def _cannot_write(directory: str | Path, reason: object) -> ConfigError:
    return ConfigError(f"cannot write to log_dir {directory} ({reason}); choose another log_dir, or make it writable.")


def _hide_from(file_writer: Any, step: int) -> None:
    """Begin an event file with a marker that hides earlier events of this step and later ones.

    The marker is written twice: TensorBoard treats the first session start that it reads in a directory as the very
    first one, and hides nothing for it.
    """
    for _ in range(2):
        file_writer.add_event(session_start(step))


def _tags_at(path: Path, step: int) -> tuple[set[str], bool]:
    """The tags that an event file has at a step, without "/text_summary"; whether it hides those of earlier files."""
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog

    tags: set[str] = set()
    hides = False
    for data in RawEventFileLoader(str(path)).Load():
        event = Event.FromString(data)
        if event.HasField("session_log") and event.session_log.status == SessionLog.START and event.step <= step:
            tags, hides = set(), True
        elif event.step == step:
            tags |= {value.tag.removesuffix("/text_summary") for value in event.summary.value}
    return tags, hides


def _event_files(directory: Path) -> set[str]:
    return {path.name for path in directory.glob(EVENT_FILES)}


def _belongs_to_another(directory: Path, own: Path) -> bool:
    """Whether `directory` is inside a run's directory that does not contain `own`."""
    for parent in (directory.resolve(), *directory.resolve().parents):
        if (parent / "run.json").exists():
            return not own.resolve().is_relative_to(parent)
    return False


def _wait_for_a_later_name(directory: Path) -> None:
    """Wait until a new event file sorts after the existing ones: TensorBoard reads them in order of their names.

    File names begin with the time in seconds, so this waits at most one second. If the clock was set back further, a
    warning is logged, since the old events then stay visible.
    """
    newest = newest_second(directory)
    if newest > time.time() + 2:
        logger.warning("%s has event files dated in the future; points after a resume may be shown twice", directory)
        return
    while int(time.time()) <= newest:
        time.sleep(0.02)
