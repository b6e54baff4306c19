"""A server that was away while all workers trained on."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from onstep.diloco.codec.body import write_body
from onstep.diloco.protocol.messages import Accepted, Settings
from onstep.diloco.server import DiLoCoServer
from tests.support.diloco.raw_worker import RawWorker

Serve = Callable[..., DiLoCoServer]
Worker = Callable[..., RawWorker]
TWO = Settings(num_workers=2, min_workers=2, sync_every=10, heartbeat_timeout=0.0)


def submit(one: RawWorker, sequence: int, base: int, steps: int, tensors: dict[str, Tensor]) -> None:
    request = replace(one.request(sequence, base, tokens=steps), steps=steps)
    assert isinstance(one.client.send(request, write_body(tensors))[0], Accepted)


def test_after_an_outage_the_model_is_the_mean_of_the_workers_and_the_momentum_starts_at_zero(
    serve: Serve, worker: Worker, parameters: dict[str, Tensor], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "onstep.diloco.server")
    options: dict[str, Any] = {"settings": TWO, "output_dir": tmp_path, "save_every_n_rounds": 0}
    server = serve(**options)
    a, b = worker(server, "a"), worker(server, "b")
    deltas = [
        {name: torch.full_like(value, number / 8) for name, value in parameters.items()} for number in (1, 3, 5, 7)
    ]
    for one, delta in ((a, deltas[0]), (b, deltas[1])):
        one.join()
        submit(one, 0, 0, 10, delta)
    a.get(1)
    server.stop()
    server = serve(**options)
    again = [worker(server, name) for name in "ab"]
    for one, delta in zip(again, deltas[2:], strict=True):
        one.join()
        submit(one, 1, 0, 590, delta)
    before, after = parameters, again[0].get(2)[1]
    for name, value in before.items():
        step = 0.7 * 1.6 * 0.25  # of the first round, by Nesterov: lr (1 + momentum) times the mean
        torch.testing.assert_close(after[name], value - step - 0.75, rtol=0, atol=1e-6)
    assert again[0].client.get_status()["step"] == 20
    assert "; up to 590 steps without the server: the model is the mean of the workers'" in caplog.text
    for one in again:
        submit(one, 2, 2, 10, deltas[0])
    last = again[0].get(3)[1]
    for name, value in after.items():
        torch.testing.assert_close(last[name], value - 0.7 * 1.6 / 8, rtol=0, atol=1e-6)


def test_a_server_survives_an_outage_after_which_all_work_is_held_back(
    serve: Serve, worker: Worker, parameters: dict[str, Tensor], tmp_path: Path
) -> None:
    options: dict[str, Any] = {"settings": TWO, "output_dir": tmp_path, "save_every_n_rounds": 0}
    server = serve(**options)
    two = [worker(server, name) for name in "ab"]
    usual = {name: torch.full_like(value, 1e-3) for name, value in parameters.items()}
    ruined = {name: torch.full_like(value, 1e3) for name, value in parameters.items()}
    for one in two:
        one.join()
    for number in range(4):
        for one in two:
            submit(one, number, number, 10, usual)
        expected = two[0].get(number + 1)[1]
    for one in two:
        submit(one, 4, 3, 590, ruined)
    found = two[0].get(5)[1]
    assert all((found[name] - value).abs().max() < 1 for name, value in expected.items())
    assert len(two[0].client.get_status()["held_back"]) == 2
