"""The one report of a run that hangs or loses a rank: who was first, and what everybody was doing."""

from __future__ import annotations

import re
from collections.abc import Mapping

from onstep.training.first_culprit import Verdict, Witness
from onstep.training.rank_record import Failure

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
