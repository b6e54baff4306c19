"""Trackers (W&B, TensorBoard, MLflow, Comet, Trackio, csv), and their threads, which read the record of a run.

`report_to` attaches those that a configuration names. `feed` reads `lines`, converts them (`projection`), and calls a
tracker in `services/`; `progress` is what the tracker has. `refill` does the same after the run, or with an old log.
"""

from onstep.analysis.logs.run_status import run_record
from onstep.config.trackers import TRACKERS
from onstep.trackers.feed import TrackerFeed
from onstep.trackers.metric_names import tracker_name, tracker_names
from onstep.trackers.refill import can_complete, complete, recorded_options, recorded_run, replay
from onstep.trackers.registry import check_tracker, make_tracker, tracker_class
from onstep.trackers.tracker import CannotContinueError, RunIdentity, Tracker, path_id

__all__ = [
    "TRACKERS",
    "Tracker",
    "RunIdentity",
    "TrackerFeed",
    "CannotContinueError",
    "can_complete",
    "check_tracker",
    "complete",
    "make_tracker",
    "path_id",
    "recorded_options",
    "recorded_run",
    "replay",
    "run_record",
    "tracker_class",
    "tracker_name",
    "tracker_names",
]
