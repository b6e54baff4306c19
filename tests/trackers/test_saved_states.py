"""States of trackers in a checkpoint that others may have written: what does not fit is left out, and named."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any, ClassVar

import pytest

from onstep import Callback, JsonLogger, pretrain
from onstep.callbacks import TrackersCallback
from onstep.config import ConfigContainer
from tests.support.resuming import Interrupted
from tests.support.tracker_files import table

STATES: dict[str, tuple[tuple[str, ...], Any, str]] = {
    "a tracker as list": (("sinks", "csv"), [1], "its csv is [1], which must be a dictionary"),
    "trackers as text": (("sinks",), "csv", "its sinks is 'csv', which must be a dictionary"),
    "a progress as number": (("sinks", "csv", "progress"), 5, "its progress is 5, which must be a dictionary"),
    "a foreign progress": (
        ("sinks", "csv", "progress"),
        {"color": "red"},
        "the progress of a tracker in the checkpoint is ignored",
    ),
    "a step as text": (("step",), "4", "its step is '4' instead of an integer"),
    "a huge step": (("step",), 10**6000, "instead of an integer"),
}


class Foreign(TrackersCallback):
    """Saves another state than its own."""

    state_class: ClassVar[str] = TrackersCallback.state_class
    state_key = "trackers"

    def __init__(self, keys: tuple[str, ...], value: Any) -> None:
        super().__init__(["csv"])
        self.change = (keys, value)

    def state_dict(self) -> dict[str, Any]:
        state = copy.deepcopy(super().state_dict())
        (*outer, last), value = self.change
        place = state
        for key in outer:
            place = place.setdefault(key, {})
        place[last] = value
        return state


class Named(TrackersCallback):
    state_class: ClassVar[str] = TrackersCallback.state_class
    state_key = "trackers"


class Dies(Callback):
    def on_step_end(self, context: Any) -> None:
        if context.trainer_state.global_step == 6:
            raise Interrupted


@pytest.mark.parametrize("name", STATES)
def test_a_foreign_state_is_named_and_the_run_continues(
    name: str, tiny_config: ConfigContainer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys, value, said = STATES[name]
    tiny_config.run.name, tiny_config.run.output_dir, tiny_config.run.save_weights = "run", str(tmp_path), False
    tiny_config.logger.log_interval, tiny_config.checkpoint.save_interval = 1, 4
    with pytest.raises(Interrupted):
        pretrain(tiny_config, callbacks=[JsonLogger(), Foreign(keys, value), Dies()])
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        pretrain(tiny_config, callbacks=[JsonLogger(), Named(["csv"])])
    assert said in caplog.text
    rows = table(tmp_path / "run" / "metrics.csv")
    assert {5, 6, 7, 8} <= {int(step) for step in rows["step"]}


@pytest.mark.parametrize(
    ("identity", "taken"), [("abc-1", True), ("../../x", False), ("a" * 10**6, False), (5, False), ("x\n", False)]
)
def test_only_an_id_that_a_tracker_could_have_made_is_taken_from_a_checkpoint(identity: Any, taken: bool) -> None:
    from onstep.trackers.tracker import RunIdentity, ServiceTracker

    class Service(ServiceTracker):
        name = "service"

        def open(self, state: dict[str, Any]) -> str:
            return self._take_id(RunIdentity("run", "own", Path()), state)

    Service.__post_init__ = lambda self: None  # type: ignore[method-assign]
    assert Service().open({"run": "own", "id": identity}) == (identity if taken else "own")
