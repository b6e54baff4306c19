"""Applies what was asked of the run while it runs: values that were set, and commands that callbacks carry out."""

from __future__ import annotations

import logging
from collections import deque
from pathlib import Path

from onstep.config.suggestions import shown
from onstep.errors import ConfigError
from onstep.events import Request
from onstep.events.control import FLAGS, STICKY
from onstep.events.settings import SETTABLE, check_setting
from onstep.training.run import Run
from onstep.training.runs.run_dir import RunDir
from onstep.training.runs.steering import (
    CHANGED,
    FAILED_AFTER,
    WITHDRAWN,
    Sent,
    Steering,
    branch_at,
    commands_on_end,
    decisions_after,
    first_change,
    ids_to_repeat,
    is_last_change,
    last_within,
    withdrawable,
)
from onstep.training.stages.agreement import agree, append_decision, refuse, write_decision
from onstep.training.stages.job import Job

logger = logging.getLogger(__name__)

_LENGTH = ("train.train_iters", "train.train_samples", "train.num_epochs")


def apply_overrides(job: Job) -> None:
    """Apply values that were set during the run and act outside the loop's own decisions."""
    steering, overrides, scheduler = job.steering, job.run.train_state.overrides, job.scales_rates
    if scheduler is not None:
        factor = overrides.get("lr_factor", 1.0)
        if scheduler.lr_factor != factor:
            scheduler.lr_factor = factor
    if steering.applied != overrides:
        steering.applied = dict(overrides)
        if scheduler is None and "lr_factor" in overrides and job.run.world.is_main:
            logger.warning("lr_factor=%s has no effect: the run's scheduler cannot be scaled", overrides["lr_factor"])
        if "log_straggler" in overrides and not job.run.cfg.straggler.log_straggler and job.run.world.is_main:
            logger.warning("log_straggler has no effect: start the run with straggler.log_straggler=true")
        _apply_to_callbacks(job.run, steering)


def _apply_to_callbacks(run: Run, steering: Steering) -> None:
    overrides, declared = run.train_state.overrides, run.control.declared
    for key, one in declared.items():
        if key in overrides:
            steering.configured.setdefault(key, (one, one.value))
            one.put(overrides[key])
        elif key in steering.configured:
            was_declared, value = steering.configured.pop(key)
            was_declared.put(value)
    missing = [key for key in overrides if "." in key and key not in declared]
    if missing and run.world.is_main:
        logger.warning("set in an earlier part of this run, but no callback declares it now: %s", ", ".join(missing))


def fire_commands(job: Job) -> None:
    """Let callbacks carry out the commands that ranks have agreed on, and record each with its result."""
    commands, job.steering.commands = job.steering.commands, []
    for request in commands:
        try:
            job.notify.on_command(request=request)
        except Exception as error:
            refuse(job.run, request, f"{type(error).__name__}: {error}")
            raise
        write_decision(job.run, request)


def refuse_undone(run: Run) -> None:
    """Refuse the agreed rollback that the end of the training has prevented, so that no later start repeats it."""
    request, run.control.rollback_request = run.control.rollback_request, None
    if request is not None and request.is_steered:
        refuse(run, request, "training ended before this was done; send it again")


def lift_end(run: Run) -> None:
    """Lift what would end the run although its user continues it with other settings.

    That is a decided stop, one that is still to be repeated and, if the length is among the settings, a number of steps
    that was set while it ran. Each start from an older checkpoint lifts it again, but not what was sent since.
    """
    changes, ending = run.ending.changes, run.ending
    if not changes:
        return
    has_other_length = any(one.key in _LENGTH for one in changes)
    for flag in STICKY:
        run.control.clear(flag)
    stopped_by, ending.stopped_by = ending.stopped_by, None
    num_steps = run.train_state.overrides.pop("train_iters", None) if has_other_length else None
    if not run.world.is_main:
        return
    settings = ", ".join(f"{one.key} was {shown(one.old)} and is {shown(one.new)}" for one in changes)
    lifted = [] if run.run_dir is None else _replace_commands(run, run.run_dir.decisions, settings, has_other_length)
    if stopped_by is not None and not stopped_by.is_steered:
        lifted.append(str(stopped_by))
    for what in lifted:
        logger.warning("the run continues with other settings (%s); no longer in force: %s", settings, what)
    if num_steps is not None and not lifted:
        logger.info("train_iters=%s, which was set while the run ran, is no longer in force", num_steps)


def _replace_commands(run: Run, decisions: Path, settings: str, has_other_length: bool) -> list[str]:
    """Record, once, that the run continues with other settings, and which commands they replace; the commands."""
    if is_last_change(decisions, settings):
        return []
    commands = commands_on_end(decisions, with_length=has_other_length)
    replaced = {one.request.details["command_id"]: f"after step {one.step}: {one.request}" for one in commands[::-1]}
    reason = "; ".join([settings, *(f"no longer in force: {what}" for what in replaced.values())])
    details = {"settings": settings, "command_ids": list(replaced)}
    append_decision(run, Request(CHANGED, "checkpoint.on_config_change", "", reason, 0, details))
    return list(replaced.values())


def load_repeats(run: Run) -> None:
    """Read what the run was sent between its checkpoint and its interruption, to repeat it. Collective."""
    steering, checkpoints, directory = run.features.room(Steering), run.checkpoints, run.run_dir
    if directory is None or checkpoints is None:
        return
    if run.world.is_main and (since := _beginning(run, directory)) is not None:
        step = 0 if checkpoints.start is None else checkpoints.start.step
        _name_change(directory.decisions)
        _withdraw(run, directory.decisions)
        found = decisions_after(directory.decisions, step, since=since)
        steering.branch = branch_at(directory.decisions, step)
        steering.repeats = deque(one for one in found if _can_be_repeated(run, one))
        steering.last = last_within(directory.decisions, step)
    shared = run.world.share((steering.branch, steering.repeats, steering.last))
    steering.branch, steering.repeats, steering.last = shared


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
    if run.stage.is_resumed:
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
    except ConfigError as error:
        refuse(run, request, str(error), step)
        logger.warning("a command after step %d is not repeated: %s", step, error)
        return False
    return True


def repeat_decisions(job: Job) -> bool:
    """Request again what the run was asked for after this step, before it was interrupted; whether there was anything.

    It comes before what the run is asked for now. What followed a rollback waits until the rollback is done; a stop
    waits until what preceded it is agreed, which would be refused with it. A callback's rollback that several processes
    recorded, or that another one preceded, is waited for once. Collective.
    """
    steering, step, control, is_any = job.steering, job.run.train_state.step, job.run.control, False
    if not steering.repeats:
        return False
    requests: list[Request] = []
    while control.rollback_request is None and (one := _next_repeat(steering)) and one.step <= step:
        _, request, branch = steering.repeats.popleft()
        steering.branch = max(steering.branch, branch)
        if request.flag in STICKY and any(one.flag not in FLAGS for one in requests):
            _request_again(job.run, requests)
            agree(job.run)
            requests = []
        if request.is_steered:
            requests.append(request)
            is_any = True
        if request.flag == "rollback":
            break
    _request_again(job.run, requests)
    return is_any


def _request_again(run: Run, requests: list[Request]) -> None:
    """Request what is repeated, on rank 0, before what is asked for now."""
    if run.world.is_main:
        run.control.requests[:0] = requests
        for flag in {one.flag for one in requests} & {*FLAGS}:
            run.control.set_flag(flag)


def _next_repeat(steering: Steering) -> Sent | None:
    while steering.repeats and _is_over(steering.repeats[0], steering.branch):
        steering.repeats.popleft()
    return steering.repeats[0] if steering.repeats else None


def _is_over(sent: Sent, branch: int) -> bool:
    """Whether it is a callback's rollback from a branch that a rollback has ended since."""
    return sent.branch < branch and not sent.request.is_steered


def blame_command(run: Run, error: BaseException | None) -> None:
    """Name the command that may be the cause of the run's failure, and the way to continue without it.

    A loss that is NaN or spikes can follow a command many steps later; of another error, only the next step tells.

    Args:
        run: the run, which fails.
        error: what it fails with, which receives a note; None if it was stopped because of an anomaly.
    """
    last = run.features.room(Steering).last
    if last is None or isinstance(error, SystemExit | KeyboardInterrupt):
        return
    step, request = last
    if not (error is None or isinstance(error, ArithmeticError) or run.train_state.step <= step):
        return
    text = f"the last command that changes what is learned was applied after step {step}: {request}."
    if run.run_dir is not None:
        text += " If it is the cause, continue without it and what was sent later: " + (
            f"`onstep train {run.run_dir.path} --without-commands-from {step}`, or "
            f"run.without_commands_from={step} in the configuration."
            if run.trainer is None
            else f"config_overrides={{'run.without_commands_from': {step}}} in TrainingArguments."
        )
    if error is not None:
        error.add_note(text)
    elif run.world.is_main:
        logger.warning("%s", text)
    if run.world.is_main and run.run_dir is not None:
        details = {"command_step": step, "command_id": request.details.get("command_id")}
        append_decision(run, Request(FAILED_AFTER, "the loop", "", text, 0, details))
