"""Options that the commands of `onstep diloco` share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from onstep.diloco.client import DiLoCoClient

Server = Annotated[
    str,
    typer.Option(
        "--server",
        metavar="HOST:PORT",
        envvar="DILOCO_SERVER",
        help="The server.",
    ),
]
TokenFile = Annotated[
    Path | None,
    typer.Option(
        "--token-file",
        metavar="FILE",
        help="File with the server's token; default: DILOCO_TOKEN or DILOCO_TOKEN_FILE; not needed on this machine.",
    ),
]
CaFile = Annotated[
    Path | None,
    typer.Option("--ca-file", metavar="FILE", help="PEM file of the certification authority of an https server."),
]
DEFAULT_SERVER = "127.0.0.1:8512"
SECONDS = 30.0


@contextmanager
def connect(server: str, token_file: Path | None, ca_file: Path | None) -> Iterator[DiLoCoClient]:
    """A client of the server.

    Raises:
        ServerLostError: if it does not answer, with the remedy.
    """
    from onstep.diloco.client import DiLoCoClient, ServerLostError
    from onstep.diloco.wire.tokens import read_token

    token = None if token_file is None else read_token(token_file)
    try:
        with DiLoCoClient(server, timeout=SECONDS, max_retries=0, token=token, verify=ca_file) as client:
            yield client
    except ServerLostError as error:
        remedy = "start `onstep diloco server` there, or give the address that it has printed (--server)"
        raise ServerLostError(f"{str(error).rstrip('.')}; {remedy}.") from error
