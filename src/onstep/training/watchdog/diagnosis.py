"""Judges from what the ranks tell of themselves which one was the first to fail, die or hang, and reports it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from onstep.training.watchdog.rank_report import Failure, RankRecord

Kind = Literal["raised", "died", "hung", "alike", "left"]

ALIKE_SECONDS = 1.0
"""How long the other ranks have, after one has raised, to raise the same."""
CONSEQUENCE_SECONDS = 4.0
"""How long a lost connection waits for the rank that caused it to be found silent."""
SILENT_BEATS = 4.0
"""Missed publications after which a rank is silent, where something else says that it is gone."""
ANSWER_SECONDS = 3.0
"""How long a rank that is accused of hanging has to look at itself; without an answer the judge decides."""


@dataclass(frozen=True)
class Verdict:
    """Which rank was the first to fail, and how; `alike` and `left` need no report."""

    kind: Kind
    rank: int
    line: str = ""
    """The same in one line, once all ranks are to act on it."""
    reporter: int = 0
    """The rank that then reports it."""


@dataclass(frozen=True)
class Accusation:
    """A rank that seems to hang, how far it was, and when this was first seen."""

    rank: int
    beats: int
    at: float
    """Seconds of the monotonic clock."""


def accusation_of(
    verdict: Verdict | None, witnesses: Mapping[int, RankRecord], judge: int, known: Accusation | None, now: float
) -> Accusation | None:
    """Whom the judge, whose knowledge is a moment old, has to ask; None for nobody, or a rank that cannot answer.

    The judge looks at itself without being asked; `known` is the accusation before this one.
    """
    if verdict is None or verdict.kind != "hung" or verdict.rank == judge:
        return None
    one = witnesses[verdict.rank]
    if one.silence > 0 or one.is_stopped:
        return None
    if known is not None and (known.rank, known.beats) == (verdict.rank, one.beats):
        return known
    return Accusation(verdict.rank, one.beats, now)


def accuser_of(record: RankRecord, witnesses: Mapping[int, RankRecord]) -> int | None:
    """The judge that says of a rank that it hangs, where the rank is still as far as it was then; else None."""
    for judge, one in witnesses.items():
        if one.silence == 0 and (one.accuses, one.accused_beats) == (record.rank, record.beats):
            return judge
    return None


def judge(
    witnesses: Mapping[int, RankRecord],
    *,
    interval: float,
    since_first_failure: float = 0.0,
    stopped_seconds: float | None = None,
    on_cuda: bool = False,
) -> Verdict | None:
    """The verdict, or None as long as the run may still go on.

    Args:
        witnesses: every rank.
        interval: seconds between two publications of a rank.
        since_first_failure: seconds since the judge first saw a failure.
        stopped_seconds: how long a process may be stopped, also where it is not watched otherwise.
        on_cuda: a rank that waits for others may stand anywhere that reads the device.
    """
    failures = {rank: one.failure for rank, one in witnesses.items() if one.failure is not None}
    running = {rank: one for rank, one in witnesses.items() if not one.is_over}
    silent = [rank for rank, one in running.items() if one.silence >= max(1.0, SILENT_BEATS * interval)]
    if not failures:
        gone = [rank for rank in silent if running[rank].is_gone]
        return Verdict("died", gone[0]) if gone else _judge_stalls(running, stopped_seconds, on_cuda)
    in_order = sorted(failures, key=lambda rank: (failures[rank].order, rank))
    if any(one.left is not None and one.failure is None for one in witnesses.values()):
        return Verdict("left", in_order[0])
    have_all_failed = len(failures) == len(witnesses)
    are_alike = have_all_failed and len({(one.kind, one.text) for one in failures.values()}) == 1
    if are_alike or all(map(_is_interrupted, witnesses.values())):
        return Verdict("alike", in_order[0])
    causes = [rank for rank in in_order if not failures[rank].is_consequence]
    if causes:
        return Verdict("raised", causes[0]) if since_first_failure >= ALIKE_SECONDS or have_all_failed else None
    if silent:
        return Verdict("died", min(silent, key=lambda rank: (-running[rank].silence, rank)))
    return Verdict("raised", in_order[0]) if since_first_failure >= CONSEQUENCE_SECONDS else None


def _is_interrupted(one: RankRecord) -> bool:
    """Whether it was sent SIGINT, as by Ctrl-C; a rank that waits in a collective cannot raise it yet."""
    failure = one.failure
    return one.is_interrupted or (failure is not None and failure.kind == "KeyboardInterrupt")


def _judge_stalls(running: Mapping[int, RankRecord], stopped_seconds: float | None, on_cuda: bool) -> Verdict | None:
    """A rank that waits in a collective for one that has not arrived is a victim of that one, which may be slow."""
    if not running or any(one.is_debugged for one in running.values()):
        return None
    fewest = min(one.collectives for one in running.values())
    found = []
    for rank, one in running.items():
        limit = stopped_seconds if one.limit_seconds is None and one.is_stopped else one.limit_seconds
        is_ahead = one.collectives > fewest and (one.is_waiting or on_cuda)
        if not is_ahead and limit is not None and one.idle >= limit:
            found.append((one.collectives, one.is_waiting, -one.idle, rank))
    return Verdict("hung", min(found)[-1]) if found else None


_RULE = "=" * 100


def first_line(verdict: Verdict, one: RankRecord) -> str:
    """The verdict in one line: rank, what happened, step, event and callback, place."""
    at = f"at step {one.step}, while {one.activity}"
    if verdict.kind == "raised" and one.failure is not None:
        return f"rank {verdict.rank} failed first {at}: {_exception(one.failure)}"
    if verdict.kind == "died":
        return f"rank {verdict.rank} is gone (its process was killed or has crashed); it was last heard of {at}"
    if one.is_stopped:
        return f"rank {verdict.rank} hangs: its process is stopped, for {one.idle:.1f} s; it was last heard of {at}"
    silent = ", and its interpreter does not answer" if one.silence > 0 else ""
    return f"rank {verdict.rank} hangs: no progress for {one.idle:.1f} s{silent}, {at}"


def ruling_on(verdict: Verdict, one: RankRecord, reporter: int) -> Verdict:
    """What all ranks are to act on, where `one` is the rank that the verdict names."""
    return replace(verdict, line=first_line(verdict, one), reporter=reporter)


def report(ruling: Verdict, witnesses: Mapping[int, RankRecord], stacks: Mapping[int, str], hint: str = "") -> str:
    """The whole report, with the exception of the culprit and the stacks of all ranks that have given theirs."""
    parts = [_RULE, f"first culprit: {ruling.line}"]
    worker = worker_frame(stacks.get(ruling.rank, ""))
    if worker is not None and ruling.kind == "hung":
        parts.append(f"  its data worker {worker[0]} stands at {worker[1]}")
    parts += ["", "what each rank was last doing:"]
    parts += [f"  rank {rank}: {_doing(one)}" for rank, one in sorted(witnesses.items())]
    failure = witnesses[ruling.rank].failure
    if failure is not None:
        parts += ["", f"exception of rank {ruling.rank}:", failure.traceback.rstrip()]
    for rank in sorted(witnesses):
        told = stacks.get(rank, "").rstrip() or "  none: the rank does not answer"
        parts += ["", f"stacks of rank {rank} (process {witnesses[rank].pid}):", told]
    if hint:
        parts += ["", hint]
    return "\n".join([*parts, _RULE, ""])


def worker_frame(stacks: str) -> tuple[str, str] | None:
    """A data worker of these stacks and its place: the innermost frame of its main thread that reads the dataset."""
    for block in re.split(r"(?m)^data worker ", stacks)[1:]:
        frames = re.findall(r'(?m)^  File "([^"]+)", line (\d+) in (\S+)', block)
        inner = [one for one in frames if one[2] in ("__getitem__", "__getitems__", "__next__", "__iter__")]
        own = [one for one in inner if "/torch/" not in one[0]]
        if own:
            file, number, name = own[0]
            return block.split(":")[0], f"{file}:{number} in {name}"
    return None


def placed(record: RankRecord, stacks: str) -> RankRecord:
    """The record with the line that reads the dataset, where the rank waits for a data worker."""
    worker = worker_frame(stacks) if record.waits_for_worker else None
    return record if worker is None else replace(record, place=worker[1])


def _doing(one: RankRecord) -> str:
    if one.left is not None:
        return f"step {one.step}, left the run with exit code {one.left}"
    if one.failure is not None:
        return f"step {one.step}, {_exception(one.failure)}"
    since = f"; no progress for {one.idle:.1f} s" if one.idle >= 1 else ""
    state = " (its process is gone)" if one.is_gone else " (its process is stopped)" if one.is_stopped else ""
    return f"step {one.step}, {one.activity}{since}{state}"


def _exception(failure: Failure) -> str:
    line = " ".join(failure.text.split())
    text = line if len(line) <= 300 else line[:297] + "..."
    return f"{failure.kind}: {text}" if failure.text else failure.kind
