"""What a server persists, and what it knows when it comes back."""

from __future__ import annotations

import dataclasses
import json

import pytest

from onstep.diloco.protocol.coordinator import Coordinator
from onstep.diloco.protocol.messages import Accepted, Dropped, NotYet, Ready
from onstep.errors import ConfigError
from tests.support.diloco.stepped_run import THREE, SteppedRun, joined, weights


def through_json(state: dict[str, object]) -> dict[str, object]:
    read = json.loads(json.dumps(state, allow_nan=False))
    assert read == state
    return dict(read)


def test_the_state_to_persist_with_a_round_is_the_state_once_it_is_committed() -> None:
    run = joined("a", "b", "c")
    for worker in "abc":
        run.submit(worker)
    (closed,) = run.coordinator.take_closed()
    before = run.coordinator.state_dict()
    after = through_json(run.coordinator.state_after(closed, "digest"))
    assert run.coordinator.state_dict() == before
    run.coordinator.committed(closed, "digest", run.now)
    assert run.coordinator.state_dict() == after
    counts = {"joins": 3, "accepted": 3, "commits": 1, "complete_rounds": 1, "contributions": 3, "steps": 30}
    assert after["counts"] == counts


def test_a_round_that_was_not_committed_is_not_counted_as_one() -> None:
    run = joined("a", "b", "c")
    for worker in "abc":
        run.submit(worker)
    run.join("d")  # the roster is saved, and the server killed, while the round is executed
    restarted = SteppedRun(state=through_json(run.coordinator.state_dict()))
    for worker in "abcd":
        restarted.submit(worker)
    restarted.commit()
    counts = restarted.coordinator.counts
    assert (counts["commits"], counts["complete_rounds"]) == (1, 1)


def test_a_server_killed_after_persisting_a_round_knows_what_it_counted() -> None:
    run = joined("a", "b", "c")
    for worker in "abc":
        run.submit(worker)
    (closed,) = run.coordinator.take_closed()
    restarted = SteppedRun(state=through_json(run.coordinator.state_after(closed, "digest")), now=1e6)
    assert restarted.coordinator.versions == (1,)
    assert restarted.submit("a") == Accepted(1, is_repeat=True)
    assert restarted.ask("a", sequence=0) == Ready(0, 1, "full", "fp32", "digest", 3)
    for worker in "abc":
        assert restarted.submit(worker, 1, 1) == Accepted(2)
    assert len(restarted.commit()) == 1


def test_a_server_killed_before_a_commit_says_so_and_counts_what_is_sent_again() -> None:
    run = joined("a", "b", "c")
    run.round(0, "a", "b", "c")
    state = through_json(run.coordinator.state_dict())
    run.submit("a", 1, 1)
    restarted = SteppedRun(state=state)
    assert restarted.ask("a", sequence=1) == NotYet(1, is_pending=False)
    assert restarted.submit("a", 1, 1) == Accepted(2)
    assert restarted.ask("a", sequence=1) == NotYet(1, is_pending=True)


def test_a_dropped_submission_stays_dropped() -> None:
    run = joined("a", "b", "c", settings=dataclasses.replace(THREE, max_staleness=0))
    run.round(0, "a", "b")
    run.wait(THREE.initial_deadline)
    assert run.submit("c") == Dropped("1 versions late, max_staleness is 0", 1, is_anew=True)
    restarted = SteppedRun(THREE, state=through_json(run.coordinator.state_dict()))
    assert restarted.submit("c") == Dropped("dropped before", 1, is_anew=True)
    assert restarted.arrived() == []


def test_the_registered_have_a_heartbeat_timeout_to_come_back() -> None:
    settings = dataclasses.replace(THREE, heartbeat_timeout=60.0)
    run = SteppedRun(settings, now=5.0)
    run.join("a", "b", "c")
    restarted = SteppedRun(settings, state=through_json(run.coordinator.state_dict()), now=1e9)
    restarted.coordinator.tick(restarted.now + 59.0)
    assert restarted.coordinator.status(restarted.now)["num_registered"] == 3
    restarted.coordinator.tick(restarted.now + 60.0)
    assert restarted.coordinator.status(restarted.now)["num_registered"] == 0


def test_a_restarted_server_has_learned_deadlines() -> None:
    run = joined("a", "b", "c")
    for number in range(5):
        run.round(number, "a", "b", "c", seconds=100.0)
    restarted = SteppedRun(state=through_json(run.coordinator.state_dict()), now=7.0)
    restarted.round(5, "a", "b", seconds=100.0)
    (closed,) = restarted.wait(11.0)
    assert weights(closed) == {"a": 10, "b": 10}


def test_the_state_of_another_model_division_or_format_is_refused() -> None:
    state = through_json(SteppedRun().coordinator.state_dict())
    with pytest.raises(ConfigError, match="the saved fingerprint must be other, got 'model'; start the server with"):
        Coordinator(THREE, run_id="run", fingerprint="other", state=state)
    with pytest.raises(ConfigError, match="num_fragments must be 1, as saved, got 2"):
        Coordinator(dataclasses.replace(THREE, num_fragments=2), run_id="run", fingerprint="model", state=state)
    with pytest.raises(ConfigError, match="state_version must be 1, got 99"):
        Coordinator(THREE, run_id="run", fingerprint="model", state={**state, "state_version": 99})


def test_the_run_keeps_its_id() -> None:
    state = through_json(SteppedRun().coordinator.state_dict())
    assert Coordinator(THREE, run_id="new", fingerprint="model", state=state).run_id == "run"


def test_the_status_is_json_and_names_who_is_missing() -> None:
    run = joined("a", "b", "c")
    run.submit_each("a", "b")
    status = through_json(run.coordinator.status(run.now))
    (opened,) = status["rounds"]  # type: ignore[misc]
    assert (opened["arrived"], opened["missing"]) == (["a", "b"], ["c"])
    assert opened["seconds_to_deadline"] == THREE.initial_deadline
