"""Arguments and options that the commands of `onstep control` share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def complete_jobs(incomplete: str) -> list[tuple[str, str]]:
    """The ids of running jobs, for the shell; asks no server."""
    from onstep.control.registry import is_alive, list_infos

    infos = [info for info in list_infos() if info.job_id.startswith(incomplete)]
    return [(info.job_id, info.output_dir or "") for info in infos if is_alive(info)]


Job = Annotated[
    str | None,
    typer.Argument(
        metavar="[JOB]",
        help="A job's id, the beginning of one, or the name of a run; may be omitted if one job is running.",
        autocompletion=complete_jobs,
    ),
]
Remote = Annotated[
    str | None,
    typer.Option("--remote", metavar="HOST:PORT", help="Ask the control server at this address, not the local jobs."),
]
TokenFile = Annotated[
    Path | None,
    typer.Option(
        "--token-file",
        metavar="FILE",
        help="File with the token for --remote; default: the variable ONSTEP_CONTROL_TOKEN.",
    ),
]
Wait = Annotated[
    bool, typer.Option("--wait", help="Wait until the job has applied the command; the exit code is 1 if it refuses.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Force = Annotated[bool, typer.Option("--force", help="Do not ask for confirmation.")]
