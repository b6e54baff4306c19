"""Defines `Tracker`, the interface of trackers, and a base class for trackers that manage runs themselves."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Protocol

from onstep.errors import MissingExtraError, OnstepError

STEP_NAME = "train/global_step"
"""Hugging Face's name of the optimizer step, for trackers that keep their own count of points."""

_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]+")
"""Control characters, line breaks and unpaired surrogates."""


def is_installed(package: str | None) -> bool:
    """Whether the package that a tracker requires is installed, without importing it; True for None."""
    return package is None or find_spec(package) is not None


def require_package(name: str, package: str | None) -> None:
    """Check that the package of a tracker is installed.

    Raises:
        MissingExtraError: if it is not; the message gives the command that installs it.
    """
    if not is_installed(package):
        raise MissingExtraError(f"The tracker {name!r} requires the package {package}: pip install 'onstep[{name}]'")


def plain_name(name: str) -> str:
    """Replace characters that W&B and Comet cannot show or send, such as control characters, by "_"."""
    return _UNPRINTABLE.sub("_", name)


@dataclass(frozen=True)
class RunIdentity:
    """Identifies the run of the metrics; the same for every restart of a run, except for where it resumes."""

    name: str
    """Name of the run, shown in trackers."""
    run_id: str
    """Id of the run, stable across restarts."""
    directory: Path
    """Where a tracker may write local files."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Nested plain values, shown as the run's parameters."""
    start_step: int = 0
    """Step that this process resumes from; 0 for a new run."""
    adds_only: bool = False
    """Set for an evaluation outside of training."""


def path_id(directory: Path) -> str:
    """An id for a run without one, derived from its path and therefore stable.

    Args:
        directory: the directory of the run.
    """
    return hashlib.blake2b(str(directory.absolute()).encode(), digest_size=16).hexdigest()


class CannotContinueError(OnstepError):
    """A tracker does not have what a state says: its files were lost or replaced, or the service no longer has the run.

    Raised by `open`, or by `log` of a tracker that does not take points back: it then gets the whole run again, unless
    it has lost the run at this line before.
    """


class Tracker(Protocol):
    """Interface of a tracker. All methods are called from one thread, in order: open, log and text, close.

    Methods may raise or be slow: `TrackerFeed` isolates training from that. After `close`, it may be opened again.
    """

    name: str
    """Name in messages and checkpoints, such as "wandb"."""
    takes_back: bool
    """Whether `open(run, state)` drops all points that were added after `state_dict()` returned that state. Any other
    tracker keeps its points: it is not sent a step again that it has. Optional, default False."""
    keeps_names: bool
    """True: gets the metrics log's names (`loss`, `eval_loss`); False: `train/loss`, `eval/loss`, `test/loss`.
    Optional, default False."""

    def open(self, run: RunIdentity, state: Mapping[str, Any]) -> None:
        """Start or continue the run in the tracker; `state` is an earlier `state_dict()`, {} for a new run.

        Args:
            run: what the run is: its id, name, directory and configuration.
        """

    def log(self, metrics: Mapping[str, float], step: int, timestamp: float) -> None:
        """Add a point to each metric's curve; `timestamp` is in Unix seconds.

        Args:
            metrics: the values by name.
            step: the step of the values.
        """

    def text(self, tag: str, text: str, step: int) -> None:
        """Show a text (samples, a report) under `tag`.

        Args:
            text: the text.
            step: the step of the values.
        """

    def state_dict(self) -> dict[str, Any]:
        """State needed to resume the same run (ids), as plain JSON values. Called after every call; must be cheap."""

    def close(self, status: str) -> None:
        """Send pending points and release resources; `status` is completed, stopped, preempted or failed."""

    # optional:  settling_seconds: float
    #     Seconds after which points are safe even if the process is killed; default 2.
    # optional:  def log_over_samples(self, metrics: Mapping[str, float], samples: int, timestamp: float) -> None
    #     Add a point to each metric's curve over consumed samples.
    # optional:  def expect(self, names: Iterable[str]) -> None
    #     Prepare for metrics that come next.
    # optional:  client: Any
    #     The object with the service's own methods and attributes (`run`, `config`, `log_artifact`) while it is open.
    # optional:  def media(self, values: Mapping[str, Any], step: int) -> None
    #     Show values of the service's own types (images, tables, histograms), each under its name.
    # optional:  def local_files(self) -> Iterable[Path]
    #     The local files that hold the points, to be made durable before a checkpoint is committed. Called in the
    #     thread that writes the checkpoint.


class TrackerClass(Protocol):
    """The class of a tracker in `services/`: the facts about it, and its constructor.

    A new module `services/<name>_tracker.py` with such a class is a tracker of `report_to`, of `onstep logs replay` and
    of the documentation. What installs its package is the extra `<name>` in `pyproject.toml`.
    """

    name: ClassVar[str]
    """The name in `report_to`, messages and checkpoints."""
    package: ClassVar[str | None]
    """The package that it imports; None for none."""
    options: ClassVar[Mapping[str, tuple[str, ...]]]
    """Argument of the constructor -> the configuration's keys that set it, of which the first with a value counts."""
    place: ClassVar[str]
    """Where it writes, with and without a network, for the documentation."""
    artifacts: ClassVar[tuple[str, ...]]
    """What it may leave in the run's directory: names of files and directories, with wildcards."""

    def __call__(self, **options: Any) -> Tracker:
        """Create the tracker without opening it."""


class ServiceTracker:
    """Base class of trackers that manage runs themselves: handles the package, the tracker's run and its id."""

    name: str
    package: ClassVar[str | None] = None
    keeps_names = False
    takes_back = False
    _identity: RunIdentity | None = None
    _id: str | None = None
    _run: Any = None
    """The run in the tracker while it is open."""

    def __post_init__(self) -> None:
        require_package(self.name, self.package)

    def close(self, status: str) -> None:
        """Send pending points and end the run with its status; idempotent."""
        run, self._run = self._run, None
        if run is not None:
            self._end(run, status)

    def _end(self, run: Any, status: str) -> None:
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """The tracker's id of the run; empty before the first `open`."""
        return {} if self._identity is None or self._id is None else {"run": self._identity.run_id, "id": self._id}

    def _take_id(self, run: RunIdentity, state: Mapping[str, Any], pattern: str = r"[A-Za-z0-9_-]{1,64}") -> str:
        """Determine the id of the run in the tracker: the checkpoint's, or else the run's own id.

        The id in a checkpoint of another run (where a fork starts) is ignored. A run id that does not match `pattern`
        is replaced by 32 hexadecimal digits of its hash.
        """
        self._identity = run
        saved = state.get("id")
        if state.get("run") == run.run_id and isinstance(saved, str) and re.fullmatch(pattern, saved):
            self._id = saved
        elif re.fullmatch(pattern, run.run_id):
            self._id = run.run_id
        else:
            self._id = hashlib.sha256(run.run_id.encode()).hexdigest()[:32]
        return self._id
