"""`onstep control`: the group; what its commands need of the network is imported when they run."""

from __future__ import annotations

from collections.abc import Callable

from onstep.cli.application import application
from onstep.cli.control.listing import cleanup, list_
from onstep.cli.control.opening import open_
from onstep.cli.control.sending import send, verb_of
from onstep.cli.control.setting import set_
from onstep.cli.control.status import status
from onstep.cli.control.target import TOKEN_VARIABLE, group_without_tokens
from onstep.cli.control.watch import watch
from onstep.commands import COMMANDS

app = application(
    cls=group_without_tokens(TOKEN_VARIABLE),
    no_args_is_help=True,
    help="Watch and steer running jobs.\n\nA job can be steered if it was started with `onstep train --control` or "
    "has a TrainerControlCallback. JOB is its id, the beginning of one, or the name of its run; it may be omitted if "
    "one job is running.",
)

VERBS: dict[str, Callable[..., None]] = {
    "list": list_,
    "status": status,
    "watch": watch,
    **{one.verb: set_ if one.name == "set" else verb_of(one) for one in COMMANDS.values() if one.verb},
    "send": send,
    "open": open_,
    "cleanup": cleanup,
}
for _name, _function in VERBS.items():
    app.command(_name)(_function)
