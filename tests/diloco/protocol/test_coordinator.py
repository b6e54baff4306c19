"""What counts in a round, once, and when its version is there."""

from __future__ import annotations

import dataclasses

import pytest

from onstep.diloco.protocol.messages import Accepted, Await, Dropped, NotYet, Ready, Refused, Settings, Submit
from tests.support.diloco.stepped_run import THREE, SteppedRun, joined, weights


def test_a_round_closes_when_all_have_submitted_with_weights_by_tokens() -> None:
    run = joined("a", "b", "c")
    assert run.submit("a", tokens=10) == Accepted(1)
    assert run.submit("b", tokens=20) == Accepted(1)
    assert run.commit() == []
    assert run.submit("c", tokens=30) == Accepted(1)
    (closed,) = run.commit()
    assert (closed.fragment, closed.version, closed.is_complete) == (0, 1, True)
    assert weights(closed) == {"a": 10, "b": 20, "c": 30}
    assert run.coordinator.versions == (1,)


def test_a_version_is_there_only_after_its_round_was_committed() -> None:
    run = joined("a", "b", "c")
    for worker in "abc":
        run.submit(worker)
    assert run.ask("a", version=1, sequence=0) == NotYet(0)
    run.commit()
    assert run.ask("a", version=1, sequence=0) == Ready(0, 1, "full", "fp32", "digest1", 3)


def test_a_submission_sent_again_counts_once() -> None:
    run = joined("a", "b", "c")
    run.submit("a")
    assert run.submit("a") == Accepted(1, is_repeat=True)
    run.submit_each("b", "c")
    assert run.submit("c") == Accepted(1, is_repeat=True)
    (closed,) = run.commit()
    assert len(closed.contributions) == 3
    assert run.submit("a") == Accepted(1, is_repeat=True)
    assert run.coordinator.counts["repeats"] == 3
    assert run.arrived() == []


def test_an_older_sequence_that_arrives_out_of_order_is_refused() -> None:
    run = joined("a", "b", "c")
    for number in range(2):
        run.round(number, "a", "b", "c")
    reply = run.submit("a", 0, 0)
    assert isinstance(reply, Refused)
    assert (reply.status, reply.details["kind"]) == (409, "old_sequence")
    assert run.arrived() == []


def test_what_is_previewed_is_what_handle_answers_and_nothing_counts() -> None:
    run = SteppedRun(dataclasses.replace(THREE, num_workers=1, min_workers=1))
    (registered,) = run.join("a")
    assert registered.next_sequences == (0,)
    new = Submit("a", "s1", 0, 0, 0, 10, 10)
    assert run.coordinator.preview(new, run.now) is None
    assert run.coordinator.preview(new, run.now) is None
    assert run.arrived() == []
    run.coordinator.handle(new, run.now)
    assert run.ask("a", sequence=0) == NotYet(0)
    assert run.coordinator.preview(new, run.now) == Accepted(1, is_repeat=True)
    assert len(run.commit()) == 1


def test_a_late_submission_joins_the_next_round_with_less_weight() -> None:
    run = joined("a", "b", "c")
    run.round(0, "a", "b")
    run.wait(THREE.initial_deadline)
    assert run.coordinator.versions == (1,)
    assert run.submit("c", 0, 0, tokens=80) == Accepted(2)
    run.submit("a", 1, 1)
    run.submit("b", 1, 1)
    (closed,) = run.commit()
    assert weights(closed) == {"a": 10, "b": 10, "c": 5}  # no more than the mean of the others, and half of it
    assert run.coordinator.counts["late"] == 1
    assert run.ask("c", sequence=0) == Ready(0, 2, "full", "fp32", "digest2", 3)


def test_a_submission_later_than_the_greatest_staleness_is_dropped_and_counted_once() -> None:
    run = joined("a", "b", "c")
    run.round(0, "a", "b")
    run.wait(THREE.initial_deadline)
    run.round(1, "a", "b")
    run.wait(100.0)
    assert run.coordinator.versions == (2,)
    assert run.submit("c", 0, 0) == Dropped("2 versions late, max_staleness is 1", 2, is_anew=True)
    assert isinstance(run.submit("c", 0, 0), Dropped)
    assert run.coordinator.counts["dropped"] == 1
    assert run.ask("c", sequence=0) == NotYet(2, is_pending=False)
    assert run.submit("c", 1, 2) == Accepted(3)


def test_what_arrives_while_a_round_is_executed_joins_the_next_one() -> None:
    run = joined("a", "b", "c")
    for worker in "abc":
        run.submit(worker)
    (closed,) = run.coordinator.take_closed()
    run.coordinator.handle(Submit("a", "s1", 1, 0, 0, 30, 10), run.now)
    assert weights(closed) == {"a": 10, "b": 10, "c": 10}
    assert run.ask("a", sequence=1) == NotYet(0)
    run.coordinator.committed(closed, "digest", run.now)
    assert run.coordinator.take_closed() == []
    assert run.submit("a", 1, 0) == Accepted(2, is_repeat=True)


def test_a_base_that_does_not_exist_is_refused() -> None:
    run = joined("a", "b", "c")
    reply = run.submit("a", 0, base=1)
    assert isinstance(reply, Refused)
    assert reply.details["kind"] == "future_version"


@pytest.mark.parametrize("fragment", [-1, 2])
def test_a_fragment_that_does_not_exist_is_refused(fragment: int) -> None:
    run = joined("a", settings=dataclasses.replace(THREE, num_fragments=2))
    for request in (Submit("a", "s1", 0, fragment, 0, 1, 1), Await("a", "s1", fragment, 0)):
        reply = run.coordinator.handle(request, 0.0)
        assert isinstance(reply, Refused)
        assert reply.status == 400


def test_fragments_have_rounds_of_their_own() -> None:
    run = joined("a", "b", "c", settings=dataclasses.replace(THREE, num_fragments=2))
    for worker in "abc":
        run.submit(worker, fragment=1)
    run.submit("a", fragment=0)
    (closed,) = run.commit()
    assert (closed.fragment, run.coordinator.versions) == (1, (0, 1))


def test_without_what_leads_to_the_newest_version_its_parameters_are_sent() -> None:
    run = joined("a", "b", "c", settings=dataclasses.replace(THREE, codec="int8"))
    run.round(0, "a", "b", "c")
    restarted = SteppedRun(run.coordinator.settings, state=run.coordinator.state_dict())
    assert restarted.ask("a", have=0) == Ready(0, 1, "full", "fp32", "digest1", 3)
    assert run.ask("a", have=0) == Ready(0, 1, "update", "int8", "digest1", 3)
    run.coordinator.forget_update(0)  # the next round is being executed
    assert run.ask("a", have=0) == Ready(0, 1, "full", "fp32", "digest1", 3)
    run.round(1, "a", "b", "c")
    assert run.ask("a", have=1) == Ready(0, 2, "update", "int8", "digest2", 3)


def test_an_answer_is_an_update_only_for_who_has_the_version_before() -> None:
    run = joined("a", "b", "c", settings=dataclasses.replace(THREE, codec="int8"))
    run.round(0, "a", "b", "c")
    run.round(1, "a", "b", "c")
    answers = [run.ask("a", have=have) for have in (None, 0, 1)]
    assert [(one.kind, one.codec) for one in answers if isinstance(one, Ready)] == [
        ("full", "fp32"),
        ("full", "fp32"),
        ("update", "int8"),
    ]


def test_in_asynchronous_mode_every_submission_is_a_round_in_order_however_late() -> None:
    run = joined("a", "b", "c", settings=Settings(mode="async", num_workers=3, min_workers=1, sync_every=10))
    replies = [run.submit(worker, sequence) for sequence in range(2) for worker in "abc"]
    assert replies == [Accepted(version) for version in range(1, 7)]
    closed = run.coordinator.take_closed()
    assert [one.version for one in closed] == [1, 2, 3, 4, 5, 6]
    with pytest.raises(ValueError, match="version 2 of fragment 0 is not the next to commit"):
        run.coordinator.committed(closed[1], "digest", run.now)
    for one in closed:
        run.coordinator.committed(one, "digest", run.now)
    assert run.ask("b", sequence=0) == NotYet(6, is_pending=False)
    assert run.ask("b", sequence=1) == Ready(0, 6, "full", "fp32", "digest", 1)
    assert run.coordinator.counts["dropped"] == 0


def test_the_steps_of_the_run_are_those_of_its_rounds() -> None:
    run = joined("a", "b", "c")
    for number in range(3):
        run.round(number, "a", "b", "c")
    (late,) = run.join("d")
    assert (late.step, late.versions) == (30, (3,))
