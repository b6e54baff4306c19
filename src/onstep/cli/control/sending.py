"""`onstep control save|stop|pause|...`: the commands that are sent to a job."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Any

import typer

from onstep.cli.control.options import AsJson, Force, Job, Remote, TokenFile, Wait
from onstep.cli.control.outcome import confirm, show
from onstep.cli.control.target import Target, find_target
from onstep.config.suggestions import shown
from onstep.errors import ConfigError, DataError
from onstep.events.settings import MOST_LR_FACTOR
from onstep.files.bounded_reading import parse_json


def plain(command: str, text: str) -> Callable[..., None]:
    """The function of a command without data; `text` is its help."""

    def send(
        job: Job = None,
        wait: Wait = False,
        as_json: AsJson = False,
        remote: Remote = None,
        token_file: TokenFile = None,
    ) -> None:
        _send(find_target(job, remote, token_file), command, wait=wait, as_json=as_json)

    send.__doc__ = text
    return send


def abort(
    job: Job = None,
    force: Force = False,
    wait: Wait = False,
    as_json: AsJson = False,
    remote: Remote = None,
    token_file: TokenFile = None,
) -> None:
    """Stop after this step without saving anything.

    What was trained since the last checkpoint is lost, so it asks first.
    """
    target = find_target(job, remote, token_file)
    confirm(f"Abort {target.job_id}? What it has trained since its last checkpoint is lost.", force=force)
    _send(target, "abort", wait=wait, as_json=as_json)


def skip(
    job: Job = None,
    count: Annotated[int, typer.Option("--count", "-n", min=1, help="How many steps.")] = 1,
    wait: Wait = False,
    as_json: AsJson = False,
    remote: Remote = None,
    token_file: TokenFile = None,
) -> None:
    """Read the batches of the next steps without training on them."""
    _send(find_target(job, remote, token_file), "skip_batch", {"count": count}, wait=wait, as_json=as_json)


def rollback(
    job: Job = None,
    step: Annotated[
        int | None, typer.Option(min=0, help="Step of the checkpoint; default: the newest before this step.")
    ] = None,
    lr_factor: Annotated[
        float, typer.Option(min=0, max=MOST_LR_FACTOR, help="Multiply the learning-rate factor by this.")
    ] = 1.0,
    force: Force = False,
    wait: Wait = False,
    as_json: AsJson = False,
    remote: Remote = None,
    token_file: TokenFile = None,
) -> None:
    """Go back to a checkpoint and continue from there, with the data after the current batch.

    The weights of later steps are lost, so it asks first.
    """
    target = find_target(job, remote, token_file)
    where = "its newest checkpoint" if step is None else f"the newest checkpoint at or before step {step}"
    confirm(f"Roll {target.job_id} back to {where}? What it has trained since is lost.", force=force)
    _send(target, "rollback", {"step": step, "lr_factor": lr_factor}, wait=wait, as_json=as_json)


def generate(
    job: Job = None,
    prompts: Annotated[
        list[str] | None, typer.Option("--prompt", "-p", metavar="TEXT", help="Text to continue; repeatable.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to add to each prompt.")] = 64,
    as_json: AsJson = False,
    remote: Remote = None,
    token_file: TokenFile = None,
) -> None:
    """Continue prompts with the current weights, and print the texts."""
    if not prompts:
        raise typer.BadParameter("give at least one text to continue: --prompt 'def '", param_hint="--prompt")
    data = {"prompts": prompts, "max_new_tokens": max_new_tokens}
    _send(find_target(job, remote, token_file), "generate", data, wait=True, as_json=as_json)


def profile(
    job: Job = None,
    steps: Annotated[int, typer.Option(min=1, help="How many steps.")] = 3,
    wait: Wait = False,
    as_json: AsJson = False,
    remote: Remote = None,
    token_file: TokenFile = None,
) -> None:
    """Record the next steps with PyTorch's profiler, on every rank."""
    _send(find_target(job, remote, token_file), "profile", {"steps": steps}, wait=wait, as_json=as_json)


def stacks(job: Job = None, as_json: AsJson = False, remote: Remote = None, token_file: TokenFile = None) -> None:
    """Print the Python stacks of all threads of all ranks, even if training hangs."""
    _send(find_target(job, remote, token_file), "stacks", wait=True, as_json=as_json)


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
