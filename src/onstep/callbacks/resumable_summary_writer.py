"""A TensorBoard writer that continues where a checkpoint was saved, so that each step is shown once."""

from __future__ import annotations

import functools
import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from onstep.errors import ConfigError, MissingExtraError
from onstep.events import TrainerCallback
from onstep.trackers.services.tensorboard_tracker import EVENT_FILES, newest_second, session_start

logger: logging.Logger = logging.getLogger(__name__)

_VALUES = frozenset(
    ("all_writers", "default_bins", "file_writer", "filename_suffix", "flush_secs", "max_queue", "purge_step")
)
"""What torch's SummaryWriter has beside its methods."""


def _adds(name: str, what: str) -> Callable[..., Any]:
    """A method of `ResumableSummaryWriter` that adds something by the real writer's method of that name."""

    def add(self: ResumableSummaryWriter, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._open(), name)(*args, **kwargs)

    add.__name__, add.__doc__ = name, f"Add {what}."
    return add


@dataclass
class _Hidden:
    """From which step on the events that were written are to be hidden, and whose they are.

    It is an object of its own because plain values of a callback are part of its id in checkpoints.
    """

    from_step: int | None = None
    """What the next writer has to hide; None for nothing."""
    of_writer: int | None = None
    """What the writer that is open has hidden."""
    begun_at: int | None = None
    """The step at which this run began or went on; None before that is known."""
    has_trained: bool = False
    own_files: set[str] = field(default_factory=set)
    """Event files that this object made before its first training: an evaluation's, which stays visible."""


class ResumableSummaryWriter(TrainerCallback):
    """A callback, and a stand-in for `torch.utils.tensorboard.SummaryWriter` that others write to.

    The real writer is made at the first `add_...`; on ranks that never write nothing is made. Checkpoints remember the
    folder. A run that continues from a checkpoint goes on writing in that folder, and TensorBoard hides what was
    written there after the checkpoint's step; the points of the step itself stay. The same holds for a rollback while
    the run goes on. A run that begins anew in a folder with events of an earlier run hides those. Nothing is deleted:
    what is hidden stays in the files.

    Where it stands in the list of callbacks makes no difference: a writer that was made before the step to continue
    from was known is closed and made again.

    The folder of another run, one that has its own `run.json`, is left alone: a run that starts from its checkpoint
    writes to its own folder, from that step on.

    Args:
        log_dir: Folder of the event files; made when the first event is written.

    Raises:
        ConfigError: `log_dir` cannot be written; when training begins, or else with the first event.
    """

    def __init__(self, log_dir: str | os.PathLike[str]) -> None:
        self._given = self._folder = Path(log_dir)
        self._writer: Any = None
        self._hidden = _Hidden()

    # What a SummaryWriter has.

    @property
    def log_dir(self) -> str:
        """The folder that is written to."""
        return str(self._folder)

    def get_logdir(self) -> str:
        """The folder that is written to."""
        return self.log_dir

    add_scalar = _adds("add_scalar", "a number: `(tag, scalar_value, global_step=None, walltime=None, ...)`")
    add_text = _adds("add_text", "a text in markdown: `(tag, text_string, global_step=None, walltime=None)`")
    add_histogram = _adds(
        "add_histogram", 'the distribution of values: `(tag, values, global_step=None, bins="tensorflow", ...)`'
    )
    add_image = _adds("add_image", 'an image: `(tag, img_tensor, global_step=None, walltime=None, dataformats="CHW")`')
    add_images = _adds(
        "add_images", 'a batch of images: `(tag, img_tensor, global_step=None, walltime=None, dataformats="NCHW")`'
    )
    add_figure = _adds(
        "add_figure", "a figure of matplotlib: `(tag, figure, global_step=None, close=True, walltime=None)`"
    )
    add_graph = _adds(
        "add_graph", "the graph of a model: `(model, input_to_model=None, verbose=False, use_strict_trace=True)`"
    )

    def add_scalars(self, main_tag: str, tag_scalar_dict: Mapping[str, float], *args: Any, **kwargs: Any) -> None:
        """Add several numbers to one chart, each as a run of its own in a folder below: `(..., global_step=None)`."""
        writer = self._open()
        for tag in tag_scalar_dict:
            self._open_part(writer, f"{self.log_dir}/{main_tag.replace('/', '_')}_{tag}")
        writer.add_scalars(main_tag, tag_scalar_dict, *args, **kwargs)

    def flush(self) -> None:
        """Write to the files what was added so far."""
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        """Close the files; what is added later goes to new ones."""
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
            return functools.partial(_adds(name, "what torch's writer of this version can add"), self)
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    # What a callback has.

    def on_checkpoint_load(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Hide what was written after the checkpoint's step, at the start or in a rollback."""
        self._go_on(state.global_step, state.global_step + 1)

    def on_data_init_start(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Find out where the run begins, before anybody writes."""
        self._begin(state)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Find out where the run begins, if nobody has said so yet."""
        self._begin(state)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write to the files what was added so far; the next training begins or goes on by itself."""
        self.flush()
        self._hidden.begun_at = None

    def on_run_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Close the files; a later evaluation opens new ones."""
        self.close()

    def state_dict(self) -> dict[str, Any]:
        """The folder; everything up to this moment is in its files."""
        self.flush()
        return {"log_dir": self.log_dir}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue in the folder of the checkpoint, if it is there and not another run's."""
        folder = Path(state_dict["log_dir"])
        if folder.resolve() == self._folder.resolve():
            return
        if not folder.is_dir():
            logger.warning("%s, the TensorBoard folder to continue, is gone; writing to %s", folder, self._folder)
        elif _belongs_to_another(folder, self._given):
            logger.info("%s is of another run and stays as it is; writing to %s", folder, self._folder)
        else:
            self.close()
            self._folder = folder

    def _begin(self, state: Any) -> None:
        """Arrange, once a run, that only what was written up to its first step is shown."""
        if state.is_world_process_zero:
            _require_writable(self._folder)
        step = state.global_step
        if self._hidden.begun_at == step:
            return
        hides_from = step + 1 if step > 0 else None
        if step == 0 and _event_files(self._folder) - self._hidden.own_files:
            if state.is_world_process_zero:
                logger.warning("%s has events of an earlier run; TensorBoard shows those of this one", self._folder)
            # what this object wrote before it was known where the run begins is at step 0
            hides_from = 1 if self._hidden.own_files else 0
        self._go_on(step, hides_from)

    def _go_on(self, step: int, hides_from: int | None) -> None:
        """The run begins or goes on at a step; of what was written so far, steps from `hides_from` on are not shown."""
        if hides_from is not None:
            self._hidden.from_step = hides_from
            self.close()
        self._hidden.begun_at, self._hidden.has_trained = step, True
        self._hidden.own_files.clear()

    def _open(self) -> Any:
        """The real writer; a new one begins by saying what is hidden."""
        if self._writer is not None:
            return self._writer
        before = _event_files(self._folder)
        self._hidden.of_writer = self._hidden.from_step
        if self._hidden.from_step is not None:
            _wait_for_a_later_name(self._folder)
        try:
            self._writer = _tensorboard().SummaryWriter(self.log_dir)
        except OSError as error:
            raise _cannot_write(self.log_dir, error) from error
        if self._hidden.from_step is not None:
            _hide_from(self._writer.file_writer, self._hidden.from_step)
        self._hidden.from_step = None  # said once: what is added from now on is to be seen
        if not self._hidden.has_trained:
            self._hidden.own_files |= _event_files(self._folder) - before
        return self._writer

    def _open_part(self, writer: Any, folder: str) -> None:
        """Open one of the folders of `add_scalars`, which torch's writer opens without hiding anything in it."""
        if folder in writer.all_writers or self._hidden.of_writer is None:
            return
        _wait_for_a_later_name(Path(folder))
        part = _tensorboard().FileWriter(folder, writer.max_queue, writer.flush_secs, writer.filename_suffix)
        _hide_from(part, self._hidden.of_writer)
        writer.all_writers[folder] = part


def _tensorboard() -> Any:
    try:
        import torch.utils.tensorboard
    except ImportError as error:
        raise MissingExtraError(
            "writing for TensorBoard needs the package tensorboard; install it: pip install 'onstep[tensorboard]'"
        ) from error
    return torch.utils.tensorboard


def _require_writable(folder: Path) -> None:
    """Refuse a folder that could not be made or written, without making it."""
    folder = folder.absolute()
    nearest = next(one for one in (folder, *folder.parents) if os.path.lexists(one))
    if not nearest.is_dir():
        raise _cannot_write(folder, f"{nearest} is no folder")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise _cannot_write(folder, f"no permission to write to {nearest}")


def _cannot_write(folder: str | Path, reason: object) -> ConfigError:
    return ConfigError(f"log_dir {folder} cannot be written ({reason}); choose another log_dir, or make it writable.")


def _hide_from(file_writer: Any, step: int) -> None:
    """Begin an event file by saying that earlier events of this and later steps are not to be shown.

    Said twice, since TensorBoard takes the first start of a session that it reads in a folder for the first one there
    was, and hides nothing then.
    """
    for _ in range(2):
        file_writer.add_event(session_start(step))


def _event_files(folder: Path) -> set[str]:
    return {path.name for path in folder.glob(EVENT_FILES)}


def _belongs_to_another(folder: Path, own: Path) -> bool:
    """Whether `folder` is in the folder of a run that `own` is not in."""
    for parent in (folder.resolve(), *folder.resolve().parents):
        if (parent / "run.json").exists():
            return not own.resolve().is_relative_to(parent)
    return False


def _wait_for_a_later_name(folder: Path) -> None:
    """Wait until a new event file sorts behind those that are there: TensorBoard reads them by name.

    The name begins with the time in whole seconds, so this takes at most one; a clock that was set back further is
    told, since the old events then stay visible.
    """
    newest = newest_second(folder)
    if newest > time.time() + 2:
        logger.warning("%s has event files from the future; points after a resume may be shown twice", folder)
        return
    while int(time.time()) <= newest:
        time.sleep(0.02)
