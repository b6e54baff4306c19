"""`onstep diloco`: the group; what its commands need of torch and the network is imported when they run."""

from __future__ import annotations

from onstep.cli.application import application
from onstep.cli.control.target import group_without_tokens
from onstep.cli.diloco.control import control
from onstep.cli.diloco.server import server
from onstep.cli.diloco.simulate import simulate
from onstep.cli.diloco.status import status
from onstep.cli.diloco.token import token
from onstep.cli.diloco.worker import SETTINGS, worker

app = application(
    cls=group_without_tokens("DILOCO_TOKEN"),
    no_args_is_help=True,
    help="Train one model at several sites over ordinary networks (DiLoCo).\n\nStart one server, then a worker at each "
    "site; see the guide `Training across sites`.",
)
app.command("server")(server)
app.command("worker", context_settings=SETTINGS)(worker)
app.command("status")(status)
app.command("control")(control)
app.command("token")(token)
app.command("simulate")(simulate)
