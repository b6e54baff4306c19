"""`onstep control list|cleanup`: the registered jobs."""

from __future__ import annotations

import json
import os
from typing import Annotated, Any

import typer

from onstep.analysis.text_tables import table
from onstep.cli.cells import counted, time_shown
from onstep.cli.control.options import AsJson, Force, Remote, TokenFile
from onstep.cli.control.outcome import confirm
from onstep.cli.control.target import client_for, run_name
from onstep.errors import ConfigError

TTL_VARIABLE = "ONSTEP_ORPHAN_JOB_DIR_TTL_SECONDS"
_TTL_SECONDS = 3600.0


def list_(as_json: AsJson = False, remote: Remote = None, token_file: TokenFile = None) -> None:
    """List the jobs that can be steered, running ones first.

    Dead ones ended without removing their entry, as after a kill; `onstep control cleanup` removes it. Of jobs on other
    machines that share the directory, it is unknown whether they are running.
    """
    jobs = sorted(client_for(remote, token_file).described_jobs(), key=lambda one: (not one["alive"], -_started(one)))
    if as_json:
        print(json.dumps(jobs, indent=2))
    elif not jobs:
        print("No job is registered. `onstep train --control` starts one that can be steered.")
    else:
        rows = [["status", "job", "run", "host", "port", "pid", "started"], *map(_row, jobs)]
        print("\n".join(table(rows, "<<<<>><", indent="", shrink=2)))


def cleanup(
    force: Force = False,
    ttl: Annotated[
        float | None,
        typer.Option(
            min=0,
            metavar="SECONDS",
            help="Also remove directories without an endpoint.json that are older than this; default: the variable "
            f"{TTL_VARIABLE}, else 3600.",
        ),
    ] = None,
    other_hosts: Annotated[
        bool,
        typer.Option(
            "--other-hosts",
            help="Also remove entries of other machines that share the directory, where jobs may still be running, and "
            "directories without an endpoint.json of any age.",
        ),
    ] = False,
) -> None:
    """Remove what dead jobs have left in the registry; asks first."""
    from onstep.control.registry import cleanup as clean

    seconds = ttl_seconds(ttl)
    dead = clean(seconds, force=other_hosts, is_dry=True)
    if not dead:
        print("Nothing to remove.")
        return
    print("\n".join(dead))
    confirm(f"Remove the entries of {counted(len(dead), 'job')}?", force=force)
    removed = clean(seconds, force=other_hosts)
    print(f"Removed {counted(len(removed), 'entry')}.")


def ttl_seconds(option: float | None) -> float:
    """The age at which a directory without endpoint.json is removed: the option, else the environment, else an hour.

    Raises:
        ConfigError: if the variable is not a number >= 0.
    """
    if option is not None:
        return option
    text = os.environ.get(TTL_VARIABLE)
    if not text:
        return _TTL_SECONDS
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not seconds >= 0:
        raise ConfigError(f"{TTL_VARIABLE} must be a number of seconds >= 0, got {text!r}; correct or unset it.")
    return seconds


def _row(job: dict[str, Any]) -> list[str]:
    place = job.get("uds") or job.get("host") or "-"
    port = "-" if job.get("uds") or not job.get("port") else str(job["port"])
    started = (time_shown(job.get("started_at")) or "-")[:16]
    is_elsewhere = not job.get("is_here", True)
    status = "running" if job["alive"] else f"on {job.get('hostname')}" if is_elsewhere else "dead"
    return [status, str(job["job_id"]), run_name(job) or "-", str(place), port, str(job.get("pid") or "-"), started]


def _started(job: dict[str, Any]) -> float:
    started = job.get("started_at")
    return float(started) if isinstance(started, (int, float)) else 0.0
