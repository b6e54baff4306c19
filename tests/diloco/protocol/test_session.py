"""A worker's side: what it sends, sends again, waits for and gives up, against a real coordinator."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from onstep.diloco.protocol.messages import (
    Await,
    Beat,
    Deregister,
    Dropped,
    Heartbeat,
    Ready,
    Refused,
    Register,
    Registered,
    Request,
    Submit,
)
from onstep.diloco.protocol.operations import (
    Answer,
    Delivery,
    Lost,
    Outcome,
    RefusedByServerError,
    Send,
    ServerLostError,
)
from onstep.diloco.protocol.session import WorkerSession
from tests.support.diloco.stepped_run import THREE, SteppedRun

Fault = Callable[[Request], Outcome]


class Driver:
    """Performs what a session yields, with a coordinator at once; a test may answer instead."""

    def __init__(self, run: SteppedRun) -> None:
        self.run = run
        self.sent: list[Request] = []
        self.pauses: list[float] = []
        self.faults: Iterator[Fault | None] = iter(())
        self.between: Callable[[], object] = lambda: None

    def session(self, session: str = "s1", **options: Any) -> WorkerSession:
        return WorkerSession("a", session, "model", clock=lambda: self.run.now, **options)

    def __call__(self, operation: Any) -> Any:
        outcome: Outcome = None
        try:
            while True:
                outcome = self.perform(operation.send(outcome))
        except StopIteration as done:
            return done.value

    def perform(self, effect: object) -> Outcome:
        if not isinstance(effect, Send):
            self.pauses.append(effect.seconds)  # type: ignore[attr-defined]
            self.run.wait(self.pauses[-1])
            return None
        self.sent.append(effect.request)
        fault = next(self.faults, None)
        if fault is not None:
            return fault(effect.request)
        reply = self.run.coordinator.handle(effect.request, self.run.now)
        self.run.commit()
        if isinstance(effect.request, Await) and not isinstance(reply, Ready):
            self.between()
            self.run.wait(effect.request.wait)
            reply = self.run.coordinator.handle(effect.request, self.run.now)
        return Answer(reply, f"body of {type(reply).__name__}")


def lost(request: Request) -> Outcome:
    return Lost("connection refused")


def refused(status: int, kind: str = "") -> Fault:
    return lambda request: Answer(Refused(status, f"error {status}", {"kind": kind}))


def joined(run: SteppedRun | None = None, **options: Any) -> tuple[Driver, WorkerSession]:
    driver = Driver(run or SteppedRun(replace(THREE, num_workers=2, min_workers=1)))
    session = driver.session(**options)
    driver(session.join(10.0))
    return driver, session


def not_in_time(reason: str | None = None) -> Any:
    return pytest.raises(ServerLostError, match=reason)


def kinds(driver: Driver) -> list[type]:
    return [type(one) for one in driver.sent]


def begin(session: WorkerSession, base: int = 0) -> Submit:
    return session.begin(0, base_version=base, tokens=10, steps=10, body="tensors")


def test_a_submission_is_sent_once_and_its_version_comes_back() -> None:
    driver, session = joined()
    driver.run.join("b")
    driver.run.submit("b")
    begin(session)
    found = driver(session.result(0, 10.0))
    assert (found.ready.version, found.body) == (1, "body of Ready")
    assert kinds(driver) == [Register, Submit, Await]
    assert session.pending(0) is None
    assert begin(session, 1).sequence == 1


def test_the_next_submission_waits_for_the_one_before() -> None:
    _, session = joined()
    begin(session)
    with pytest.raises(ValueError, match="the previous submission of fragment 0 is still pending"):
        begin(session)


def test_a_submission_whose_answer_was_lost_is_sent_again_and_counts_once() -> None:
    driver, session = joined()
    driver.run.join("b")
    driver.run.submit("b")

    def answer_lost(request: Request) -> Outcome:
        driver.run.coordinator.handle(request, driver.run.now)
        return Lost("timed out")

    driver.faults = iter([answer_lost])
    begin(session)
    assert isinstance(driver(session.result(0, 10.0)), Delivery)
    assert kinds(driver) == [Register, Submit, Submit, Await]
    assert driver.run.coordinator.counts["contributions"] == 2
    assert driver.run.coordinator.counts["repeats"] == 1


def test_pauses_double_up_to_a_limit_and_end_at_the_bound() -> None:
    driver, session = joined()
    driver.faults = iter([lost] * 100)
    begin(session)
    started = driver.run.now
    with not_in_time("connection refused"):
        driver(session.result(0, 120.0))
    assert driver.run.now == started + 120.0
    assert 7 <= len(driver.pauses) <= 20
    longest = [0.25, 0.5, 1, 2, 4, 8, 15, 15]
    assert all(limit / 2 <= pause <= limit for pause, limit in zip(driver.pauses, longest, strict=False))


def test_without_a_bound_it_is_asked_once() -> None:
    driver, session = joined()
    begin(session)
    driver.faults = iter([lost])
    for expected in ([Submit], [Submit, Submit, Await], [Submit, Submit, Await, Await]):
        with not_in_time():
            driver(session.result(0, 0.0))
        assert (kinds(driver), driver.pauses) == ([Register, *expected], [])


def test_a_round_that_lasts_longer_than_the_bound_has_its_result_later() -> None:
    driver, session = joined()
    driver.run.join("b")
    begin(session)
    with not_in_time("the round is not committed yet"):
        driver(session.result(0, 30.0))
    pending = session.pending(0)
    assert pending is not None
    assert pending.sequence == 0
    driver.run.submit("b")
    driver.run.commit()
    assert isinstance(driver(session.result(0, 30.0)), Delivery)
    assert kinds(driver).count(Submit) == 1


def test_a_worker_that_waits_says_for_what_by_the_last_answer_and_for_the_server_without_one() -> None:
    driver, session = joined()
    driver.run.join("b")
    begin(session)
    with not_in_time():
        driver(session.result(0, 30.0))
    assert session.awaits == "version 1"
    again = session.result(0, 30.0)
    again.send(None)
    assert session.awaits == "the server's answer"
    driver.faults = iter([None, *[lost] * 100])
    with not_in_time("connection refused"):
        driver(session.result(0, 30.0))
    assert session.awaits == "the server's answer"


def test_a_submission_that_the_server_lost_is_sent_again() -> None:
    driver, session = joined()
    driver.run.join("b")
    state = driver.run.coordinator.state_dict()
    begin(session)
    with not_in_time():
        driver(session.result(0, 0.0))
    driver.run = SteppedRun(driver.run.coordinator.settings, state=state, now=driver.run.now)
    driver.run.submit("b")
    assert isinstance(driver(session.result(0, 30.0)), Delivery)
    assert kinds(driver) == [Register, Submit, Await, Await, Submit, Await]


def test_an_evicted_worker_registers_again_and_keeps_its_submission() -> None:
    driver, session = joined()
    driver.run.join("b")
    driver.run.submit("b")
    driver.run.coordinator.evict("a", 0.0)
    submit = begin(session)
    assert isinstance(driver(session.result(0, 30.0)), Dropped | Delivery)
    assert kinds(driver)[:4] == [Register, Submit, Register, Submit]
    assert driver.sent[1] == driver.sent[3] == submit
    assert session.num_rejoins == 1


def test_a_dropped_submission_is_over() -> None:
    driver, session = joined(SteppedRun(replace(THREE, max_staleness=0)))
    driver.run.join("b", "c")
    driver.run.round(0, "b", "c")
    driver.run.wait(THREE.initial_deadline)
    begin(session)
    assert driver(session.result(0, 10.0)) == Dropped("1 versions late, max_staleness is 0", 1, is_anew=True)
    assert session.pending(0) is None


def test_a_submission_can_be_committed_while_there_is_a_quorum_or_once_it_is_committed() -> None:
    driver, session = joined(SteppedRun(replace(THREE, num_workers=2, min_workers=2)))
    driver.run.join("b")
    begin(session)
    with not_in_time():
        driver(session.result(0, 0.0))
    assert session.can_commit(0, Beat(versions=(0,), num_registered=2))
    assert not session.can_commit(0, Beat(versions=(0,), num_registered=1))
    assert session.can_commit(0, Beat(versions=(1,), num_registered=1))
    driver.run.submit("b")
    assert isinstance(driver(session.result(0, 10.0)), Delivery)
    assert session.can_commit(0, Beat(versions=(1,), num_registered=1))


def test_a_withdrawn_submission_is_over_and_its_number_is_not_used_again() -> None:
    driver, session = joined()
    begin(session)
    driver.faults = iter([refused(422)])
    with pytest.raises(RefusedByServerError) as ended:
        driver(session.result(0, 10.0))
    assert ended.value.status == 422
    session.withdraw(0)
    assert begin(session).sequence == 1


@pytest.mark.parametrize("status", [400, 401, 409, 413, 422])
def test_a_refusal_ends_the_session(status: int) -> None:
    driver, session = joined()
    begin(session)
    driver.faults = iter([refused(status)])
    with pytest.raises(RefusedByServerError, match=f"error {status}"):
        driver(session.result(0, 10.0))


def test_a_server_that_is_busy_is_asked_again() -> None:
    driver, session = joined()
    driver.faults = iter([refused(503), refused(503)])
    assert isinstance(driver(session.beat(1.5, 10.0)), Beat)
    assert kinds(driver) == [Register, Heartbeat, Heartbeat, Heartbeat]


def test_a_heartbeat_of_an_evicted_worker_registers_it_again() -> None:
    driver, session = joined()
    driver.run.coordinator.evict("a", 0.0)
    assert isinstance(driver(session.beat(1.5, 10.0)), Beat)
    assert kinds(driver) == [Register, Heartbeat, Register, Heartbeat]
    driver.faults = iter([lost] * 100)
    with not_in_time("connection refused"):
        driver(session.beat(1.5, 3.0))


def test_another_run_at_the_same_address_ends_the_session() -> None:
    driver, session = joined()
    driver.run = SteppedRun(driver.run.coordinator.settings)
    driver.run.coordinator.run_id = "another"
    with pytest.raises(RefusedByServerError, match="it has another run, another, than this worker, run"):
        driver(session.beat(1.5, 3.0))


def test_joining_waits_for_a_server_and_gives_up_at_the_bound() -> None:
    driver = Driver(SteppedRun())
    driver.faults = iter([lost] * 3)
    assert isinstance(driver(driver.session().join(60.0)), Registered)
    assert len(driver.sent) == 4
    driver.faults = iter([lost] * 100)
    with not_in_time("connection refused"):
        driver(driver.session().join(5.0))


def test_a_new_session_replaces_the_old_one_in_two_steps() -> None:
    driver, old = joined()
    new = driver.session(session="s2")
    assert isinstance(driver(new.join(10.0)), Registered)
    assert [one.offer for one in driver.sent if isinstance(one, Register)] == [0, 0, 1]
    with pytest.raises(RefusedByServerError, match="was replaced by a newer one"):
        driver(old.beat(0.0, 10.0))
    with pytest.raises(RefusedByServerError, match="was replaced by a newer one"):
        driver(old.join(10.0))


def test_a_delayed_registration_of_a_dead_session_changes_nothing() -> None:
    driver, session = joined()
    reply = driver.run.coordinator.handle(Register("a", "dead", "model"), 0.0)
    assert isinstance(reply, Registered)
    assert reply.offer
    assert isinstance(driver(session.beat(0.0, 10.0)), Beat)
    driver.run.coordinator.handle(Register("a", "other", "model"), 0.0)
    stale = driver.run.coordinator.handle(Register("a", "dead", "model", offer=reply.offer), 0.0)
    assert isinstance(stale, Registered)
    assert stale.offer > reply.offer
    assert isinstance(driver(session.beat(0.0, 10.0)), Beat)


def test_the_newest_parameters_are_fetched() -> None:
    driver, session = joined()
    fetched = driver(session.fetch(0, 10.0))
    assert (fetched.ready.version, fetched.body) == (0, "body of Ready")
    driver.faults = iter([lost] * 100)
    with not_in_time("connection refused"):
        driver(session.fetch(0, 10.0))


def test_without_any_answer_an_operation_ends_before_its_bound() -> None:
    driver, session = joined(lost_seconds=6.0)
    started = driver.run.now
    driver.faults = iter([lost] * 3 + [refused(503)] + [lost] * 100)
    with not_in_time("connection refused"):
        driver(session.fetch(0, 600.0))
    assert 6.0 < driver.run.now - started < 12.0  # the refusal was an answer


def test_leaving_tries_once() -> None:
    driver, session = joined()
    driver.faults = iter([lost])
    assert driver(session.leave()) is False
    assert driver(session.leave()) is True
    assert kinds(driver) == [Register, Deregister, Deregister]
    assert driver.run.coordinator.counts["departures"] == 1


def saved(session: WorkerSession) -> dict[str, object]:
    return dict(json.loads(json.dumps(session.state_dict())))


def test_a_state_can_be_saved_while_other_threads_end_submissions() -> None:
    _, session = joined()
    begin(session)
    is_over, before = threading.Event(), sys.getswitchinterval()

    def end_others() -> None:
        while not is_over.is_set():
            for fragment in range(1, 4):
                session.begin(fragment, base_version=0, tokens=1, steps=1)
            for fragment in range(1, 4):
                del session._pending[fragment]  # what `result` does in the end

    thread = threading.Thread(target=end_others)
    sys.setswitchinterval(1e-6)
    try:
        thread.start()
        assert all(session.state_dict()["pending"] for _ in range(10_000))
    finally:
        is_over.set()
        thread.join()
        sys.setswitchinterval(before)


def restarted(driver: Driver, state: dict[str, object], name: str = "s2") -> WorkerSession:
    session = driver.session(session=name)
    session.load_state_dict(state)
    assert isinstance(driver(session.join(10.0)), Registered)
    return session


@pytest.mark.parametrize("is_committed", [True, False])
def test_progress_that_the_server_has_since_the_checkpoint_is_superseded(is_committed: bool) -> None:
    driver, session = joined()
    driver.run.join("b")
    state = saved(session)
    begin(session)
    with not_in_time():
        driver(session.result(0, 0.0))
    if is_committed:
        driver.run.submit("b")
        driver.run.commit()
    again = restarted(driver, state)
    assert again.superseded == {0}
    assert begin(again, 0).sequence == 1


def test_a_checkpoint_that_the_server_knows_nothing_newer_of_is_not_superseded() -> None:
    driver, session = joined()
    assert restarted(driver, saved(session)).superseded == frozenset()


def test_what_was_pending_at_the_checkpoint_is_submitted_again_unless_it_counted() -> None:
    driver, session = joined()
    begin(session)
    state = saved(session)
    assert state["pending"] == [0]
    again = restarted(driver, state)
    assert (again.superseded, again.pending(0)) == (frozenset(), None)
    assert begin(again).sequence == 0
    with not_in_time():
        driver(again.result(0, 0.0))
    assert restarted(driver, state, "s3").superseded == {0}


def test_progress_is_kept_where_the_server_has_lost_the_submission_that_followed() -> None:
    driver, session = joined()
    driver.run.join("b")
    state = saved(session)
    begin(session)
    with not_in_time():
        driver(session.result(0, 0.0))
    driver.run = SteppedRun(driver.run.coordinator.settings, state=driver.run.coordinator.state_dict())
    again = restarted(driver, state)
    assert again.superseded == frozenset()
    assert begin(again).sequence == 0
    driver.run.submit("b")
    assert isinstance(driver(again.result(0, 30.0)), Delivery)


def test_a_new_worker_of_a_known_id_without_a_checkpoint_continues_the_numbers() -> None:
    driver, session = joined()
    begin(session)
    with not_in_time():
        driver(session.result(0, 0.0))
    fresh = driver.session(session="s2")
    driver(fresh.join(10.0))
    assert fresh.superseded == frozenset()
    assert begin(fresh).sequence == 1
