"""A server that is started again on the directory of a run."""

from __future__ import annotations

from pathlib import Path

import torch

from onstep.diloco.client import DiLoCoClient
from onstep.diloco.codec.specs import specs_of
from onstep.diloco.protocol.messages import Beat, Heartbeat, Register, Registered, fingerprint
from onstep.diloco.server import DiLoCoServer
from onstep.diloco.wire.http import specs_to_bytes


def test_workers_need_not_register_again_with_a_server_that_was_restarted(tmp_path: Path) -> None:
    model = {"weight": torch.zeros(3)}
    specs = specs_of(model)
    for start in range(2):
        server = DiLoCoServer(model, 2, output_dir=tmp_path, port=0, token="secret", heartbeat_timeout=30.0)
        with server, DiLoCoClient(server.address, timeout=10, token="secret") as client:
            if start == 0:
                joined, _ = client.send(Register("a", "session", fingerprint(specs)), specs_to_bytes(specs))
                assert isinstance(joined, Registered)
            client.get_status()  # the server has had its first turn
            answers = [client.send(Heartbeat("a", "session"))[0] for _ in range(3)]
            assert all(isinstance(one, Beat) for one in answers), answers
            assert client.get_status()["counts"].get("deaths", 0) == 0
