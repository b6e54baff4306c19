"""Diagnoses from the ranks' reports which rank was the first to fail, die or hang, and formats the report."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from onstep.config.parallel_sizes import places
from onstep.distributed.process_group import says_timeout
from onstep.training.watchdog.rank_report import FIRST_STEP, Failure, RankReport

Kind = Literal["raised", "died", "hung", "alike", "left"]

ALIKE_SECONDS = 1.0
"""How long the other ranks have to raise the same error after one has raised it."""
CONSEQUENCE_SECONDS = 4.0
"""How long to wait, after a lost connection, for the rank that caused it to be found silent."""
SILENT_BEATS = 4.0
"""Missed publications after which a rank counts as silent, if something else indicates that it is gone."""
ANSWER_SECONDS = 3.0
"""How long a rank suspected of hanging has to check itself; without an answer, or news before, others decide."""
_DEADLOCK, _DEADLOCK_IN_SETUP = 0.25, 0.5
"""The share of the limit after which ranks hang that are all in collectives, where nobody can arrive any more."""
_DEADLOCK_SECONDS = 60.0
"""But not sooner, unless the limit is shorter: a large collective over a slow network may last. As soon where a
callback of some ranks only is in a collective."""
_DIVIDED_SECONDS = 15.0
"""After which ranks that wait in a collective of a callback, and others elsewhere, are named."""


@dataclass(frozen=True)
class FailureDiagnosis:
    """The rank that was the first to fail, and how; `alike` and `left` require no report."""

    kind: Kind
    rank: int
    line: str = ""
    """The diagnosis in one line, once all ranks are to act on it."""
    reporter: int = 0
    """The rank that then writes the report."""
    refusal: str = ""
    """What all ranks raise, if the rank has refused its configuration or what it was given; no report is written."""


@dataclass(frozen=True)
class Suspicion:
    """A rank that seems to hang, how far it had come, and when this was first seen."""

    rank: int
    beats: int
    at: float
    """Seconds of the monotonic clock."""


def suspicion_of(
    diagnosis: FailureDiagnosis | None,
    rank_reports: Mapping[int, RankReport],
    leader: int,
    known: Suspicion | None,
    now: float,
) -> Suspicion | None:
    """The rank that must be asked whether it hangs; None if there is none, or if it has long been silent.

    The diagnosing rank, whose knowledge is slightly old, checks itself without asking; `known` is the last suspicion.
    """
    if diagnosis is None or diagnosis.kind != "hung" or diagnosis.rank == leader:
        return None
    one = rank_reports[diagnosis.rank]
    if one.silence >= ANSWER_SECONDS or one.is_stopped:
        return None
    if known is not None and (known.rank, known.beats) == (diagnosis.rank, one.beats):
        return known
    return Suspicion(diagnosis.rank, one.beats, now)


def suspecting_rank(record: RankReport, rank_reports: Mapping[int, RankReport]) -> int | None:
    """The diagnosing rank that suspects this rank of hanging, if this rank is still where it was then; else None."""
    for leader, one in rank_reports.items():
        if one.silence == 0 and (one.suspects, one.suspected_beats) == (record.rank, record.beats):
            return leader
    return None


def diagnose(
    rank_reports: Mapping[int, RankReport],
    *,
    interval: float,
    since_first_failure: float = 0.0,
    stopped_seconds: float | None = None,
    on_cuda: bool = False,
) -> FailureDiagnosis | None:
    """The diagnosis, or None while the run may continue.

    Args:
        rank_reports: the record of every rank.
        interval: seconds between two publications of a rank.
        since_first_failure: seconds since the diagnosing rank first saw a failure.
        stopped_seconds: how long a process may be stopped, even if it is not watched otherwise.
        on_cuda: a rank that waits for others may be anywhere that reads the device.
    """
    failures = {rank: one.failure for rank, one in rank_reports.items() if one.failure is not None}
    running = {rank: one for rank, one in rank_reports.items() if not one.is_over}
    silent = [rank for rank, one in running.items() if one.silence >= max(1.0, SILENT_BEATS * interval)]
    silent.sort(key=lambda rank: (running[rank].is_terminated, -running[rank].silence, rank))
    left = [rank for rank, one in rank_reports.items() if one.has_left_early]
    if not failures:
        if left and any(one.is_done for one in running.values()):
            return FailureDiagnosis("left", left[0])
        gone = [rank for rank in silent if running[rank].is_gone]
        if gone:
            return FailureDiagnosis("died", gone[0])
        stalled = _diagnose_stalls(running, stopped_seconds, on_cuda)
        if stalled is not None and left and (running[stalled.rank].is_waiting or on_cuda):
            return FailureDiagnosis("died", left[0])  # the one that waits for it would wait forever
        return stalled
    in_order = sorted(failures, key=lambda rank: (failures[rank].order, rank))
    if left:
        own = [rank for rank in in_order if not failures[rank].is_consequence]
        return FailureDiagnosis("left", (own or left)[0])
    have_all_failed = len(failures) == len(rank_reports)
    are_alike = have_all_failed and len({(one.kind, one.text) for one in failures.values()}) == 1
    if are_alike or all(map(_is_interrupted, rank_reports.values())):
        return FailureDiagnosis("alike", in_order[0])
    causes = [rank for rank in in_order if not failures[rank].is_consequence]
    if causes:
        return (
            FailureDiagnosis("raised", causes[0]) if since_first_failure >= ALIKE_SECONDS or have_all_failed else None
        )
    gone = [rank for rank, one in running.items() if one.is_gone]  # known before its silence is long
    if silent or gone:
        return FailureDiagnosis("died", min([*silent, *gone], key=lambda rank: running[rank].is_terminated))
    if since_first_failure < CONSEQUENCE_SECONDS + ANSWER_SECONDS + 1 and all(map(_waited_in_vain, failures.values())):
        missing = [rank for rank, one in running.items() if not (one.is_done or one.is_waiting)]
        if missing:
            return FailureDiagnosis("hung", max(missing, key=lambda rank: running[rank].idle))
    return FailureDiagnosis("raised", in_order[0]) if since_first_failure >= CONSEQUENCE_SECONDS else None


def _waited_in_vain(failure: Failure) -> bool:
    """Whether it only indicates that another rank has not come to a collective in time."""
    return failure.is_consequence and says_timeout(failure.text)


def _is_interrupted(one: RankReport) -> bool:
    """Whether it received SIGINT, as from Ctrl-C; a rank that waits in a collective cannot raise it yet."""
    failure = one.failure
    return one.is_interrupted or (failure is not None and failure.kind == "KeyboardInterrupt")


def _diagnose_stalls(
    running: Mapping[int, RankReport], stopped_seconds: float | None, on_cuda: bool
) -> FailureDiagnosis | None:
    """A rank that waits for others is a victim of one that does not, which may be slow.

    On CUDA a rank that waits may be anywhere: a victim is one that is not the furthest behind in a collective. Where
    all wait, nobody will arrive: the most likely cause is a collective in a callback, which others do not enter.
    """
    running = {rank: one for rank, one in running.items() if not one.is_done}
    if not running or any(one.is_debugged for one in running.values()):
        return None
    behind, is_divided = _behind(running), _is_divided(running.values())
    all_wait = all(one.is_waiting and not one.is_stopped for one in running.values())
    is_deadlock = all(one.is_in_collective for one in running.values())
    running = with_uneven(running) if all_wait else running
    is_uneven = any(one.is_alone_there for one in running.values())
    found = []
    for rank, one in running.items():
        limit = (is_uneven and stopped_seconds) or one.limit_seconds
        if limit is None and stopped_seconds is not None and (one.is_stopped or all_wait):
            limit = stopped_seconds if one.is_stopped else FIRST_STEP * stopped_seconds
        if limit is not None and stopped_seconds is not None and is_deadlock:
            share = _DEADLOCK_IN_SETUP if one.limit_seconds is None else 0.0 if is_divided else _DEADLOCK
            limit = min(limit, max(_DEADLOCK_SECONDS, share * stopped_seconds))
        idle = min(other.idle for other in running.values()) if all_wait else one.idle
        is_victim = behind[rank] < max(behind.values()) if on_cuda else one.is_waiting and not one.is_stopped
        if limit is not None and idle >= limit and (all_wait or not is_victim):
            in_callback = all_wait and one.callback is not None
            found.append((not one.is_alone_there, not in_callback, -behind[rank], one.is_waiting, -one.idle, rank))
    return FailureDiagnosis("hung", min(found)[-1]) if found else None


def _behind(rank_reports: Mapping[int, RankReport]) -> dict[int, int]:
    """By rank, how many collectives it has not entered that others of its groups have; ranks differ in their groups."""
    most: dict[str, int] = {}
    for one in rank_reports.values():
        most |= {name: max(count, most.get(name, 0)) for name, count in one.collectives.items()}
    return {
        rank: sum(most[name] - count for name, count in one.collectives.items()) for rank, one in rank_reports.items()
    }


def _is_divided(running: Iterable[RankReport]) -> bool:
    """Whether all ranks wait for each other, some of them in a callback and others not in that one."""
    ones = list(running)
    return all(one.is_waiting for one in ones) and len({(one.event, one.callback) for one in ones}) > 1


def divided_warning(rank_reports: Mapping[int, RankReport], place: Callable[[int], str]) -> str:
    """What to say of ranks that wait in a callback's collective while others wait elsewhere; empty if none do.

    It is the case of a collective behind `if state.is_world_process_zero:`. Nothing is ended: whether it is a hang,
    `diagnose` decides after a longer time.

    Args:
        rank_reports: the record of every rank.
        place: names a rank.
    """
    running = {rank: one for rank, one in rank_reports.items() if not (one.is_over or one.is_done)}
    if len(running) < 2 or not _is_divided(running.values()) or any(one.is_debugged for one in running.values()):
        return ""
    if min(one.idle for one in running.values()) < _DIVIDED_SECONDS:
        return ""
    first = next(rank for rank, one in sorted(running.items()) if one.callback is not None)
    called = running[first].event, running[first].callback
    inside = [rank for rank, one in sorted(running.items()) if (one.event, one.callback) == called]
    others = [rank for rank in sorted(running) if rank not in inside]
    at = f" at {running[first].place}" if running[first].place else ""
    return (
        f"callback '{called[1]}' during '{called[0]}' waits in a collective on {places(inside, place)}{at}, and "
        f"{places(others, place)} elsewhere: a collective, a forward pass of the model in shards or full_tensor() must "
        f"be called by all ranks, not behind a condition such as state.is_world_process_zero."
    )


def diagnose_alone(
    record: RankReport, rank_reports: Mapping[int, RankReport], num_ranks: int
) -> FailureDiagnosis | None:
    """The diagnosis of a rank without the others: there are none, or the store lived in a process that is gone.

    As long as this rank makes progress, nothing is wrong: rank 0 may simply have ended earlier. Each rank decides for
    itself, and one of them reports.
    """
    first = rank_reports.get(0)
    has_lost = record.is_done and first is not None and not first.is_done
    if record.failure is None and not record.is_stalled and not has_lost:
        return None
    is_victim = has_lost or (record.is_waiting if record.failure is None else record.failure.is_consequence)
    if is_victim and first is not None and first.left is not None and first.failure is None:
        return decide_on(FailureDiagnosis("left", 0), first, 1)
    rank = 0 if is_victim and first is not None and not first.is_over else record.rank
    speakers = [one for one in range(1, num_ranks) if one != rank]
    reporter = speakers[0] if speakers and is_victim else record.rank
    kind: Kind = "hung" if record.failure is None else "raised"
    if rank != record.rank and first is not None:
        kind = "hung" if first.is_stopped else "died"
    return FailureDiagnosis(kind, rank, reporter=reporter)


def with_uneven(rank_reports: Mapping[int, RankReport]) -> dict[int, RankReport]:
    """The records; those whose callbacks have entered more collectives in the set-up than others' are marked."""
    fewest = min(one.entered_in_callbacks for one in rank_reports.values())
    return {rank: replace(one, is_alone_there=one.entered_in_callbacks > fewest) for rank, one in rank_reports.items()}


_RULE = "=" * 100


def first_line(diagnosis: FailureDiagnosis, one: RankReport, who: str) -> str:
    """The diagnosis in one line: rank, what happened, step, event and callback, place."""
    at = f"at step {one.step}, while {one.clause}"
    if one.failure is None and one.left is not None:
        return f"{who} exited with code {one.left} {at}; the other ranks cannot continue without it"
    if diagnosis.kind == "died" and one.is_final:
        return f"{who} is gone (its process was killed or crashed) {at}"
    if one.failure is not None:
        return f"{who} failed first {at}: {_exception(one.failure)}"
    if diagnosis.kind == "died":
        gone = f"{who} is gone (its process was killed or crashed)"
        if one.step_of_others > one.step:  # it may have been further than in a report that is old
            return f"{gone} with others at step {one.step_of_others}; its last report is {one.silence:.1f} s old: {at}"
        return f"{gone}; it last reported {at}"
    if one.is_stopped:
        return f"{who} hangs: its process has been stopped for {one.idle:.1f} s; it last reported {at}"
    silent = ", and its interpreter does not answer" if one.silence > 0 else ""
    return f"{who} hangs: no progress for {one.idle:.1f} s{silent}, {at}"


def decide_on(
    diagnosis: FailureDiagnosis, one: RankReport, reporter: int, place: Callable[[int], str] = "rank {}".format
) -> FailureDiagnosis:
    """The diagnosis that all ranks act on, given the record of the rank that it names; `place` names a rank."""
    who, failure = place(diagnosis.rank), one.failure
    refusal = f"{who}: {' '.join(failure.text.split())}" if failure is not None and failure.is_refusal else ""
    return replace(diagnosis, line=first_line(diagnosis, one, who), reporter=reporter, refusal=refusal)


def report(
    decision: FailureDiagnosis,
    rank_reports: Mapping[int, RankReport],
    stacks: Mapping[int, str],
    hint: str = "",
    place: Callable[[int], str] = "rank {}".format,
) -> str:
    """The whole report, with the exception of the failed rank and the stacks of all ranks that provided them."""
    parts = [_RULE, f"first failure: {decision.line}"]
    worker = worker_frame(stacks.get(decision.rank, ""))
    if worker is not None and decision.kind == "hung":
        parts.append(f"  its data worker {worker[0]} is at {worker[1]}")
    parts += ["", "last activity of each rank:"]
    parts += [f"  {place(rank)}: {_status(one)}" for rank, one in sorted(rank_reports.items())]
    failure = rank_reports[decision.rank].failure
    if failure is not None:
        parts += ["", f"exception of {place(decision.rank)}:", failure.traceback.rstrip()]
    for rank in sorted(rank_reports):
        text = stacks.get(rank, "").rstrip() or "  none: the rank does not answer"
        parts += ["", f"stacks of {place(rank)} (process {rank_reports[rank].pid}):", text]
    if hint:
        parts += ["", hint]
    return "\n".join([*parts, _RULE, ""])


def worker_frame(stacks: str) -> tuple[str, str] | None:
    """A data worker in these stacks and its location: the innermost frame of its main thread that reads the dataset."""
    for block in re.split(r"(?m)^data worker ", stacks)[1:]:
        frames = re.findall(r'(?m)^  File "([^"]+)", line (\d+) in (\S+)', block)
        inner = [one for one in frames if one[2] in ("__getitem__", "__getitems__", "__next__", "__iter__")]
        own = [one for one in inner if "/torch/" not in one[0]]
        if own:
            file, number, name = own[0]
            return block.split(":")[0], f"{file}:{number} in {name}"
    return None


def placed(record: RankReport, stacks: str) -> RankReport:
    """The record, with the line that reads the dataset if the rank waits for a data worker."""
    worker = worker_frame(stacks) if record.waits_for_worker else None
    return record if worker is None else replace(record, place=worker[1])


def _status(one: RankReport) -> str:
    if one.left is not None and one.failure is None:
        return f"step {one.step}, exited with code {one.left}"
    if one.failure is not None:
        return f"step {one.step}, {_exception(one.failure)}"
    since = f"; no progress for {one.idle:.1f} s" if one.idle >= 1 else ""
    state = " (its process is gone)" if one.is_gone else " (its process is stopped)" if one.is_stopped else ""
    return f"step {one.step}, {one.clause}{since}{state}"


def _exception(failure: Failure) -> str:
    line = " ".join(failure.text.split())
    text = line if len(line) <= 300 else line[:297] + "..."
    return f"{failure.kind}: {text}" if failure.text else failure.kind
