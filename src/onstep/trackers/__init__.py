"""Trackers (W&B, TensorBoard, MLflow, Comet, Trackio, csv), and the queue that isolates training from their faults.

`report_to` attaches those that a configuration names, `trackers_callback` puts each record into their queues
(`tracker_queue`), whose threads call the trackers in `services/`; `refill` replays a metrics log.
"""

from onstep.analysis.logs.run_status import run_record
from onstep.config.trackers import TRACKERS
from onstep.trackers.metric_names import tracker_name, tracker_names
from onstep.trackers.points import RecentPoints, RunPoints, numbers_of, plain_point, points_for
from onstep.trackers.refill import path_id, recorded_run, replay
from onstep.trackers.registry import check_tracker, make_tracker, tracker_class
from onstep.trackers.tracker import Point, RunIdentity, Tracker
from onstep.trackers.tracker_queue import TrackerQueue

__all__ = [
    "TRACKERS",
    "Tracker",
    "Point",
    "RecentPoints",
    "RunIdentity",
    "RunPoints",
    "TrackerQueue",
    "check_tracker",
    "make_tracker",
    "numbers_of",
    "path_id",
    "plain_point",
    "points_for",
    "recorded_run",
    "replay",
    "run_record",
    "tracker_class",
    "tracker_name",
    "tracker_names",
]
