"""What a tracker has to offer to be filled from a run, and what those that keep runs of their own share."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from onstep.errors import ConfigError

STEP_NAME = "train/global_step"
"""The optimizer step, for trackers that count points by themselves; Hugging Face's name of it."""

PACKAGES = {
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "mlflow": "mlflow",
    "comet": "comet_ml",
    "trackio": "trackio",
}
"""By name of the tracker: the package that it requires; csv requires none."""

_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]+")
"""Control characters, line ends, and halves of characters."""


def is_installed(name: str) -> bool:
    """Whether the package of a tracker is there; it is not imported."""
    package = PACKAGES.get(name)
    return package is None or find_spec(package) is not None


def require_package(name: str) -> None:
    """Refuse a tracker whose package is not there.

    Raises:
        ConfigError: with the command that installs it.
    """
    if not is_installed(name):
        raise ConfigError(f"The tracker {name!r} takes the package {PACKAGES[name]}: pip install 'onstep[{name}]'")


def plain_name(name: str) -> str:
    """A metric's name without what W&B and Comet cannot show or send: control characters and line ends become "_"."""
    return _UNPRINTABLE.sub("_", name)


@dataclass(frozen=True)
class Point:
    """What was reported at one step, under the names that the sink gets."""

    metrics: Mapping[str, float]
    step: int
    timestamp: float
    """Unix seconds."""


@dataclass(frozen=True)
class RunIdentity:
    """Which run the metrics are of: the same for every restart of the run, but for where it continues."""

    name: str
    """The run's name, shown in trackers."""
    run_id: str
    """Stable over restarts of the run."""
    folder: Path
    """Where a sink may put its local files."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Plain nested values, shown as the run's parameters."""
    start_step: int = 0
    """Step that this process continues from; 0 for a fresh run."""
    last_points: tuple[Point, ...] = ()
    """What the checkpoint that is continued had reported last, and what a kill might have taken from the tracker: whole
    steps, of the last seconds before the checkpoint and whatever waited. Sinks with `takes_back` write these again and
    drop everything else from that step on. The others are given them again, so their segment begins with these and not
    exactly at `start_step`."""
    adds_only: bool = False
    """An evaluation outside of training: nothing that is there is replaced or taken back."""

    @property
    def first_open_step(self) -> int:
        """Points of earlier processes at this step and beyond no longer count."""
        return min((point.step for point in self.last_points), default=self.start_step + 1 if self.start_step else 0)


class MetricSink(Protocol):
    """A tracker. All methods are called from one thread, in order: open, log and text, close.

    A sink may raise and be slow: `SinkQueue` keeps that away from the training. After `close` it may be opened again.
    """

    name: str
    """What messages and checkpoints call it: "wandb"."""
    takes_back: bool
    """Whether points can be replaced: such a sink sees to `RunIdentity.last_points` itself. May be left out: False."""
    keeps_names: bool
    """True: gets the journal's names (`loss`, `eval_loss`); False: `train/loss`, `eval/loss`, `test/loss`. May be left
    out: False."""

    def open(self, run: RunIdentity, state: Mapping[str, Any]) -> None:
        """Begin or continue the run in the tracker; `state` is `state_dict()` of the checkpoint, {} for a fresh run."""

    def log(self, metrics: Mapping[str, float], step: int, timestamp: float) -> None:
        """Add a point to each metric's curve; `timestamp` is in unix seconds."""

    def text(self, tag: str, text: str, step: int) -> None:
        """Show a text (samples, a report) under `tag`."""

    def state_dict(self) -> dict[str, Any]:
        """What continues the same run (ids), as plain JSON values; cheap, no network; asked for after every call."""

    def close(self, status: str) -> None:
        """Hand over what waits and let go; `status` is completed, stopped, preempted or failed."""


class ServiceSink:
    """What the sinks of trackers with runs of their own share: their package, the run there, and its id."""

    name: str
    keeps_names = False
    takes_back = False
    _identity: RunIdentity | None = None
    _id: str | None = None
    _run: Any = None
    """The run in the tracker while it is open."""

    def __post_init__(self) -> None:
        require_package(self.name)

    def close(self, status: str) -> None:
        """Hand over what waits, and end the run as it ended; closing twice is harmless."""
        run, self._run = self._run, None
        if run is not None:
            self._end(run, status)

    def _end(self, run: Any, status: str) -> None:
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """The tracker's id of the run; empty before it was opened."""
        return {} if self._identity is None or self._id is None else {"run": self._identity.run_id, "id": self._id}

    def _take_id(self, run: RunIdentity, state: Mapping[str, Any], pattern: str = r"[A-Za-z0-9_-]{1,64}") -> str:
        """The id of a run in its tracker: the one that the checkpoint holds, else the run's own.

        A checkpoint of another run (a fork starts from one) gives no id. A run id that does not match `pattern` is
        replaced by 32 hexadecimal digits that follow from it.
        """
        self._identity = run
        if state.get("run") == run.run_id and isinstance(state.get("id"), str):
            self._id = str(state["id"])
        elif re.fullmatch(pattern, run.run_id):
            self._id = run.run_id
        else:
            self._id = hashlib.sha256(run.run_id.encode()).hexdigest()[:32]
        return self._id
