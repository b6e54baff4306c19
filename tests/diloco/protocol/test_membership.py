"""Who takes part: registration, sessions, eviction, shares of the data and dynamic local updates."""

from __future__ import annotations

import dataclasses

import pytest

from onstep.diloco.protocol.coordinator import Coordinator
from onstep.diloco.protocol.messages import (
    Accepted,
    Await,
    Beat,
    Deregister,
    Dropped,
    Heartbeat,
    Left,
    ParameterSpec,
    Refused,
    Register,
    Registered,
    Request,
    Settings,
    Submit,
    fingerprint,
    first_difference,
)
from onstep.errors import ConfigError
from tests.support.diloco.stepped_run import THREE, SteppedRun, joined

TWO = dataclasses.replace(THREE, num_workers=2)
OF_A: list[Request] = [Submit("a", "s1", 0, 0, 0, 10, 10), Await("a", "s1", 0, 0), Heartbeat("a", "s1")]


def refusal(run: SteppedRun, request: Request) -> tuple[int, object]:
    reply = run.coordinator.handle(request, run.now)
    assert isinstance(reply, Refused), reply
    return reply.status, reply.details["kind"]


def workers_of(run: SteppedRun) -> dict[str, dict[str, object]]:
    workers = run.coordinator.status(run.now)["workers"]
    assert isinstance(workers, dict)
    return workers


@pytest.mark.parametrize("request_of_a", OF_A, ids=lambda one: type(one).__name__)
def test_who_is_not_registered_gets_404_and_does_not_count(request_of_a: Request) -> None:
    run = SteppedRun()
    assert refusal(run, request_of_a) == (404, "unknown_worker")
    run.join("a")
    run.coordinator.evict("a", run.now)
    assert refusal(run, request_of_a) == (404, "unknown_worker")
    assert run.arrived() == []


def test_an_evicted_worker_comes_back_with_its_submission_and_its_share_of_the_data() -> None:
    run = SteppedRun()
    before = run.join("c", "a", "b")[1]
    run.submit("a")
    run.coordinator.evict("a", run.now)
    (after,) = run.join("a")
    assert (before.slot, after.slot, after.num_slots) == (1, 1, 3)
    assert run.submit("a") == Accepted(1, is_repeat=True)


def test_a_silent_worker_is_evicted_and_any_request_is_a_sign_of_life() -> None:
    run = joined("a", "b", "c", settings=dataclasses.replace(THREE, heartbeat_timeout=60.0))
    run.wait(40.0)
    run.coordinator.handle(Heartbeat("a", "s1"), run.now)
    run.submit("b")
    run.wait(30.0)
    status = run.coordinator.status(run.now)
    assert isinstance(status["workers"], dict)
    assert set(status["workers"]) == {"a", "b"}
    assert run.coordinator.counts["deaths"] == 1
    assert refusal(run, Heartbeat("c", "s1")) == (404, "unknown_worker")


def test_without_a_heartbeat_timeout_nobody_is_evicted() -> None:
    run = joined("a", "b", "c", settings=dataclasses.replace(THREE, heartbeat_timeout=0.0))
    run.wait(1e9)
    run.coordinator.tick(run.now)
    assert run.coordinator.status(run.now)["num_registered"] == 3


def test_a_worker_that_leaves_did_not_die() -> None:
    run = joined("a", "b", "c")
    assert run.coordinator.handle(Deregister("a", "s1"), run.now) == Left()
    assert run.coordinator.handle(Deregister("a", "s1"), run.now) == Left()
    assert run.coordinator.handle(Deregister("nobody", "s1"), run.now) == Left()
    assert (run.coordinator.counts["departures"], run.coordinator.counts["deaths"]) == (1, 0)


@pytest.mark.parametrize("request_of_a", [*OF_A, Register("a", "s1", "model")], ids=lambda one: type(one).__name__)
@pytest.mark.parametrize("how", ["left", "replaced"])
def test_a_session_that_is_over_can_do_nothing_more(request_of_a: Request, how: str) -> None:
    run = joined("a")
    if how == "left":
        run.coordinator.handle(Deregister("a", "s1"), run.now)
    else:
        run.join("a", session="s2")
    assert refusal(run, request_of_a) == (409, "replaced")
    run.join("a", session="s2")
    run.join("a", session="s3")
    assert refusal(run, request_of_a) == (409, "replaced")


def test_what_a_replaced_session_submitted_counts_once_and_its_successor_continues_behind_it() -> None:
    run = joined("a", "b", "c")
    run.submit("a", steps=7)
    (again,) = run.join("a", session="s2")
    assert (again.next_sequences, again.slot_steps) == ((1,), 7)
    assert run.submit("a", 0, session="s2") == Accepted(1, is_repeat=True)
    run.submit("a", 1, session="s2")
    run.submit_each("b", "c")
    (closed,) = run.commit()
    assert [one.submit.sequence for one in closed.contributions] == [0, 1, 0, 0]
    assert closed.contributors == ("a", "b", "c")


def test_two_submissions_of_one_worker_are_one_contributor() -> None:
    run = joined("a", "b", "c", settings=dataclasses.replace(THREE, initial_deadline=1.0))
    run.submit("a")
    run.join("a", session="s2")
    run.submit("a", 1, session="s2")
    assert run.wait(1e6) == []


def test_the_share_of_one_who_is_gone_is_given_to_a_newcomer_from_where_it_ended() -> None:
    run = joined("a", "b", "c")
    run.submit("b", steps=40)
    run.coordinator.handle(Deregister("b", "s1"), run.now)
    (newcomer,) = run.join("d")
    assert (newcomer.slot, newcomer.slot_steps) == (1, 40)
    (back,) = run.join("b", session="s2")
    assert not back.has_share  # all three are taken
    run.coordinator.handle(Deregister("c", "s1"), run.now)
    run.coordinator.handle(Deregister("b", "s2"), run.now)
    (back,) = run.join("b", session="s3")
    assert (back.slot, back.has_share) == (2, True)


def test_a_newcomer_gets_the_share_of_one_who_left_before_that_of_one_who_may_come_back() -> None:
    run = joined("a", "b", "c")
    run.coordinator.evict("a", run.now)
    run.coordinator.handle(Deregister("c", "s1"), run.now)
    assert run.join("d")[0].slot == 2
    assert run.join("a")[0].slot == 0
    slots = [one["slot"] for one in workers_of(run).values()]
    assert sorted(slots) == [0, 1, 2]


def test_an_evicted_session_keeps_its_share_unless_it_was_given_away() -> None:
    run = joined("a", "b", "c")
    run.coordinator.evict("a", run.now)
    (back,) = run.join("a")
    assert back.slot == 0
    run.coordinator.evict("a", run.now)
    assert run.join("d")[0].slot == 0  # no other is free
    run.coordinator.handle(Deregister("c", "s1"), run.now)
    (back,) = run.join("a")
    assert (back.slot, back.slot_steps) == (2, 0)
    assert isinstance(run.submit("a", steps=7), Dropped)  # of samples that d has
    run.submit("a", 1, steps=7)
    (again,) = run.join("a", session="s2")
    assert (again.slot, again.slot_steps) == (2, 7)


def test_a_process_that_replaces_an_evicted_one_gets_another_share_if_its_own_was_given_away() -> None:
    run = joined("a", "b", "c")
    run.submit("c", steps=4)
    run.coordinator.evict("a", run.now)
    assert run.join("d")[0].slot == 0
    run.coordinator.handle(Deregister("c", "s1"), run.now)
    (other,) = run.join("a", session="s2")
    assert (other.slot, other.slot_steps) == (2, 4)
    run.submit("a", session="s2", steps=6)
    run.coordinator.evict("a", run.now)
    assert run.join("e")[0].slot_steps == 10


def test_the_status_has_the_step_of_who_has_not_sent_a_heartbeat() -> None:
    run = joined("a", "b")
    run.submit("a", steps=7)
    run.submit("a", steps=7)
    assert workers_of(run)["a"]["step"] == 7
    run.coordinator.handle(Heartbeat("a", "s1", step=12), run.now)
    run.submit("a", 1, steps=7)
    assert workers_of(run)["a"]["step"] == 14
    run.coordinator.handle(Register("b", "s1", "model", step=30), run.now)
    assert workers_of(run)["b"]["step"] == 30


def test_a_worker_that_starts_from_an_older_state_is_shown_at_its_own_step() -> None:
    run = joined("a")
    run.submit("a", steps=40)
    for offer in (0, 1):
        run.coordinator.handle(Register("a", "s2", "model", step=30, offer=offer), run.now)
    run.submit("a", 1, session="s2", steps=5)
    assert workers_of(run)["a"]["step"] == 35


def test_steps_are_noted_once_however_often_a_submission_and_the_server_come_back() -> None:
    run = joined("a", "b", "c")
    run.submit("a", steps=7)
    state = run.coordinator.state_dict()
    restarted = SteppedRun(state=state)
    assert restarted.submit("a", steps=7) == Accepted(1)
    (again,) = restarted.join("a", session="s2")
    assert (again.slot_steps, again.next_sequences) == (7, (1,))


def test_a_worker_restored_to_before_a_submission_that_the_server_lost_repeats_it() -> None:
    run = joined("a", "b")
    run.submit("a", steps=7)
    restarted = SteppedRun(state=run.coordinator.state_dict())
    (again,) = restarted.join("a", session="s2", resumes_at=0)
    assert (again.slot_steps, again.next_sequences) == (0, (0,))
    assert restarted.submit("a", session="s2", steps=9) == Accepted(1)
    assert restarted.join("a", session="s3", resumes_at=0)[0].next_sequences == (1,)
    (last,) = restarted.join("a", session="s4", resumes_at=1)
    assert (last.slot_steps, last.next_sequences) == (9, (1,))


def test_it_repeats_it_also_after_one_that_never_settled() -> None:
    """The first submission died with the server, and its worker began anew, without a checkpoint."""
    run = joined("a", "b")
    run.submit("a", steps=7)
    run = SteppedRun(state=run.coordinator.state_dict())
    assert run.join("a", session="s2")[0].next_sequences == (1,)
    run.submit("a", 1, session="s2", steps=5)
    run = SteppedRun(state=run.coordinator.state_dict())
    (again,) = run.join("a", session="s3", resumes_at=1)
    assert (again.slot_steps, again.next_sequences) == (7, (1,))


def test_the_steps_of_a_lost_submission_are_those_of_the_share_that_they_were_noted_for() -> None:
    run = joined("a", "b", settings=TWO)
    run.round(0, "a", "b")
    run.submit("a", 1, 1, steps=7)
    run.coordinator.evict("a", run.now)
    (other,) = run.join("c")
    assert (other.slot, other.slot_steps) == (0, 17)
    run.coordinator.handle(Deregister("b", "s1"), run.now)
    assert run.join("a")[0].slot == 1
    run = SteppedRun(TWO, run.coordinator.state_dict())
    (again,) = run.join("a", session="s2", resumes_at=1)
    assert (again.slot, again.slot_steps) == (1, 10)
    (other,) = run.join("c", session="s2")
    assert (other.slot, other.slot_steps) == (0, 17)  # c may train on what follows


def test_data_that_another_worker_has_used_since_a_lost_submission_stays_used() -> None:
    run = joined("a", "b", settings=TWO)
    run.submit("a", steps=7)
    run.coordinator.evict("a", run.now)
    assert run.join("c")[0].slot_steps == 7
    run = SteppedRun(TWO, run.coordinator.state_dict())
    run.submit("c", steps=10)
    run.join("a", session="s2", resumes_at=0)
    (other,) = run.join("c", session="s2")
    assert (other.slot, other.slot_steps) == (0, 17)


def test_the_steps_of_a_lost_submission_are_taken_from_the_worker_once() -> None:
    run = joined("a", "b", settings=TWO)
    run.round(0, "a", "b")
    run.submit("a", 1, 1, steps=7)
    run = SteppedRun(TWO, run.coordinator.state_dict())
    for offer in (0, 1):
        run.coordinator.handle(Register("a", "s2", "model", step=10, offer=offer, resumes_at=1), run.now)
    run.submit("a", 1, 1, session="s2", steps=9)
    assert workers_of(run)["a"]["step"] == 19


def test_steps_are_noted_once_for_all_fragments() -> None:
    run = joined("a", settings=dataclasses.replace(THREE, num_fragments=2))
    run.submit("a", fragment=1, steps=4)
    run.submit("a", fragment=0, steps=7)
    (again,) = run.join("a", session="s2")
    assert again.slot_steps == 7


@pytest.mark.parametrize("is_used_since", [False, True])
def test_steps_that_were_held_back_are_noted_once_when_they_come_again(is_used_since: bool) -> None:
    run = joined("a", "b", "c")
    run.submit_each("a", "b")
    run.submit("c", steps=7)
    (closed,) = run.coordinator.take_closed()
    if is_used_since:  # by another worker, which was given the share
        run.coordinator.evict("c", run.now)
        assert run.join("d")[0].slot_steps == 7
    left = run.coordinator.hold_back(closed, {2: "far"})
    run.coordinator.committed(left, "digest", run.now)
    assert run.join("c", "d")[is_used_since].slot_steps == (7 if is_used_since else 0)
    if not is_used_since:
        assert run.submit("c", 1, 0, steps=17) == Accepted(2)
        assert run.join("c")[0].slot_steps == 17
        run.coordinator.handle(Heartbeat("c", "s1", 0.0, 19), run.now)
        assert run.coordinator.open_steps("c") == 2


def test_a_run_that_an_older_version_has_saved_has_its_workers_register_again() -> None:
    state = joined("a").coordinator.state_dict() | {"protocol_version": 1}
    run = SteppedRun(state=state)
    assert refusal(run, Await("a", "s1", 0, 0)) == (404, "unknown_worker")
    assert refusal(run, Register("a", "s1", "model", protocol_version=1)) == (422, "protocol")


def test_a_registration_with_another_model_protocol_or_division_is_refused() -> None:
    run = SteppedRun()
    assert refusal(run, Register("a", "s1", "other")) == (422, "fingerprint")
    assert refusal(run, Register("a", "s1", "model", protocol_version=99)) == (422, "protocol")
    assert refusal(run, Register("a", "s1", "model", num_fragments=2)) == (422, "settings")
    assert run.coordinator.status(run.now)["num_registered"] == 0


def test_the_first_differing_parameter_is_named() -> None:
    ours = [ParameterSpec("b", (2, 3), "F32"), ParameterSpec("a", (1,), "F32")]
    assert first_difference(ours, list(reversed(ours))) is None
    assert fingerprint(ours) == fingerprint(list(reversed(ours)))
    bfloat16 = [dataclasses.replace(one, dtype="BF16") for one in ours]
    assert first_difference(ours, bfloat16) is None
    assert fingerprint(ours) == fingerprint(bfloat16)
    theirs = [ParameterSpec("a", (1,), "F32"), ParameterSpec("b", (3, 2), "F32"), ParameterSpec("c", (), "F32")]
    assert first_difference(ours, theirs) == "b: F32[2, 3] at the server, F32[3, 2] at the worker"
    assert fingerprint(ours) != fingerprint(theirs)
    assert first_difference(ours, theirs[:1]) == "b: F32[2, 3] at the server, missing at the worker"


def test_slower_workers_are_recommended_fewer_steps() -> None:
    run = joined("a", "b", "c", settings=dataclasses.replace(THREE, dylu=True, sync_every=100))

    def recommended(worker: str, speed: float) -> int | None:
        reply = run.coordinator.handle(Heartbeat(worker, "s1", speed), run.now)
        assert isinstance(reply, Beat)
        return reply.recommended_sync_every

    assert recommended("a", 0.0) is None
    assert recommended("a", 10.0) == 100
    assert recommended("b", 2.55) == 25
    assert recommended("c", 0.001) == 1
    assert recommended("a", 5.1) == 100
    assert recommended("b", 2.55) == 50
    run.coordinator.evict("a", run.now)
    assert recommended("b", 2.55) == 100


def test_who_has_left_is_not_the_fastest_any_more() -> None:
    run = joined("a", "b", settings=dataclasses.replace(THREE, dylu=True, sync_every=100))
    run.coordinator.handle(Heartbeat("a", "s1", 10.0), run.now)
    run.coordinator.evict("a", run.now)
    assert run.coordinator.handle(Heartbeat("b", "s1", 2.0), run.now) == Beat((0,), 1, 100)


def test_only_the_newest_offer_to_a_session_can_be_accepted() -> None:
    run = joined("a")
    offers = [run.coordinator.handle(Register("a", "dead", "model", offer=number), run.now) for number in (0, 0, 1)]
    assert [reply.offer for reply in offers if isinstance(reply, Registered)] == [1, 2, 3]
    assert isinstance(run.coordinator.handle(Heartbeat("a", "s1"), run.now), Beat)


def test_without_dylu_nothing_is_recommended() -> None:
    run = joined("a")
    assert run.coordinator.handle(Heartbeat("a", "s1", 3.0), 0.0) == Beat((0,), 1, None)


def test_the_expected_number_can_change() -> None:
    run = joined("a", "b")
    run.submit_each("a", "b")
    with pytest.raises(ConfigError, match=r"min_workers must be at most num_workers \(1\), got 2"):
        run.coordinator.set_num_workers(1, run.now)
    run.coordinator.set_num_workers(2, run.now)
    assert len(run.commit()) == 1


def test_the_roster_revision_changes_with_members_and_not_with_rounds() -> None:
    run = SteppedRun()
    seen = [run.coordinator.revision]
    run.join("a", "b", "c")
    seen.append(run.coordinator.revision)
    run.join("a")
    run.round(0, "a", "b", "c")
    assert run.coordinator.revision == seen[-1]
    run.join("a", session="s2")
    seen.append(run.coordinator.revision)
    run.coordinator.evict("b", run.now)
    seen.append(run.coordinator.revision)
    assert len(set(seen)) == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_workers": 0}, "num_workers must be an integer >= 1, got 0"),
        ({"min_workers": 4}, r"min_workers must be at most num_workers \(3\), got 4"),
        ({"num_fragments": 11}, r"num_fragments must be at most sync_every \(10\), got 11, or some"),
        ({"mode": "other"}, 'mode must be "sync" or "async", got \'other\''),
        ({"patience": 0.5}, "patience must be finite and >= 1, got 0.5"),
        ({"blend": 1.5}, "blend must be from 0 to 1, got 1.5"),
        ({"heartbeat_timeout": float("nan")}, "heartbeat_timeout must be finite and >= 0, got nan"),
    ],
)
def test_settings_out_of_range_are_refused(changes: dict[str, object], message: str) -> None:
    settings = dataclasses.replace(THREE, **changes)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=message):
        Coordinator(settings, run_id="run", fingerprint="model")


def test_the_default_quorum_is_more_than_half() -> None:
    assert [Settings.with_quorum(num_workers).min_workers for num_workers in range(1, 6)] == [1, 2, 2, 3, 3]
    assert isinstance(SteppedRun(Settings()).join("a")[0], Registered)
