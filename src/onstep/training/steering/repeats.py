"""Reads what a run was sent between its checkpoint and its interruption, and requests it again."""

from __future__ import annotations

import logging
from collections import deque
from pathlib import Path

from onstep.errors import ConfigError
from onstep.events import Request
from onstep.events.control import FLAGS, STICKY
from onstep.events.settings import SETTABLE, check_setting
from onstep.training.run import Run
from onstep.training.runs.decisions import WITHDRAWN, DecisionLog, Sent, first_change
from onstep.training.runs.run_dir import RunDir
from onstep.training.runs.sent_commands import branch_at, decisions_after, ids_to_repeat, last_within, withdrawable
from onstep.training.stages.agreement import agree, refuse, write_decision

logger = logging.getLogger(__name__)


def load_repeats(run: Run, log: DecisionLog) -> tuple[int, Request] | None:
    """Read what the run was sent between its checkpoint and its interruption, to repeat it. Collective.

    Returns:
        The last command within the checkpoint that can be the cause of a failure, and its step.
    """
    last: tuple[int, Request] | None = None
    checkpoints, directory = run.checkpoints, run.run_dir
    if directory is None or checkpoints is None:
        return None
    if run.world.is_main and (since := _beginning(run, directory)) is not None:
        step = -1 if checkpoints.start is None else checkpoints.start.step
        _name_change(directory.decisions)
        _withdraw(run, directory.decisions)
        found = decisions_after(directory.decisions, step, since=since)
        log.branch = branch_at(directory.decisions, step)
        log.repeats = deque(one for one in found if _can_be_repeated(run, one))
        last = last_within(directory.decisions, step)
    log.branch, log.repeats, last = run.world.share((log.branch, log.repeats, last))
    return last


def _name_change(decisions: Path) -> None:
    if (line := first_change(decisions)) is not None:
        logger.warning(
            "%s is not what the run had written: line %d was changed, or lines before it are lost, doubled or added. "
            "It was edited, or its disk has damaged it. What it says that the run was sent after its checkpoint is "
            "repeated; compare it with a copy if you have one.",
            decisions,
            line,
        )


def _beginning(run: Run, directory: RunDir) -> float | None:
    """The Unix time from which decisions are this run's, if it continues; None for a new run.

    A run that was interrupted before its first checkpoint continues from the start.
    """
    if run.is_resumed:
        return 0.0
    record = directory.read() if directory.run_json.exists() else {}
    return float(record.get("started_at", 0.0)) if "continued_at" in record else None


def _withdraw(run: Run, decisions: Path) -> None:
    """Record which commands `run.without_commands_from` withdraws."""
    from_step = run.cfg.run.without_commands_from
    if from_step is None:
        return
    commands = withdrawable(decisions, from_step)
    if not commands:
        logger.info("run.without_commands_from=%d: there is no command left to withdraw", from_step)
        return
    reason = "; ".join(f"after step {one.step}: {one.request}" for one in commands)
    details = {"from_step": from_step, "command_ids": ids_to_repeat(commands)}
    write_decision(run, Request(WITHDRAWN, "run.without_commands_from", "", reason, 0, details))
    logger.info("not repeated: %s", reason)


def _can_be_repeated(run: Run, sent: Sent) -> bool:
    """Refuse what could not be sent any more: another version recorded it, or the record is damaged."""
    step, request, _ = sent
    if not request.is_steered:
        return True
    details, declared = request.details, run.control.declared
    key, value = details.get("key"), details.get("value")
    try:
        if request.flag == "set" and (key in declared or key in SETTABLE or not isinstance(key, str) or "." not in key):
            check_setting(str(key), value, declared)
        elif request.flag == "rollback":
            check_setting("lr_factor", details.get("lr_factor"))
        elif request.flag == "skip_batch" and not isinstance(details.get("count"), int):
            raise ConfigError(f"count must be an integer, got {details.get('count')!r}.")
        elif request.flag == "leave_out" and not _are_ids(details.get("sample_ids")):
            raise ConfigError(f"sample_ids must be a list of integers, got {details.get('sample_ids')!r}.")
    except ConfigError as error:
        refuse(run, request, str(error), step)
        logger.warning("a command after step %d is not repeated: %s", step, error)
        return False
    return True


def _are_ids(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(one, int) for one in value)


def repeat(run: Run, log: DecisionLog) -> bool:
    """Request again what the run was asked for after this step, before it was interrupted; whether there was anything.

    It comes before what the run is asked for now. What followed a rollback waits until the rollback is done; a stop
    waits until what preceded it is agreed, which would be refused with it. A callback's rollback that several processes
    recorded, or that another one preceded, is waited for once. Collective.
    """
    is_any = False
    if not log.repeats:
        return False
    requests: list[Request] = []
    while run.control.rollback_request is None and (one := _next_repeat(log)) and one.step <= run.train_state.step:
        _, request, branch = log.repeats.popleft()
        log.branch = max(log.branch, branch)
        if request.flag in STICKY and any(one.flag not in FLAGS for one in requests):
            _request_again(run, requests)
            agree(run)
            requests = []
        if request.is_steered:
            requests.append(request)
            is_any = True
        if request.flag == "rollback":
            break
    _request_again(run, requests)
    return is_any


def _request_again(run: Run, requests: list[Request]) -> None:
    """Request what is repeated, on rank 0, before what is asked for now."""
    if run.world.is_main:
        run.control.requests[:0] = requests
        for flag in {one.flag for one in requests} & {*FLAGS}:
            run.control.set_flag(flag)


def _next_repeat(log: DecisionLog) -> Sent | None:
    while log.repeats and _is_over(log.repeats[0], log.branch):
        log.repeats.popleft()
    return log.repeats[0] if log.repeats else None


def _is_over(sent: Sent, branch: int) -> bool:
    """Whether it is a callback's rollback from a branch that a rollback has ended since."""
    return sent.branch < branch and not sent.request.is_steered
