"""Answers operators: status, settings, parameters, and commands."""

from __future__ import annotations

import json
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from onstep.diloco.server.operator import Operator
from onstep.diloco.server.serving.sending import TensorResponse
from onstep.errors import CheckpointError, ConfigError
from onstep.http.messages import RefusedError, answer, json_object


class ControlRoutes:
    """The routes beside the protocol of workers."""

    def __init__(self, operator: Operator) -> None:
        self._operator = operator
        self.actions = {
            "save_state": self._save_state,
            "kick_worker": self._kick_worker,
            "update_optimizer": self._update_optimizer,
            "update_num_workers": self._update_num_workers,
            "command": self._command,
            "go_back": self._go_back,
            "shutdown": self._shutdown,
        }
        """What obeys a command, by name."""

    async def health(self, request: Request) -> Response:
        """Whether the server runs; needs no token."""
        return answer({"status": "ok"})

    async def status(self, request: Request) -> Response:
        """Members, rounds, counts and settings."""
        return answer(self._operator.status())

    async def info(self, request: Request) -> Response:
        """What a client has to know before it joins."""
        return answer(self._operator.info())

    async def parameters(self, request: Request) -> Response:
        """The newest parameters of all fragments, as a safetensors file."""
        return TensorResponse(json.dumps(self._operator.info()), self._operator.parameters())

    async def act(self, name: str, request: Request) -> Response:
        """Obey a command."""
        try:
            return answer({"status": "ok", **await self.actions[name](await json_object(request))})
        except ConfigError as error:
            raise RefusedError(400, str(error)) from None
        except CheckpointError as error:
            raise RefusedError(503, str(error)) from None

    async def _save_state(self, body: dict[str, Any]) -> dict[str, Any]:
        if not self._operator.saves:
            raise RefusedError(400, "The server has no directory to save to; start it with --output-dir (output_dir).")
        return {"sync_round": await self._operator.save_state()}

    async def _kick_worker(self, body: dict[str, Any]) -> dict[str, Any]:
        worker_id = _of(body, "worker_id", str)
        if worker_id is None:
            raise RefusedError(400, "worker_id must be given.")
        if not await self._operator.kick(worker_id):
            known = ", ".join(self._operator.workers()) or "none"
            raise RefusedError(404, f"There is no worker {worker_id[:100]!r}; there are: {known}.")
        return {}

    async def _update_optimizer(self, body: dict[str, Any]) -> dict[str, Any]:
        lr, momentum = _of(body, "lr", float), _of(body, "momentum", float)
        if lr is None and momentum is None:
            raise RefusedError(400, "lr or momentum must be given.")
        await self._operator.set_rates(lr, momentum)
        return self._operator.rates()

    async def _update_num_workers(self, body: dict[str, Any]) -> dict[str, Any]:
        number = _of(body, "num_workers", int)
        if number is None:
            raise RefusedError(400, "num_workers must be given.")
        await self._operator.set_num_workers(number)
        return {"num_workers": number}

    async def _command(self, body: dict[str, Any]) -> dict[str, Any]:
        name = _of(body, "command", str)
        if name is None:
            raise RefusedError(400, "command must be given.")
        number = await self._operator.command(name)
        return {"command": name, "number": number, "workers": self._operator.workers()}

    async def _go_back(self, body: dict[str, Any]) -> dict[str, Any]:
        version = _of(body, "version", int)
        if version is None:
            raise RefusedError(400, "version must be given.")
        self._operator.go_back(version)
        return {"version": version}

    async def _shutdown(self, body: dict[str, Any]) -> dict[str, Any]:
        self._operator.shut_down()
        return {}


def _of(body: dict[str, Any], key: str, kind: type) -> Any:
    """A member of the body, of the type; None if it is missing."""
    value = body.get(key)
    if kind is float and type(value) is int:
        value = float(value)
    if value is not None and type(value) is not kind:
        raise RefusedError(400, f"{key} must be of type {kind.__name__}, got {str(value)[:100]!r}.")
    return value
