"""Trackers: what they offer, the queue that keeps their faults away from the training, one file a tracker."""

from onstep.analysis.logs.run_status import run_record
from onstep.trackers.metric_names import SINKS, check_sink, make_sink, tracker_name, tracker_names
from onstep.trackers.points import RecentPoints, RunPoints, numbers_of, plain_point, points_for
from onstep.trackers.replay import path_id, recorded_run, replay
from onstep.trackers.tracker import MetricSink, Point, RunIdentity
from onstep.trackers.tracker_queue import SinkQueue

__all__ = [
    "SINKS",
    "MetricSink",
    "Point",
    "RecentPoints",
    "RunIdentity",
    "RunPoints",
    "SinkQueue",
    "check_sink",
    "make_sink",
    "numbers_of",
    "path_id",
    "plain_point",
    "points_for",
    "recorded_run",
    "replay",
    "run_record",
    "tracker_name",
    "tracker_names",
]
