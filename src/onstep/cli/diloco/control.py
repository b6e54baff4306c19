"""`onstep diloco control`: changes a running server."""

from __future__ import annotations

import json
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
    SHUTDOWN = "shutdown"


_RELAYED = (Action.STOP, Action.SAVE_STOP, Action.ABORT)
"""Commands for all workers."""


def control(
    action: Annotated[
        Action,
        typer.Argument(
            help="save: write a checkpoint, with --workers every worker its own; stop, save-stop, abort: end the "
            "training of all workers; kick: evict --worker; set: --lr, --momentum, --num-workers; shutdown: end the "
            "server."
        ),
    ],
    server: Server = DEFAULT_SERVER,
    worker: Annotated[str | None, typer.Option(help="The worker to evict; it may join again.")] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate of the outer optimizer, from the next round.")] = None,
    momentum: Annotated[float | None, typer.Option(help="Its momentum.")] = None,
    num_workers: Annotated[int | None, typer.Option(help="Workers that are expected.")] = None,
    workers: Annotated[bool, typer.Option("--workers", help="With save: all workers save, not the server.")] = False,
    token_file: TokenFile = None,
    ca_file: CaFile = None,
) -> None:
    """Change a running server: save, stop all workers, evict one, set the outer optimizer's rates, shut down."""
    if action in _RELAYED or workers:
        commands = _relayed(action, lr, momentum, num_workers, worker)
    else:
        commands = _commands(action, worker, {"lr": lr, "momentum": momentum}, num_workers)
    with connect(server, token_file, ca_file) as client:
        for name, body in commands:
            for answer in client.control(name, body):
                print(json.dumps(answer))


def _relayed(action: Action, *others: object) -> list[tuple[str, dict[str, Any]]]:
    if action not in (*_RELAYED, Action.SAVE) or any(one is not None for one in others):
        raise ConfigError(
            "--workers belongs to `onstep diloco control save`; stop, save-stop and abort have no option."
        )
    return [("command", {"command": action.value})]


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
