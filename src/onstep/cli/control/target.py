"""Resolves JOB, --remote and --token-file to a client and the id of a job."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typer.core import TyperGroup

from onstep.config.suggestions import listed, nearest
from onstep.control import HTTPTrainerControlClient
from onstep.errors import ConfigError
from onstep.files.bounded_reading import read_bytes

TOKEN_VARIABLE = "ONSTEP_CONTROL_TOKEN"
_MOST_TOKEN_BYTES = 4096
_LISTED = 10


@dataclass(frozen=True)
class Target:
    """A job, and the client that reaches it."""

    client: HTTPTrainerControlClient
    job_id: str


def find_target(job: str | None, remote: str | None, token_file: Path | None) -> Target:
    """The job that the words of a command line name.

    Raises:
        ConfigError: if no job or several jobs fit.
        ControlError: if the remote server cannot be reached or refuses.
    """
    client = client_for(remote, token_file)
    jobs = client.described_jobs()
    if job is None and remote is not None:  # a job's server lists the other jobs of its machine too
        port = split_address(remote)[1]
        jobs = [one for one in jobs if one["alive"] and one.get("port") == port] or jobs
    return Target(client, choose(job, jobs))


def client_for(remote: str | None, token_file: Path | None) -> HTTPTrainerControlClient:
    """The client of the local jobs, or of the server at `remote`."""
    if remote is None:
        if token_file is not None:
            raise ConfigError("--token-file belongs to --remote; the tokens of local jobs are in the registry.")
        return HTTPTrainerControlClient()
    host, port = split_address(remote)
    return HTTPTrainerControlClient(host, port, read_token_of(token_file))


def split_address(address: str) -> tuple[str, int]:
    """Host and port of `HOST:PORT`; an IPv6 address is in brackets.

    Raises:
        ConfigError: for anything else.
    """
    host, _, port = address.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    is_host = bare and not set(bare) & set("/@?# ") and (":" not in bare or bare != host)
    if not is_host or not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise ConfigError(f"--remote must be HOST:PORT, such as 127.0.0.1:8900 or [::1]:8900, got {address!r}.")
    return bare, int(port)


def read_token_of(file: Path | None) -> str | None:
    """The token in a file, else in the environment; None if neither is given."""
    token = os.environ.get(TOKEN_VARIABLE, "") if file is None else _content(file)
    token = token.strip()
    if not token and file is not None:
        raise ConfigError(f"--token-file {file} is empty; it must contain the token of the server.")
    return token or None


def group_without_tokens(variable: str) -> type[TyperGroup]:
    """A group of commands that refuses a token among the arguments of any, and names the variable that can have it."""

    class Group(TyperGroup):
        def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
            refuse_tokens(args, variable)
            return super().parse_args(ctx, args)

    return Group


def refuse_tokens(words: Sequence[str], variable: str) -> None:
    """Refuse a token among the arguments, where every user of the machine could read it in the list of processes.

    Raises:
        ConfigError: if there is one; the message does not repeat it.
    """
    if any(word == "--token" or word.startswith("--token=") for word in words):
        raise ConfigError(
            "--token is not accepted: other users see the arguments of a process; write the token to a file that only "
            f"you can read and use --token-file FILE, or set {variable}."
        )


def choose(wanted: str | None, jobs: Sequence[dict[str, Any]]) -> str:
    """The id of the job that `wanted` names among `jobs`: an id, the name of a run, or the beginning of an id.

    Jobs that run come first; without `wanted`, exactly one must run.

    Raises:
        ConfigError: if none or several fit.
    """
    alive = [one for one in jobs if one["alive"]]
    if wanted is None:
        if len(alive) != 1:
            raise ConfigError(_none_or_several(alive))
        return str(alive[0]["job_id"])
    for candidates in (alive, jobs):
        ids = [str(one["job_id"]) for one in candidates]
        if wanted in ids:
            return wanted
        named = [str(one["job_id"]) for one in candidates if run_name(one) == wanted]
        fitting = named or [each for each in ids if each.startswith(wanted)]
        if len(fitting) > 1:
            raise ConfigError(f"{wanted!r} fits {len(fitting)} jobs: {listed(fitting, _LISTED)}; give the whole id.")
        if fitting:
            return fitting[0]
    known = [str(one["job_id"]) for one in (alive or jobs)]
    there = f" {'Running' if alive else 'Ended'}: {listed(known, _LISTED)}." if known else " No job is registered."
    raise ConfigError(f"there is no job {wanted!r}.{nearest(wanted, known)}{there}")


def run_name(job: dict[str, Any]) -> str:
    """The name of a job's run: that of its output directory."""
    return Path(str(job.get("output_dir") or "")).name


def _none_or_several(alive: Sequence[dict[str, Any]]) -> str:
    if not alive:
        return "no job is running; `onstep train --control` starts one that can be steered."
    shown = [f"{one['job_id']} ({run_name(one)})" if run_name(one) else str(one["job_id"]) for one in alive]
    return f"{len(alive)} jobs are running, name one of them: {listed(shown, _LISTED)}."


def _content(file: Path) -> str:
    return read_bytes(file, _MOST_TOKEN_BYTES).decode("utf-8", errors="replace")
