"""What a job shows: status, newest metrics, and events."""

from __future__ import annotations

import threading

import pytest

from onstep.control.feed import Feed


def test_the_status_is_merged_and_a_copy_is_returned() -> None:
    feed = Feed()
    feed.update(status="running", global_step=1)
    feed.update(global_step=2)
    copy = feed.status
    copy["status"] = "changed"
    assert feed.status == {"status": "running", "global_step": 2}


def test_a_record_is_an_event_a_point_and_the_newest_metrics() -> None:
    feed = Feed()
    feed.add_record({"step": 5, "epoch": 0.5, "timestamp": 7.0, "loss": 2.0})
    feed.add_record({"global_step": 5, "timestamp": 8.0, "eval_loss": 3.0})
    assert [(one.id, one.kind, one.timestamp) for one in feed.events_after(0)] == [
        (1, "metrics", 7.0),
        (2, "evaluation", 8.0),
    ]
    assert feed.latest == {
        "step": 5,
        "global_step": 5,
        "epoch": 0.5,
        "timestamp": 8.0,
        "loss": 2.0,
        "eval_loss": 3.0,
    }
    assert feed.history.names() == ["loss", "eval_loss"]
    assert feed.history.series(["loss"])["loss"] == {"step": [5], "value": [2.0], "time": [7.0]}


def test_a_record_without_step_or_time_is_an_event_all_the_same() -> None:
    feed = Feed()
    feed.add_record({"loss": 1.0, "timestamp": "yesterday"})
    assert [one.kind for one in feed.events_after(0)] == ["metrics"]
    assert feed.history.names() == []


def test_events_are_found_by_id_and_kind_oldest_first() -> None:
    feed = Feed()
    for number in range(10):
        feed.add_event("save" if number % 2 else "decision", {"number": number})
    assert [one.id for one in feed.events_after(3, limit=4)] == [4, 5, 6, 7]
    assert [one.data["number"] for one in feed.events_after(0, {"save"})] == [1, 3, 5, 7, 9]
    assert feed.events_after(10) == []
    assert feed.last_id == 10


def test_many_metrics_do_not_push_rare_events_out() -> None:
    feed = Feed()
    feed.add_event("save", {"step": 1})
    for step in range(5_000):
        feed.add_record({"step": step, "loss": 1.0})
    assert len(feed.events_after(0, limit=10_000)) == 2_001
    assert [one.id for one in feed.events_after(0, {"save"})] == [1]


def test_nothing_follows_the_end() -> None:
    feed = Feed()
    feed.add_event("end", {"reason": "completed"})
    feed.add_record({"step": 1, "loss": 1.0})
    assert feed.is_ended
    assert [one.kind for one in feed.events_after(0)] == ["end"]


def test_an_unknown_kind_is_our_bug() -> None:
    with pytest.raises(AssertionError, match="'metric' is not one of"):
        Feed().add_event("metric", {})


def test_readers_get_every_event_once_and_in_order_while_others_write() -> None:
    feed, seen = Feed(), []

    def read() -> None:
        while not seen or seen[-1].kind != "end":
            seen.extend(feed.events_after(seen[-1].id if seen else 0))

    reader = threading.Thread(target=read)
    reader.start()
    writers = [
        threading.Thread(target=lambda kind=kind: [feed.add_event(kind, {}) for _ in range(900)])
        for kind in ("save", "sample")
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    feed.add_event("end", {})
    reader.join()
    assert [one.id for one in seen] == list(range(1, 1802))


def test_after_a_rollback_the_newest_values_are_those_that_remain() -> None:
    feed = Feed()
    kept = [{"step": 1, "loss": 3.0, "grad_norm": 1.0}, {"step": 2, "loss": 2.0}]
    for record in (*kept, {"step": 3, "loss": 1.0, "eval_loss": 0.5}):
        feed.add_record(record)
    feed.go_back(kept)
    assert feed.latest == {"step": 2, "loss": 2.0, "grad_norm": 1.0}
