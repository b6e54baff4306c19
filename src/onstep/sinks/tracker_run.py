"""What the sinks of the trackers share: the package that must be there, and the id that a run keeps in its tracker."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from onstep.errors import ConfigError
from onstep.sinks.metric_sink import RunIdentity

STEP_NAME = "train/global_step"
"""The optimizer step, for trackers that count points by themselves; Hugging Face's name of it."""

PACKAGES = {
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "mlflow": "mlflow",
    "comet": "comet_ml",
    "trackio": "trackio",
}
"""By name of the tracker: the package that it takes; csv takes none."""

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


class ServiceSink:
    """What the sinks of trackers with runs of their own share: their package, and the id of the run in the tracker."""

    name: str
    keeps_names = False
    takes_back = False
    _identity: RunIdentity | None = None
    _id: str | None = None

    def __post_init__(self) -> None:
        require_package(self.name)

    def state_dict(self) -> dict[str, Any]:
        """The tracker's id of the run; empty before it was opened."""
        return {} if self._identity is None or self._id is None else {"run": self._identity.run_id, "id": self._id}

    def _take_id(self, run: RunIdentity, state: Mapping[str, Any], pattern: str) -> str:
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
