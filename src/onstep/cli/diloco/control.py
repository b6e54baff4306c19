"""`onstep diloco control`: changes a running server."""

from __future__ import annotations

import json
import sys
from enum import StrEnum
from typing import Annotated, Any

import typer

from onstep.cli.diloco.options import DEFAULT_SERVER, CaFile, Server, TokenFile, connect
from onstep.errors import ConfigError


class Action(StrEnum):
    """What can be asked."""

    SAVE = "save"
    KICK = "kick"
    SET = "set"
    STOP = "stop"
    SAVE_STOP = "save-stop"
    ABORT = "abort"
    GO_BACK = "go-back"
    SHUTDOWN = "shutdown"


_RELAYED = (Action.STOP, Action.SAVE_STOP, Action.ABORT)
"""Commands for all workers."""


def control(
    action: Annotated[
        Action,
        typer.Argument(
            help="save: write a checkpoint, with --workers every worker its own; stop, save-stop, abort: end the "
            "training of all workers; kick: evict --worker; set: --lr, --momentum, --num-workers; go-back: "
            "continue from an earlier --version; shutdown: end the server."
        ),
    ],
    server: Server = DEFAULT_SERVER,
    worker: Annotated[str | None, typer.Option(help="The worker to evict; it may join again.")] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate of the outer optimizer, from the next round.")] = None,
    momentum: Annotated[float | None, typer.Option(help="Its momentum.")] = None,
    num_workers: Annotated[int | None, typer.Option(help="Workers that are expected.")] = None,
    version: Annotated[
        int | None, typer.Option(help="The version to go back to; the status shows those that are kept.")
    ] = None,
    workers: Annotated[bool, typer.Option("--workers", help="With save: all workers save, not the server.")] = False,
    token_file: TokenFile = None,
    ca_file: CaFile = None,
) -> None:
    """Change a running server: save, stop all workers, evict one, set the outer rates, go back, shut down."""
    if action in _RELAYED or workers:
        commands = _relayed(action, lr, momentum, num_workers, worker, version)
    elif action is Action.GO_BACK:
        commands = _back(version, lr, momentum, num_workers, worker)
    else:
        commands = _commands(action, worker, {"lr": lr, "momentum": momentum}, num_workers)
    with connect(server, token_file, ca_file) as client:
        for name, body in commands:
            print(json.dumps(client.control(name, body)))
    if commands[0][0] == "command":
        print(
            "Each worker obeys after the step in which its next round or heartbeat has brought this, within 30 seconds "
            "by default; the server says who leaves.",
            file=sys.stderr,
        )


def _relayed(action: Action, *others: object) -> list[tuple[str, dict[str, Any]]]:
    if action not in (*_RELAYED, Action.SAVE) or any(one is not None for one in others):
        raise ConfigError(
            "--workers belongs to `onstep diloco control save`; stop, save-stop and abort have no option."
        )
    return [("command", {"command": action.value})]


def _back(version: int | None, *others: object) -> list[tuple[str, dict[str, Any]]]:
    if version is None or any(one is not None for one in others):
        raise ConfigError("go-back has one option, --version; see `onstep diloco status` for those that are kept.")
    return [("go_back", {"version": version})]


def _commands(
    action: Action, worker: str | None, rates: dict[str, float | None], num_workers: int | None
) -> list[tuple[str, dict[str, Any]]]:
    given = {name: value for name, value in rates.items() if value is not None}
    if action is not Action.SET and (given or num_workers is not None):
        raise ConfigError("--lr, --momentum and --num-workers belong to `onstep diloco control set`.")
    if action is Action.SAVE:
        return [("save_state", {})]
    if action is Action.SHUTDOWN:
        return [("shutdown", {})]
    if action is Action.KICK:
        if worker is None:
            raise ConfigError("--worker must name the worker to evict; see `onstep diloco status`.")
        return [("kick_worker", {"worker_id": worker})]
    commands: list[tuple[str, dict[str, Any]]] = [("update_optimizer", given)] if given else []
    if num_workers is not None:
        commands.append(("update_num_workers", {"num_workers": num_workers}))
    if not commands:
        raise ConfigError("--lr, --momentum or --num-workers must be given.")
    return commands
