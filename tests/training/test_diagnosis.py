"""The diagnosis of the first failure from the reports of the ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from onstep.config.parallel_sizes import ParallelSizes
from onstep.training.watchdog.diagnosis import (
    FailureDiagnosis,
    decide_on,
    diagnose,
    divided_warning,
    report,
    worker_frame,
)
from onstep.training.watchdog.gathers import gather_hint
from onstep.training.watchdog.rank_report import TERMINATED, Failure, RankReport

LIMIT = 10.0


def rank(
    number: int = 0, *, silence: float = 0.0, gone: bool = False, stopped: bool = False, **fields: Any
) -> RankReport:
    fields = {"limit_seconds": LIMIT, **fields, "collectives": {"all": fields.get("collectives", 0)}}
    return RankReport(number, silence=silence, is_gone=gone, is_stopped=stopped, **fields)


def failure(order: int = 1, text: str = "own", *, consequence: bool = False) -> Failure:
    return Failure(order, "ValueError", text, "traceback", is_consequence=consequence)


def diagnosis_of(*ranks: RankReport, since: float = 0.0, on_cuda: bool = False) -> FailureDiagnosis | None:
    rank_reports = dict(enumerate(ranks))
    return diagnose(rank_reports, interval=0.5, since_first_failure=since, stopped_seconds=LIMIT, on_cuda=on_cuda)


WAITING: dict[str, Any] = {"idle_seconds": 12.0, "collectives": 8, "is_waiting": True}


def test_a_waiting_rank_is_a_victim_of_the_one_that_has_not_arrived() -> None:
    assert diagnosis_of(rank(**WAITING), rank(idle_seconds=11.0, collectives=7)) == FailureDiagnosis("hung", 1)
    assert diagnosis_of(rank(idle_seconds=11.0, collectives=7), rank(**WAITING)) == FailureDiagnosis("hung", 0)


def test_a_rank_that_waits_for_a_slow_one_is_left_waiting() -> None:
    assert diagnosis_of(rank(**WAITING), rank(idle_seconds=3.0, collectives=7)) is None


def test_a_stage_that_waits_for_another_has_entered_fewer_collectives_and_is_a_victim() -> None:
    waits = rank(idle_seconds=12.0, collectives=3, is_waiting=True)
    assert diagnosis_of(waits, rank(idle_seconds=11.0, collectives=9)) == FailureDiagnosis("hung", 1)
    assert diagnosis_of(waits, rank(idle_seconds=3.0, collectives=9)) is None
    stopped = rank(idle_seconds=11.0, collectives=9, is_waiting=True, stopped=True)
    assert diagnosis_of(waits, stopped) == FailureDiagnosis("hung", 1)


def test_on_a_device_only_groups_that_ranks_share_are_compared() -> None:
    first, second, ahead = ({"pp": 4, "tp of the first": 90}, {"pp": 4, "tp": 7}, {"pp": 4, "tp": 8})
    ranks = [replace(rank(idle_seconds=12.0), collectives=one) for one in (first, second, ahead)]
    assert diagnosis_of(*ranks, on_cuda=True) == FailureDiagnosis("hung", 1)


def test_on_a_device_a_waiting_rank_may_stand_anywhere() -> None:
    reading = rank(idle_seconds=12.0, collectives=8)
    slow = rank(idle_seconds=3.0, collectives=7)
    assert diagnosis_of(reading, slow, on_cuda=True) is None
    assert diagnosis_of(reading, slow) == FailureDiagnosis("hung", 0)


def test_of_two_that_stand_the_one_outside_of_a_collective_is_to_blame() -> None:
    waits = rank(idle_seconds=20.0, collectives=7, is_waiting=True)
    assert diagnosis_of(waits, rank(idle_seconds=11.0, collectives=7)) == FailureDiagnosis("hung", 1)


def test_where_all_wait_the_one_in_a_callback_is_to_blame() -> None:
    waits = rank(**WAITING)
    in_callback = {**WAITING, "callback": "C"}
    assert diagnosis_of(waits, rank(**in_callback)) == FailureDiagnosis("hung", 1)
    assert diagnosis_of(waits, rank(**{**in_callback, "idle_seconds": 9.0})) is None
    ahead, in_setup = {**in_callback, "collectives": 9}, rank(**{**WAITING, "limit_seconds": None})
    assert diagnosis_of(rank(**ahead), in_setup) == FailureDiagnosis("hung", 0)
    assert diagnosis_of(in_setup, in_setup) is None
    both = rank(**{**WAITING, "limit_seconds": None, "idle_seconds": 31.0})
    assert diagnosis_of(both, both) == FailureDiagnosis("hung", 0)
    assert diagnosis_of(rank(**ahead), waits) == FailureDiagnosis("hung", 0)
    assert diagnosis_of(rank(**ahead), rank(**{**WAITING, "idle_seconds": 3.0})) is None
    assert diagnosis_of(rank(**ahead), rank(idle_seconds=11.0, collectives=8)) == FailureDiagnosis("hung", 1)


def test_the_longest_silence_counts_where_all_else_is_equal() -> None:
    assert diagnosis_of(rank(idle_seconds=11.0), rank(idle_seconds=14.0)) == FailureDiagnosis("hung", 1)
    assert diagnosis_of(rank(idle_seconds=11.0), rank(idle_seconds=2.0, silence=12.0)) == FailureDiagnosis("hung", 1)


def test_a_rank_without_a_limit_may_take_its_time() -> None:
    assert diagnosis_of(rank(idle_seconds=1e6, limit_seconds=None)) is None
    assert diagnosis_of(rank(silence=11.0, limit_seconds=None)) is None
    assert diagnosis_of(rank(silence=11.0, limit_seconds=None, stopped=True)) == FailureDiagnosis("hung", 0)


def test_a_debugger_holds_all() -> None:
    assert diagnosis_of(rank(idle_seconds=100.0, is_debugged=True), rank(**WAITING)) is None


def test_a_rank_that_has_left_is_not_waited_for() -> None:
    assert diagnosis_of(rank(idle_seconds=50.0, left=0), rank(idle_seconds=1.0)) is None
    assert diagnosis_of(rank(left=0, is_done=True), rank(**WAITING)) == FailureDiagnosis("hung", 1)


@pytest.mark.parametrize("code", [0, 3])
def test_a_rank_that_waits_for_one_that_has_left_early_is_its_victim(code: int) -> None:
    assert diagnosis_of(rank(left=code), rank(**WAITING)) == FailureDiagnosis("died", 0)
    assert diagnosis_of(rank(left=code), rank(idle_seconds=12.0)) == FailureDiagnosis("hung", 1)


def test_a_process_that_is_gone_is_dead_at_once() -> None:
    assert diagnosis_of(rank(), rank(silence=2.5, gone=True)) == FailureDiagnosis("died", 1)
    assert diagnosis_of(rank(), rank(silence=2.5)) is None


def test_the_first_failure_counts_once_the_others_had_their_time_to_raise_the_same() -> None:
    ranks = rank(failure=failure(2, "later")), rank(failure=failure(1)), rank()
    assert diagnosis_of(*ranks, since=0.5) is None
    assert diagnosis_of(*ranks, since=1.0) == FailureDiagnosis("raised", 1)


def test_the_same_error_everywhere_needs_no_report() -> None:
    assert diagnosis_of(rank(failure=failure(2)), rank(failure=failure(1))) == FailureDiagnosis("alike", 1)
    different = rank(failure=failure(1, "mine")), rank(failure=failure(2, "yours"))
    assert diagnosis_of(*different) == FailureDiagnosis("raised", 0)


@pytest.mark.parametrize("since", [0.0, 5.0])
def test_a_lost_connection_points_to_the_rank_that_is_silent(since: float) -> None:
    lost = rank(failure=failure(1, consequence=True))
    assert diagnosis_of(lost, rank(silence=2.5), since=since) == FailureDiagnosis("died", 1)
    assert diagnosis_of(lost, rank(silence=0.1, gone=True), since=since) == FailureDiagnosis("died", 1)


def test_a_rank_that_a_launcher_ended_is_not_the_first() -> None:
    ended = rank(silence=9.0, gone=True, activity=TERMINATED)
    lost = rank(failure=failure(1, consequence=True))
    assert diagnosis_of(rank(), ended, rank(silence=5.0, gone=True)) == FailureDiagnosis("died", 2)
    assert diagnosis_of(lost, ended, rank(silence=0.1, gone=True)) == FailureDiagnosis("died", 2)
    assert diagnosis_of(lost, ended, rank()) == FailureDiagnosis("died", 1)


def test_of_several_silent_ranks_the_one_silent_longest_was_first() -> None:
    lost = rank(failure=failure(1, consequence=True))
    for first in (1, 2):
        ranks = [rank(silence=9.0 if number == first else 5.0, gone=True) for number in (1, 2)]
        assert diagnosis_of(lost, *ranks) == FailureDiagnosis("died", first)
        assert diagnosis_of(rank(), *ranks) == FailureDiagnosis("died", first)


def test_a_lost_connection_is_blamed_only_when_nobody_else_can_be() -> None:
    lost = rank(failure=failure(1, consequence=True))
    assert diagnosis_of(lost, rank(failure=failure(2, "cause")), since=0.0) == FailureDiagnosis("raised", 1)
    assert diagnosis_of(lost, rank(), since=2.0) is None
    assert diagnosis_of(lost, rank(), since=4.0) == FailureDiagnosis("raised", 0)


def test_the_others_may_fail_after_a_rank_has_left() -> None:
    assert diagnosis_of(rank(left=75), rank(failure=failure(1, consequence=True))) == FailureDiagnosis("left", 0)
    assert diagnosis_of(rank(left=75), rank(failure=failure(1))) == FailureDiagnosis("left", 1)
    assert diagnosis_of(rank(left=75), rank()) is None


def test_a_rank_that_has_reached_the_end_waits_for_all_others() -> None:
    done: dict[str, Any] = {"is_done": True, "limit_seconds": None, "collectives": 7}
    assert diagnosis_of(rank(**done), rank(idle_seconds=3.0)) is None
    assert diagnosis_of(rank(**done), rank(**WAITING)) == FailureDiagnosis("hung", 1)
    assert diagnosis_of(rank(**done), rank(**done, left=0)) is None
    assert diagnosis_of(rank(**done), rank(left=0)) == FailureDiagnosis("left", 1)
    assert diagnosis_of(rank(**done), rank(left=3)) == FailureDiagnosis("left", 1)


def test_a_record_survives_its_way() -> None:
    record = RankReport(3, step=5, event="on_step_end", callback="C", failure=failure())
    assert RankReport.decode(record.encode()) == record


def test_the_place_of_a_data_worker_is_its_dataset() -> None:
    stacks = """thread MainThread:
  File "/a/__getitem__.py", line 1, in __getitem__
data worker 17:
Current thread 0x1 (most recent call first):
  File "/lib/torch/x.py", line 5 in __getitem__
  File "/home/me/rows.py", line 9 in __getitem__
  File "/lib/torch/utils/data/_utils/fetch.py", line 54 in fetch
"""
    assert worker_frame(stacks) == ("17", "/home/me/rows.py:9 in __getitem__")
    assert worker_frame("thread MainThread:\n") is None


def test_an_interrupt_of_all_ranks_needs_no_report() -> None:
    """As Ctrl-C; a rank that waits in a collective cannot raise it yet."""
    interrupted = Failure(1, "KeyboardInterrupt", "", "")
    waiting = rank(1, is_waiting=True, collectives=1)
    assert diagnosis_of(rank(failure=interrupted), waiting, since=5.0) == FailureDiagnosis("raised", 0)
    waiting.is_interrupted = True
    assert diagnosis_of(rank(failure=interrupted), waiting) == FailureDiagnosis("alike", 0)


def test_ranks_that_are_all_in_collectives_are_named_sooner() -> None:
    """A backward pass, which waits for others inside of it, may compute for long."""
    stuck: dict[str, Any] = {"idle_seconds": 160.0, "is_waiting": True, "is_in_collective": True}

    def named(limit: float | None = 600.0, **fields: Any) -> bool:
        ranks = {0: RankReport(0, limit_seconds=limit, **stuck)}
        ranks[1] = RankReport(1, limit_seconds=limit, **{**stuck, **fields})
        return diagnose(ranks, interval=0.5, stopped_seconds=600.0) is not None

    assert named()
    assert not named(is_in_collective=False)
    assert not named(idle_seconds=140.0)
    assert not named(limit=None)
    stuck["idle_seconds"] = 310.0
    assert named(limit=None), "in the setup"
    brief = dict.fromkeys((0, 1), RankReport(0, limit_seconds=100.0, **{**stuck, "idle_seconds": 50.0}))
    assert diagnose(brief, interval=0.5, stopped_seconds=100.0) is None


def test_a_rank_that_others_have_waited_for_in_vain_is_named() -> None:
    """In the setup, which is not limited, or with a limit of collectives below the watchdog's."""
    timed_out = rank(failure=failure(text="Timed out waiting 1800000ms for recv", consequence=True))
    late = rank(limit_seconds=None, idle_seconds=1799.0)
    assert diagnosis_of(timed_out, rank(is_waiting=True), late) == FailureDiagnosis("hung", 2)
    assert diagnosis_of(timed_out, late, since=60.0) == FailureDiagnosis("raised", 0)
    assert diagnosis_of(timed_out, rank(silence=9.0, gone=True), late) == FailureDiagnosis("died", 1)


FSDP = '  File "/torch/distributed/fsdp/_fully_shard/_fsdp_'
GATHERS = f'{FSDP}collectives.py", line 364 in foreach_all_gather\n{FSDP}param_group.py", line 407 in unshard\n'
REDUCES = f'{FSDP}collectives.py", line 619 in foreach_reduce\n{FSDP}param_group.py", line 688 in post_backward\n'


def test_ranks_that_wait_for_a_block_that_others_do_not_call_are_said_to() -> None:
    waits = rank(**WAITING)
    hint = gather_hint({0: waits, 1: waits, 2: waits}, {0: GATHERS, 1: REDUCES, 2: ""})
    assert hint.startswith("rank 0 waits to gather the weights of a block, and ranks 1, 2 wait in another collective.")
    sizes = ParallelSizes(dp_shard=3)
    named = gather_hint({0: waits, 1: waits, 2: waits}, {0: GATHERS, 1: REDUCES, 2: ""}, sizes.place)
    assert named.startswith("rank 0, dp_shard 0 waits"), named
    assert not gather_hint({0: waits, 1: rank(idle_seconds=12.0)}, {0: GATHERS, 1: ""}), "it has not arrived yet"
    assert not gather_hint({0: waits, 1: waits}, {0: GATHERS, 1: GATHERS})
    assert not gather_hint({0: waits, 1: waits}, {0: REDUCES, 1: ""})


def test_a_report_names_ranks_by_their_coordinates() -> None:
    sizes = ParallelSizes(dp_replicate=2, dp_shard=2)
    reports = {number: rank(number, idle_seconds=12.0) for number in range(4)}
    decision = decide_on(FailureDiagnosis("hung", 3), reports[3], 0, sizes.place)
    assert decision.line.startswith("rank 3, dp_shard 1, dp_replicate 1 hangs: no progress for 12.0 s")
    text = report(decision, reports, {2: "a stack"}, place=sizes.place)
    assert "\n  rank 1, dp_shard 1, dp_replicate 0: step 0, " in text
    assert "\nstacks of rank 2, dp_shard 0, dp_replicate 1 (process " in text
    assert decide_on(decision, reports[3], 0).line.startswith("rank 3 hangs")


def test_the_last_report_of_a_rank_of_another_machine_is_not_taken_for_its_end() -> None:
    last = rank(1, step=0, activity="beginning to train", silence=1.26, step_of_others=3)
    assert decide_on(FailureDiagnosis("died", 1), last, 0).line == (
        "rank 1 is gone (its process was killed or crashed) with others at step 3; its last report is 1.3 s old: at "
        "step 0, while it is beginning to train"
    )
    final = replace(last, is_final=True, step=3, activity="computing a step")
    line = decide_on(FailureDiagnosis("died", 1), final, 0).line
    assert line == "rank 1 is gone (its process was killed or crashed) at step 3, while it is computing a step"


def test_ranks_that_wait_in_a_callback_that_others_are_not_in_are_named_before_the_run_ends() -> None:
    waits = rank(is_waiting=True, is_in_collective=True, limit_seconds=600.0, idle_seconds=20.0)
    inside = replace(waits, event="on_step_end", callback="Exporter", place="export.py:7 in on_step_end")
    place = ParallelSizes(dp_shard=2).place
    said = divided_warning({0: inside, 1: waits}, place)
    where = (
        "waits in a collective on rank 0, dp_shard 0 at export.py:7 in on_step_end, and rank 1, dp_shard 1 elsewhere"
    )
    assert said.startswith(f"callback 'Exporter' during 'on_step_end' {where}: ")
    for quiet in (
        {0: inside, 1: replace(waits, idle_seconds=5.0)},
        {0: replace(inside, is_waiting=False), 1: waits},
        {0: inside, 1: inside},
        {0: waits, 1: waits},
        {0: inside, 1: replace(waits, is_done=True)},
    ):
        assert not divided_warning(quiet, place)
    late: dict[str, Any] = {"idle_seconds": 70.0}
    for first, found in ((inside, FailureDiagnosis("hung", 0)), (waits, None)):  # the latter may be a slow network
        ranks = {0: replace(first, **late), 1: replace(waits, **late)}
        assert diagnose(ranks, interval=0.5, stopped_seconds=600.0) == found
