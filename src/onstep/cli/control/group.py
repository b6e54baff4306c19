"""`onstep control`: the group; what its commands need of the network is imported when they run."""

from __future__ import annotations

from collections.abc import Callable

from onstep.cli.application import application
from onstep.cli.control.listing import cleanup, list_
from onstep.cli.control.opening import open_
from onstep.cli.control.sending import abort, generate, plain, profile, rollback, send, skip, stacks
from onstep.cli.control.setting import set_
from onstep.cli.control.status import status
from onstep.cli.control.target import TOKEN_VARIABLE, group_without_tokens
from onstep.cli.control.watch import watch

app = application(
    cls=group_without_tokens(TOKEN_VARIABLE),
    no_args_is_help=True,
    help="Watch and steer running jobs.\n\nA job can be steered if it was started with `onstep train --control` or "
    "has a TrainerControlCallback. JOB is its id, the beginning of one, or the name of its run; it may be omitted if "
    "one job is running.",
)

_COMMANDS: dict[str, Callable[..., None]] = {
    "list": list_,
    "status": status,
    "watch": watch,
    "save": plain("save_checkpoint", "Save a checkpoint after this step."),
    "stop": plain("graceful_stop", "Stop after this step, with the final checkpoint, as if the run were complete."),
    "save-stop": plain("save_and_stop", "Save a checkpoint after this step, then stop."),
    "abort": abort,
    "pause": plain("pause", "Pause after this step until resumed; nothing is released."),
    "resume": plain("resume", "Continue a paused run."),
    "set": set_,
    "evaluate": plain("evaluate", "Evaluate after this step."),
    "skip": skip,
    "rollback": rollback,
    "generate": generate,
    "profile": profile,
    "stacks": stacks,
    "send": send,
    "open": open_,
    "cleanup": cleanup,
}
for _name, _function in _COMMANDS.items():
    app.command(_name)(_function)
