"""`onstep control save|stop|pause|...`: the commands that are sent to a job, made from the table of commands."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from onstep.cli.control.options import AsJson, Force, Job, Remote, TokenFile, Wait
from onstep.cli.control.outcome import confirm, show
from onstep.cli.control.target import Target, find_target
from onstep.commands import Command, Parameter
from onstep.config.suggestions import shown
from onstep.errors import ConfigError, DataError
from onstep.files.bounded_reading import parse_json


def verb_of(command: Command) -> Callable[..., None]:
    """The function of a command, as Typer reads its options."""

    def send(
        *,
        job: str | None,
        as_json: bool,
        remote: str | None,
        token_file: Path | None,
        force: bool = False,
        wait: bool = True,
        **data: Any,
    ) -> None:
        target = find_target(job, remote, token_file)
        if command.loses:
            confirm(f"{command.label} {target.job_id}? {command.warning}", force=force)
        _send(target, command.name, data, wait=wait, as_json=as_json)

    options: dict[str, tuple[Any, Any]] = {"job": (Job, None)}
    options |= {one.name: _option(one) for one in command.parameters}
    options |= {"force": (Force, False)} if command.loses else {}
    options |= {"wait": (Wait, False)} if command.wait is None else {}
    options |= {"as_json": (AsJson, False), "remote": (Remote, None), "token_file": (TokenFile, None)}
    kind = inspect.Parameter.KEYWORD_ONLY
    signature = inspect.Signature(
        [inspect.Parameter(name, kind, default=default, annotation=one) for name, (one, default) in options.items()]
    )
    vars(send).update(__signature__=signature)
    send.__annotations__ = {name: annotation for name, (annotation, _) in options.items()}
    send.__doc__ = f"{command.help}."
    if command.loses:
        send.__doc__ += f"\n\n{command.warning.removesuffix('.')}, so it asks first."
    return send


def _option(parameter: Parameter) -> tuple[Any, Any]:
    """The type and the default of an option."""
    is_list = parameter.kind is list
    option = typer.Option(
        ... if parameter.required else parameter.default,
        *parameter.options,
        min=parameter.least,
        max=parameter.most,
        metavar="TEXT" if is_list else None,
        help=parameter.help + ("; repeatable." if is_list else "."),
    )
    kind: Any = list[str] if is_list else parameter.kind
    return kind | None if parameter.may_be_null else kind, option


def send(
    command: Annotated[str, typer.Argument(metavar="COMMAND", help="A command that a callback of the job declares.")],
    job: Job = None,
    data: Annotated[str, typer.Option(metavar="JSON", help="What to send with it: a JSON object.")] = "{}",
    wait: Wait = False,
    as_json: AsJson = False,
    remote: Remote = None,
    token_file: TokenFile = None,
) -> None:
    """Send any command by its name, such as one that a callback of the job declares."""
    _send(find_target(job, remote, token_file), command, _object(data), wait=wait, as_json=as_json)


def _object(text: str) -> dict[str, Any]:
    try:
        value = parse_json(text, "--data")
    except DataError:
        value = None
    if not isinstance(value, dict):
        raise ConfigError(f"--data must be a JSON object, such as '{{\"n\": 1}}', got {shown(text)}.")
    return value


def _send(target: Target, command: str, data: dict[str, Any] | None = None, *, wait: bool, as_json: bool) -> None:
    response = target.client.send_command(target.job_id, command, data, math.inf if wait else None)
    show(response, as_json=as_json)
