"""`onstep diloco worker`: runs a training command as a worker of a server."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from onstep.cli.diloco.options import DEFAULT_SERVER, CaFile, Server
from onstep.errors import ConfigError

_OWN_COMMANDS = ("train", "finetune")

SETTINGS = {"allow_interspersed_args": False, "ignore_unknown_options": True}
"""Of the command line: all arguments after the training command belong to it."""


def worker(
    command: Annotated[
        list[str],
        typer.Argument(
            metavar="COMMAND ...",
            help="train or finetune with its arguments, or any program whose run has a DiLoCoCallback, as in "
            "`torchrun --nproc-per-node 2 -m onstep train ...`.",
        ),
    ],
    server: Server = DEFAULT_SERVER,
    worker_id: Annotated[
        str | None, typer.Option(help="Name of this worker in the run; it gets its share of the data back under it.")
    ] = None,
    sync_every: Annotated[
        int | None, typer.Option(help="Optimizer steps between two rounds; default: the server's.")
    ] = None,
    codec: Annotated[str | None, typer.Option(help="fp32, bf16, int8 or int4; default: the server's.")] = None,
    dylu: Annotated[
        bool | None, typer.Option("--dylu/--no-dylu", help="As many steps as the server recommends.")
    ] = None,
    heartbeat_interval: Annotated[float | None, typer.Option(help="Seconds between heartbeats.")] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="File with the server's token; not needed on the server's machine."),
    ] = None,
    ca_file: CaFile = None,
) -> None:
    """Train as a worker: onstep diloco worker --server HOST:8512 train config.yaml"""
    os.environ["DILOCO_SERVER"] = server
    values = {
        "WORKER_ID": worker_id,
        "SYNC_EVERY": sync_every,
        "CODEC": codec,
        "DYLU": dylu,
        "HEARTBEAT_INTERVAL": heartbeat_interval,
        "TOKEN_FILE": token_file,
        "CA_FILE": ca_file,
    }
    os.environ.update({f"DILOCO_{name}": str(value) for name, value in values.items() if value is not None})
    name, *rest = command
    if name in _OWN_COMMANDS:
        from onstep.cli.main import main

        raise typer.Exit(main([name, *rest]))
    try:
        os.execvp(name, command)
    except OSError as error:
        raise ConfigError(
            f"{name!r} is neither {' nor '.join(_OWN_COMMANDS)}, nor a program that can be started: {error.strerror}."
        ) from error
