"""Tokens that allow a part of what the server's own does, and end when they are revoked."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import Tensor

from onstep.cli.main import main
from onstep.diloco.client import DiLoCoClient, RefusedByServerError
from onstep.diloco.server import DiLoCoServer
from onstep.diloco.wire.roles import REVOKED, RoleTokens, roles_path
from onstep.errors import ConfigError


def _statuses(server: DiLoCoServer, token: str, parameters: dict[str, Tensor]) -> list[int]:
    """Of a status, a registration and a command."""
    found = []
    with DiLoCoClient(server.address, token=token, max_retries=0) as client:
        for act in (
            client.get_status,
            lambda: client.register("a", parameters=parameters),
            lambda: client.control("update_optimizer", {"lr": 0.5}),
        ):
            try:
                act()
                found.append(200)
            except RefusedByServerError as error:
                found.append(error.status)
    return found


def test_each_role_may_do_what_those_before_it_may_until_it_is_revoked(
    serve: Callable[..., DiLoCoServer], parameters: dict[str, Tensor], capsys: pytest.CaptureFixture[str]
) -> None:
    server = serve()
    tokens = RoleTokens(roles_path(server.port))
    made = {role: tokens.add(f"the-{role}", role) for role in ("reader", "worker", "operator")}
    assert _statuses(server, made["reader"], parameters) == [200, 403, 403]
    assert _statuses(server, made["worker"], parameters) == [200, 200, 403]
    assert _statuses(server, made["operator"], parameters) == [200, 200, 200]
    tokens.revoke("the-worker")
    assert _statuses(server, made["worker"], parameters) == [401, 401, 401]
    assert _statuses(server, made["reader"], parameters) == [200, 403, 403]
    assert made["reader"] not in roles_path(server.port).read_text()
    tokens.add("the-worker", "worker")
    assert list(tokens.names()) == ["the-reader", "the-operator", "the-worker"]
    assert main(["diloco", "token", "list", "--port", str(server.port)]) == 0
    assert capsys.readouterr().out.splitlines()[-2:] == ["the-worker  worker", "the-worker  revoked"]


def test_a_refusal_says_whether_a_token_is_missing_wrong_revoked_or_of_another_role(
    serve: Callable[..., DiLoCoServer],
) -> None:
    server = serve(token="secret")
    tokens = RoleTokens(roles_path(server.port))
    lost, reader = (tokens.add(name, "reader") for name in ("lost", "reader"))
    tokens.revoke("lost")
    said = []
    for token in ("", "another", lost):
        with DiLoCoClient(server.address, token=token) as client, pytest.raises(RefusedByServerError) as refused:
            client.get_status()
        assert refused.value.status == 401
        said.append(refused.value.reason)
    assert "requires a token" in said[0]
    assert "the token is wrong" in said[1].lower()
    assert "was revoked" in said[2]
    with (
        DiLoCoClient(server.address, token=reader) as client,
        pytest.raises(RefusedByServerError, match="has the role reader, and /control/shutdown requires the role op"),
    ):
        client.control("shutdown")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["add"], "`onstep diloco token add` requires a NAME"),
        (["revoke"], "`onstep diloco token revoke` requires a NAME"),
        (["list", "lab"], "`onstep diloco token list` lists all tokens and has no NAME"),
        (["revoke", "lab", "--role", "reader"], "--role belongs to `onstep diloco token add`"),
        (["revoke", "lab"], "there is no token 'lab'; there are: none"),
    ],
)
def test_arguments_of_tokens_that_do_not_fit_are_refused(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["diloco", "token", *words, "--port", "18513"]) == 1
    assert said in capsys.readouterr().err


def test_the_command_makes_lists_and_revokes_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    port = ["--port", "18512"]
    assert main(["diloco", "token", "add", "lab", "--role", "reader", *port]) == 0
    made = capsys.readouterr().out.strip()
    tokens = RoleTokens(roles_path(18512))
    assert tokens.role_of(made.encode()) == "reader"
    assert main(["diloco", "token", "list", *port]) == 0
    assert capsys.readouterr().out == "lab  reader\n"
    assert main(["diloco", "token", "revoke", "lab", *port]) == 0
    assert tokens.role_of(made.encode()) == REVOKED
    assert main(["diloco", "token", "list", *port]) == 0
    assert "no tokens of the server at port 18512" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="there is no token 'lab'; there are: none"):
        tokens.revoke("lab")
    with pytest.raises(ConfigError, match="role must be one of reader, worker, operator, got 'king'"):
        tokens.add("lab", "king")
