"""Who was first? Judges from what the ranks tell of themselves which one has failed, died or hung."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from onstep.training.rank_record import Failure, RankRecord

Kind = Literal["raised", "died", "hung", "alike", "left"]

ALIKE_SECONDS = 1.0
"""How long the other ranks have, after one has raised, to raise the same."""
CONSEQUENCE_SECONDS = 4.0
"""How long a lost connection waits for the rank that caused it to be found silent."""
SILENT_BEATS = 4.0
"""Missed publications after which a rank is silent, where something else says that it is gone."""


@dataclass(frozen=True)
class Witness:
    """A rank as another one sees it."""

    record: RankRecord
    silence: float = 0.0
    """Seconds since it last published anything."""
    is_gone: bool = False
    """Its process is known not to run any more."""
    is_stopped: bool = False
    """Its process is known to be stopped, as by SIGSTOP."""

    @property
    def idle(self) -> float:
        """Seconds without progress, its silence included."""
        return self.record.idle_seconds + self.silence

    @property
    def is_over(self) -> bool:
        """Whether it has left or failed, so that nothing more is to be expected of it."""
        return self.record.left is not None or self.record.failure is not None


@dataclass(frozen=True)
class Verdict:
    """Which rank was the first to fail, and how; `alike` and `left` need no report."""

    kind: Kind
    rank: int


def judge(
    witnesses: Mapping[int, Witness],
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
    if any(one.record.failure is not None for one in witnesses.values()):
        return _judge_failures(witnesses, interval, since_first_failure)
    running = {rank: one for rank, one in witnesses.items() if not one.is_over}
    gone = [rank for rank, one in running.items() if one.is_gone and _is_silent(one, interval)]
    if gone:
        return Verdict("died", gone[0])
    return _judge_stalls(running, stopped_seconds, on_cuda)


def _judge_failures(witnesses: Mapping[int, Witness], interval: float, since: float) -> Verdict | None:
    failed = sorted(
        (one.record.failure.order, rank) for rank, one in witnesses.items() if one.record.failure is not None
    )
    if any(one.record.left is not None and one.record.failure is None for one in witnesses.values()):
        return Verdict("left", failed[0][1])
    if _are_interrupted(witnesses):
        return Verdict("alike", failed[0][1])
    if len(failed) == len(witnesses) and _are_alike(witnesses):
        return Verdict("alike", failed[0][1])
    causes = [rank for _, rank in failed if not _is_consequence(witnesses[rank])]
    if causes:
        return Verdict("raised", causes[0]) if since >= ALIKE_SECONDS or len(failed) == len(witnesses) else None
    running = {rank: one for rank, one in witnesses.items() if not one.is_over}
    silent = [(-one.silence, rank) for rank, one in running.items() if _is_silent(one, interval)]
    if silent:
        return Verdict("died", min(silent)[1])
    return Verdict("raised", failed[0][1]) if since >= CONSEQUENCE_SECONDS else None


def _is_silent(one: Witness, interval: float) -> bool:
    """Whether it has published nothing for so long that, with something else wrong, it counts as dead."""
    return one.silence >= max(1.0, SILENT_BEATS * interval)


def _are_alike(witnesses: Mapping[int, Witness]) -> bool:
    failures = [one.record.failure for one in witnesses.values()]
    return len({(one.kind, one.text) for one in failures if one is not None}) == 1


def _are_interrupted(witnesses: Mapping[int, Witness]) -> bool:
    """Whether all ranks were sent SIGINT, as by Ctrl-C; one that waits in a collective cannot raise it yet."""
    return all(
        one.record.is_interrupted or (one.record.failure is not None and one.record.failure.kind == "KeyboardInterrupt")
        for one in witnesses.values()
    )


def _is_consequence(one: Witness) -> bool:
    return one.record.failure is not None and one.record.failure.is_consequence


def _judge_stalls(running: Mapping[int, Witness], stopped_seconds: float | None, on_cuda: bool) -> Verdict | None:
    """A rank that waits in a collective for one that has not arrived is a victim of that one, which may be slow."""
    if not running or any(one.record.is_debugged for one in running.values()):
        return None
    fewest = min(one.record.collectives for one in running.values())
    found = []
    for rank, one in running.items():
        is_ahead = one.record.collectives > fewest and (one.record.is_waiting or on_cuda)
        if not is_ahead and _is_stalled(one, stopped_seconds):
            found.append((one.record.collectives, one.record.is_waiting, -one.idle, rank))
    return Verdict("hung", min(found)[-1]) if found else None


def _is_stalled(one: Witness, stopped_seconds: float | None) -> bool:
    limit = one.record.limit_seconds
    if limit is None and one.is_stopped:
        limit = stopped_seconds
    return limit is not None and one.idle >= limit


_RULE = "=" * 100


def first_line(verdict: Verdict, one: Witness) -> str:
    """The verdict in one line: rank, what happened, step, event and callback, place."""
    record = one.record
    where = f" at {record.place}" if record.place else ""
    at = f"at step {record.step}, while {record.activity}{where}"
    if verdict.kind == "raised" and record.failure is not None:
        return f"rank {verdict.rank} failed first {at}: {_exception(record.failure)}"
    if verdict.kind == "died":
        return f"rank {verdict.rank} is gone (its process was killed or has crashed); it was last heard of {at}"
    if one.is_stopped:
        return f"rank {verdict.rank} hangs: its process is stopped, for {one.idle:.1f} s; it was last heard of {at}"
    silent = ", and its interpreter does not answer" if one.silence > 0 else ""
    return f"rank {verdict.rank} hangs: no progress for {one.idle:.1f} s{silent}, {at}"


def report(
    verdict: Verdict, line: str, witnesses: Mapping[int, Witness], stacks: Mapping[int, str], hint: str = ""
) -> str:
    """The whole report, with the exception of the culprit and the stacks of all ranks that have given theirs."""
    parts = [_RULE, f"first culprit: {line}"]
    worker = worker_frame(stacks.get(verdict.rank, ""))
    if worker is not None and verdict.kind == "hung":
        parts.append(f"  its data worker {worker[0]} stands at {worker[1]}")
    parts += ["", "what each rank was last doing:"]
    parts += [f"  rank {rank}: {_doing(one)}" for rank, one in sorted(witnesses.items())]
    failure = witnesses[verdict.rank].record.failure
    if failure is not None:
        parts += ["", f"exception of rank {verdict.rank}:", failure.traceback.rstrip()]
    for rank in sorted(witnesses):
        told = stacks.get(rank, "").rstrip() or "  none: the rank does not answer"
        parts += ["", f"stacks of rank {rank} (process {witnesses[rank].record.pid}):", told]
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


def _doing(one: Witness) -> str:
    record = one.record
    if record.left is not None:
        return f"step {record.step}, left the run with exit code {record.left}"
    if record.failure is not None:
        return f"step {record.step}, {_exception(record.failure)}"
    where = f" at {record.place}" if record.place else ""
    since = f"; no progress for {one.idle:.1f} s" if one.idle >= 1 else ""
    state = " (its process is gone)" if one.is_gone else " (its process is stopped)" if one.is_stopped else ""
    return f"step {record.step}, {record.activity}{where}{since}{state}"


def _exception(failure: Failure) -> str:
    return f"{failure.kind}: {_one_line(failure.text)}" if failure.text else failure.kind


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 300 else line[:297] + "..."
