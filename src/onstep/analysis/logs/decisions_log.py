"""Reads a run's `decisions.jsonl`, and puts decisions into words."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from onstep.analysis.logs.record_file import objects_in
from onstep.commands import decided_words, fill

Decision = dict[str, Any]

FILE_NAME = "decisions.jsonl"
"""Its place is next to the metrics log."""
EVERYDAY = ("should_log", "should_evaluate")
"""Flags of what happens all the time."""
_WHAT = {
    "rolled_back": "rolled back to step {to_step}",
    "forked": "forked from {run} at the end of step {step}",
    "refused": "{refused} refused ({why})",
    "changed": "commands replaced by changed settings",
    "saved": "checkpoint of step {checkpoint_step} saved",
    "withdrawn": "commands withdrawn",
    "failed_after": "failed after a command",
    "raised": "ended with an error",
    "rerun_exit": "exited because a result may be wrong",
}
"""What else the loop records, with details in braces."""
_EXITS = {"16": " (restart, on another device if possible)", "17": " (the fault is known)"}


def read_decisions(path: Path) -> Iterator[Decision]:
    """The decisions in the order they were written; a line torn by a crash, or too long, is skipped."""
    return objects_in(path)


def decision_lines(decision: Decision) -> list[str]:
    """A decision in words, without its step and time; what belongs to it is in the lines after the first."""
    flag, details = str(decision.get("flag", "?")), details_of(decision)
    what = fill(_WHAT[flag], {"refused": "a request", **details}) if flag in _WHAT else decided_words(flag, details)
    lines = [f"{what}, {by_whom(decision)}"]
    if flag in ("skip", "rollback", "should_training_stop", "raised") and "anomaly" in details:
        lines.append(f"    loss {details.get('loss')}, gradient norm {details.get('grad_norm')}")
    if isinstance(worst := details.get("worst_samples"), list):
        lines.append(f"    largest losses: {', '.join(map(_sample_words, worst))}")
    if flag in ("skip", "rollback") and details.get("sample_ids") is not None:
        lines.append(f"    skipped from the next epoch on: samples {_shortened(details['sample_ids'])}")
    if flag == "raised" and details.get("sample_ids") is not None:
        lines.append(f"    the update was not applied; samples {_shortened(details['sample_ids'])}")
    if flag == "rerun_exit":
        saved = "with a checkpoint from before the step" if details.get("checkpoint") else "without a checkpoint"
        lines.append(
            f"    exit code {details.get('exit_code')}{_EXITS.get(str(details.get('exit_code')), '')}; {saved}"
        )
    if flag == "rolled_back":
        factor = details.get("lr_factor", 1.0)
        rate = "" if factor == 1.0 else f"; the factor on the learning rate is now {factor}"
        lines.append(f"    the data continues after step {details.get('bad_step')}{rate}")
    return lines


def by_whom(decision: Decision) -> str:
    """Who made a decision, when in a step, and why."""
    event, rank, reason = decision.get("event"), decision.get("rank", 0), decision.get("reason")
    where = f" during {event}" if event else ""
    on = f" on {decision.get('place') or f'rank {rank}'}" if rank else ""
    return f"by {decision.get('author', 'unknown')}{where}{on}" + (f": {reason}" if reason else "")


def details_of(decision: Decision) -> dict[str, Any]:
    """What a decision is about; {} if it says nothing."""
    details = decision.get("details")
    return details if isinstance(details, dict) else {}


def _sample_words(sample: Any) -> str:
    if not isinstance(sample, dict):
        return str(sample)
    name = f"sample {sample.get('sample_id')}"
    if sample.get("sample_id") is None:
        place = sample.get("place") or f"rank {sample.get('rank')}"
        name = f"{place}, micro-batch {sample.get('micro_batch')}, row {sample.get('row')}"
    share = sample.get("share")
    of_step = f", {share:.0%} of the step's" if isinstance(share, float) else ""
    return f"{name} (loss {sample.get('loss')}{of_step})"


def _shortened(ids: Any, most: int = 12) -> str:
    if not isinstance(ids, list) or len(ids) <= most:
        return str(ids)
    return f"{ids[:most]} and {len(ids) - most} more"
