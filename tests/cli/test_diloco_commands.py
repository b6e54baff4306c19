"""`onstep diloco server|status|control`, as typed."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from safetensors.torch import save_file

from onstep.cli.diloco.group import app
from onstep.cli.diloco.server import _announce, _source
from onstep.cli.main import main
from onstep.diloco.client import DiLoCoClient
from onstep.diloco.protocol.messages import Settings
from onstep.diloco.server import DiLoCoServer
from onstep.errors import ConfigError
from tests.support.diloco.tls import make_tls_files
from tests.support.forked_processes import Processes
from tests.support.shell import Shell


@pytest.fixture
def server(tmp_path: Path) -> Iterator[DiLoCoServer]:
    """A server with a directory."""
    settings = Settings(num_workers=2, min_workers=2, heartbeat_timeout=0.0)
    with DiLoCoServer({"weight": torch.ones(3)}, port=0, output_dir=tmp_path / "out", settings=settings) as one:
        yield one


def test_status_shows_rounds_and_workers(server: DiLoCoServer, capsys: pytest.CaptureFixture[str]) -> None:
    with DiLoCoClient(server.address) as client:
        client.register("berlin", {"hostname": "b1"})
        assert main(["diloco", "status", "--server", server.address]) == 0
        text = capsys.readouterr().out
        assert "1 of 2 workers (quorum 2)" in text
        assert "berlin" in text
        assert main(["diloco", "status", "--server", server.address, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["num_registered"] == 1


def test_a_refused_token_names_the_variable_of_diloco(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diloco", "status", "--token", "secret"]) == 1
    errors = capsys.readouterr().err
    assert "DILOCO_TOKEN" in errors
    assert "ONSTEP_CONTROL_TOKEN" not in errors


def test_control_saves_sets_kicks_and_ends(
    server: DiLoCoServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = ["--server", server.address]
    with DiLoCoClient(server.address) as client:
        client.register("berlin", {"hostname": "node7", "num_gpus": 2, "gpu_names": ["H100"], "bf16_comm": True})
        assert main(["diloco", "control", "stop", *place]) == 0
        assert main(["diloco", "control", "save", "--workers", *place]) == 0
        assert client.heartbeat("berlin")["commands"] == ["graceful_stop", "save_checkpoint"]
        known = client.get_status()["workers"]["berlin"]
        assert (known["hostname"], known["num_gpus"], known["gpu_names"]) == ("node7", 2, ["H100"])
        assert main(["diloco", "control", "set", "--lr", "0.5", "--num-workers", "3", *place]) == 0
        assert main(["diloco", "control", "kick", "--worker", "berlin", *place]) == 0
        assert main(["diloco", "control", "save", *place]) == 0
        found = client.get_status()
    assert (found["outer_lr"], found["num_workers"], found["num_registered"]) == (0.5, 3, 0)
    assert (tmp_path / "out" / "checkpoints" / "checkpoint-0").is_dir()
    assert main(["diloco", "control", "kick", "--worker", "berlin", *place]) == 1
    assert "404" in capsys.readouterr().err
    assert main(["diloco", "control", "shutdown", *place]) == 0
    server.run()  # returns, since it has ended


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["control", "kick"], "--worker"),
        (["control", "set"], "--lr"),
        (["control", "save", "--lr", "1"], "set"),
        (["control", "kick", "--workers"], "save"),
        (["control", "stop", "--lr", "1"], "no option"),
        (["status", "--server", "127.0.0.1:9"], "start `onstep diloco server` there, or give the address that it has"),
        (["status", "--server", "no/address"], "host:port"),
        (["status", "--token", "secret"], "--token-file"),
        (["server", "-m", "nothing_of_this_name"], "nothing_of_this_name"),
        (["server"], "model"),
        (["server", "-m", "MODEL", "--codec", "zip"], "codec"),
        (["server", "-m", "MODEL", "--min-workers", "2"], "min_workers"),
        (["server", "-m", "MODEL", "--dn-buffer-size", "2"], "async"),
        (["server", "-m", "MODEL", "--tls-cert", "x.pem"], "--tls-key"),
        (["server", "-m", "MODEL", "--exclude", "none*"], "none*"),
        (["server", "-m", "MODEL", "train.train_iters=3"], "train.train_iters=3"),
        (["server", "-m", "MODEL", "--no-auth", "--regen-token", "--token-file", "x"], "--token-file"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(
    words: list[str], text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save_file({"weight": torch.ones(3)}, "model.safetensors")
    words = ["model.safetensors" if word == "MODEL" else word for word in words]
    assert main(["diloco", *words]) == 1
    errors = capsys.readouterr().err
    assert text in errors
    assert "secret" not in errors
    assert "Traceback" not in errors


def test_a_recipe_as_model_has_the_parameters_that_its_workers_train() -> None:
    model = _source("tiny_gpt", ["model.num_layers=2", "rng.seed=3"])
    assert isinstance(model, torch.nn.Module)
    again = _source("tiny_gpt", ["model.num_layers=2", "rng.seed=3"])
    assert isinstance(again, torch.nn.Module)
    named = dict(again.named_parameters())
    assert all(torch.equal(one, named[name]) for name, one in model.named_parameters())
    with pytest.raises(ConfigError, match=r"model\.vocab_size"):
        _source("tiny_gpt", ["tokenizer.tokenizer_type=bpe", "tokenizer.vocab_size=300"])


def test_addresses_that_work_are_announced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for host in ("0.0.0.0", "127.0.0.1"):
        server = DiLoCoServer({"weight": torch.ones(3)}, port=0, host=host)
        server.stop()
        _announce(server, False, None)
        text = capsys.readouterr().out
        assert f"onstep diloco worker --server 127.0.0.1:{server.port} train" in text
        assert "0.0.0.0" not in text
        assert (f"--server {socket.gethostname()}:{server.port}" in text) == (host == "0.0.0.0")
        assert ("Only this machine reaches it (--host)" in text) == (host == "127.0.0.1")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "; a round every 500 steps, fp32. "),
        ({"num_fragments": 2}, "; a round every 500 steps, in 2 fragments, merged as it arrives, fp32. "),
        (
            {"num_fragments": 2, "overlap_steps": 3, "eager": True},
            "; a round every 500 steps, in 2 fragments, merged 3 steps after its submission, eager, fp32. ",
        ),
        ({"mode": "async"}, "; asynchronous, each worker submits every 500 steps, fp32. "),
    ],
)
def test_the_first_line_of_a_server_says_how_rounds_are_made(
    changes: dict[str, Any], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    weight = {f"blocks.{number}.weight": torch.ones(3) for number in range(2)}
    server = DiLoCoServer(weight, port=0, settings=Settings(heartbeat_timeout=0.0, **changes))
    server.stop()
    _announce(server, False, None)
    assert words in capsys.readouterr().out


def test_a_server_with_tls_says_how_it_is_trusted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server = DiLoCoServer({"weight": torch.ones(3)}, port=0, tls=make_tls_files(tmp_path))
    server.stop()
    _announce(server, False, None)
    text = capsys.readouterr().out
    assert "SSL_CERT_FILE" in text
    assert "--ca-file" in text


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_server_program_serves_saves_and_ends_by_a_signal(
    number: signal.Signals, processes: Processes, tmp_path: Path
) -> None:
    processes.load("onstep.diloco.server.serving.app", "uvicorn", "httpx")
    save_file({"weight": torch.ones(3)}, tmp_path / "model.safetensors")
    command = ["diloco", "server", "-n", "1", "--codec", "fp32", "--port", "0", "-m", "model.safetensors", "-o", "out"]
    pipe, errors = tmp_path / "pipe", tmp_path / "errors.txt"
    os.mkfifo(pipe)
    for num_rounds in (1, 2):
        process = Shell(processes, tmp_path).start(*command, stdout=pipe, stderr=errors)
        with pipe.open() as reader:
            line = reader.readline()
            with DiLoCoClient(line.split(" at ")[1].split(";")[0]) as client:
                client.register("a")
                client.submit_pseudogradients("a", {"weight": torch.ones(3)})
            process.send_signal(number)
            out = reader.read()
        assert (process.wait(), f"Ended after {num_rounds} rounds and " in out) == (0, True), errors.read_text()
        assert "Traceback" not in errors.read_text()
    assert (tmp_path / "out" / "checkpoints" / "checkpoint-2" / "model.safetensors").is_file()


def test_the_guide_gives_a_reason_for_every_option_of_a_server() -> None:
    page = (Path(__file__).parents[2] / "docs" / "guide" / "training-across-sites.md").read_text(encoding="utf-8")
    table = page.partition("## Options of the server")[2].partition("\n## ")[0]
    named = re.findall(
        r"`(--[a-z-]+)`", "".join(line.split("|")[1] for line in table.splitlines() if line[:3] == "| `")
    )
    command: Any = typer.main.get_command(app)
    options = [max(one.opts, key=len) for one in command.commands["server"].params if one.opts[0].startswith("-")]
    assert sorted(named) == sorted(options)
