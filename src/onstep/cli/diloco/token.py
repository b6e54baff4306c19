"""`onstep diloco token`: makes, lists and revokes tokens that allow a part of what the server's own does."""

from __future__ import annotations

import sys
from enum import StrEnum
from typing import Annotated

import typer

from onstep.errors import ConfigError


class TokenAction(StrEnum):
    """What can be done with tokens."""

    ADD = "add"
    LIST = "list"
    REVOKE = "revoke"


class Role(StrEnum):
    """What a token allows."""

    READER = "reader"
    WORKER = "worker"
    OPERATOR = "operator"


def token(
    action: Annotated[TokenAction, typer.Argument(help="add NAME: make a token and print it; revoke NAME; list.")],
    name: Annotated[str | None, typer.Argument(help="Of the token, such as the site that gets it.")] = None,
    role: Annotated[
        Role | None,
        typer.Option(
            help="With add. reader: status and parameters; worker: training, too; operator: everything. "
            "[default: worker]",
            show_default=False,
        ),
    ] = None,
    port: Annotated[int, typer.Option(help="Of the server, on this machine.")] = 8512,
) -> None:
    """Make, list or revoke tokens of the server on this machine; a running server follows at once."""
    from onstep.diloco.wire.roles import REVOKED, RoleTokens, roles_path

    if (name is None) is not (action is TokenAction.LIST):
        rule = "lists all tokens and has no NAME" if name else "requires a NAME, such as the site that has the token"
        raise ConfigError(f"`onstep diloco token {action}` {rule}.")
    if role is not None and action is not TokenAction.ADD:
        raise ConfigError(f"--role belongs to `onstep diloco token add`, not to {action}; leave it out.")
    tokens = RoleTokens(roles_path(port))
    if name is None:
        for one, its_role in (*tokens.names().items(), *((one, REVOKED) for one in tokens.revoked())):
            print(f"{one}  {its_role}")
        if not tokens.names():
            print(f"There are no tokens of the server at port {port} but its own.", file=sys.stderr)
    elif action is TokenAction.ADD:
        chosen = role or Role.WORKER
        print(tokens.add(name, chosen))
        print(f"This token of {name} ({chosen}) is shown once; pass it on as a file for --token-file.", file=sys.stderr)
    else:
        tokens.revoke(name)
        print(f"The token of {name} is revoked; requests with it are refused from now on.")
