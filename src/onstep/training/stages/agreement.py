"""Turns requests of any rank into one decision, at one step, on all ranks."""

from __future__ import annotations

import logging
import re
import time
from dataclasses import replace
from typing import Any

from onstep.events import Request
from onstep.events.control import STICKY
from onstep.events.views import configured_values
from onstep.training.run import Run
from onstep.training.runs.decisions import BATCHES_TO_SKIP, BRANCH, DecisionLog

logger = logging.getLogger(__name__)

IDS_SHOWN = 12
"""Sample ids of one list that a message about several steps shows; the metrics log has them all."""
_IDS = re.compile(r"\[(-?\d+(?:, -?\d+)+)\]")


def agree(state: Run) -> None:
    """Make the control's flags the same on all ranks: a flag set on any rank is set on all. Collective.

    Authors and reasons are exchanged in a second collective, only if something was requested. Decisions are appended to
    the run's `decisions.jsonl`; values that were set are in effect on return.
    """
    control, world = state.control, state.world
    watch, checkpoints = state.exits, state.checkpoints
    writes = checkpoints is not None and checkpoints.is_writing
    if world.size == 1:
        signalled = watch.handler is not None and watch.handler.received
        if signalled or watch.straggler or watch.deadline is not None or watch.allocation is not None:
            watch.set_agreed(watch.votes(world.is_main))
        if checkpoints is not None:
            checkpoints.some_rank_writes = writes
        if state.ending.stopped_by is not None:
            _forget_withdrawn_stop(state)
        if control.requests:
            record(state, control.pop_requests())
        return
    votes = [*watch.votes(world.is_main), int(writes), int(control.has_pre_update_listener)]
    agreed = world.agree([*votes, *control.vector()])
    *exits, any_writes, any_listener = agreed[: len(votes)]
    watch.set_agreed(exits)
    if checkpoints is not None:
        checkpoints.some_rank_writes = bool(any_writes)
    control.any_pre_update_listener = bool(any_listener)
    any_request = control.set_agreed(agreed[len(votes) :])
    _forget_withdrawn_stop(state)
    if any_request:
        record(state, [request for of_rank in world.gather(control.pop_requests()) for request in of_rank])


def record(state: Run, requests: list[Request]) -> None:
    """Act on the requests of all ranks, in rank order, and append them to the run's `decisions.jsonl`.

    It keeps who requested the end of training or a rollback; of two values for one key, the later one wins. A command
    is recorded once callbacks have carried it out, a pause once the run waits.
    """
    is_training = state.ending.training == "during"
    for request in sorted(requests, key=_needs_a_step):  # last: do any steps follow?
        if request.flag in STICKY and state.ending.stopped_by is None and is_training:
            state.ending.stopped_by = request
        if _needs_a_step(request) and is_training and _has_ended(state):
            what = "batch to skip" if request.flag == "skip_batch" else "step that the value could change"
            refuse(state, request, f"the run ends after this step, so there is no {what}")
            continue
        _take_note(state, request)
        state.features.requested(request)
        if request.flag not in ("command", "pause"):
            write_decision(state, request)
        if request.flag == "rollback" and state.control.rollback_request is not request:
            refuse(state, request, "another rollback was requested in the same step")


def _needs_a_step(request: Request) -> bool:
    """Whether it acts on the steps that follow; the length of a run decides whether any do."""
    is_set = request.flag == "set" and request.is_steered
    return request.flag == "skip_batch" or (is_set and request.details.get("key") != "train_iters")


def _has_ended(run: Run) -> bool:
    """Whether no step follows, in this process or another one."""
    control = run.control
    if control.should_training_stop or control.should_abort_without_save:
        return True
    return control.rollback_request is None and (run.stage.data_exhausted or run.has_all_steps)


def refuse(run: Run, request: Request, why: str, step: int | None = None) -> None:
    """Record that a request is not met, and why. `step` is the one that it concerns, if not the last."""
    details = request.details | {"refused": request.flag, "why": why}
    write_decision(run, replace(request, flag="refused", details=details), step)


def _take_note(run: Run, request: Request) -> None:
    """Keep an agreed request that is not one of the control's flags with the progress of the run."""
    match request.flag:
        case "skip_batch":
            overrides = run.train_state.overrides
            overrides[BATCHES_TO_SKIP] = overrides.get(BATCHES_TO_SKIP, 0) + request.details["count"]
        case "set":
            _set(run, request)
        case "rollback" if run.control.rollback_request is None:
            run.control.rollback_request = request


def _set(run: Run, request: Request) -> None:
    key, value, overrides = request.details["key"], request.details["value"], run.train_state.overrides
    request.details["old"] = current_value(run, key)
    if value is None:
        overrides.pop(key, None)
    else:
        overrides[key] = value


def current_value(run: Run, key: str) -> Any:
    """The value in force of something that can be set during the run."""
    if key in run.train_state.overrides:
        return run.train_state.overrides[key]
    declared = run.control.declared.get(key)
    return configured_values(run).get(key) if declared is None else declared.value


def write_decision(state: Run, request: Request, step: int | None = None) -> None:
    """Append a decision to the run's `decisions.jsonl` and fire `on_decision`, on rank 0; a crash loses at most a line.

    `step` is the step that it concerns; None is the last completed one.
    """
    if not state.world.is_main:
        return
    append_decision(state, request, step)
    with state.world.main_only(remedy="use an event that fires on all ranks; on_decision fires on rank 0"):
        state.entry_point.fire("on_decision", request=request)


def append_decision(state: Run, request: Request, step: int | None = None) -> None:
    """Append a decision to the record and to `decisions.jsonl`, if the run has a directory; on rank 0."""
    if state.run_dir is None:
        return
    place = state.world.place(request.rank)
    decision = vars(request) if place == f"rank {request.rank}" else {**vars(request), "place": place}
    if request.flag != "saved":  # its checkpoint has a line of its own
        state.note("decision", decision, step)
    log = state.features.room(DecisionLog)
    head = {"timestamp": time.time(), "step": state.train_state.step if step is None else step, BRANCH: log.branch}
    try:
        log.append(state.run_dir.decisions, {**head, **decision})
    except OSError as error:
        logger.warning("a decision (%s) could not be recorded: %s", request, error)


def _forget_withdrawn_stop(state: Run) -> None:
    if state.ending.stopped_by is not None and not any(getattr(state.control, flag) for flag in STICKY):
        state.ending.stopped_by = None


def shorten_ids(text: str) -> str:
    """The text with every list of sample ids cut to its first `IDS_SHOWN` and a count."""

    def cut(match: re.Match[str]) -> str:
        ids = match[1].split(", ")
        if len(ids) <= IDS_SHOWN:
            return match[0]
        return f"[{', '.join(ids[:IDS_SHOWN])}, ... and {len(ids) - IDS_SHOWN} more]"

    return _IDS.sub(cut, text)
