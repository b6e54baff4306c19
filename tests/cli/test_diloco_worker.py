"""`onstep diloco worker` starts a training command as a worker of a server."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from onstep.cli.main import main
from onstep.diloco.protocol.messages import Settings
from onstep.diloco.server import DiLoCoServer
from onstep.errors import ConfigError
from onstep.models import build_transformer
from onstep.past.forks import plan_fork
from tests.support.small_configs import small_pretrain_config


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What the command sets is undone after the test."""
    for name in ("SERVER", "WORKER_ID", "SYNC_EVERY", "CODEC", "DYLU", "HEARTBEAT_INTERVAL", "TOKEN_FILE", "CA_FILE"):
        monkeypatch.setenv(f"DILOCO_{name}", "")
        monkeypatch.delenv(f"DILOCO_{name}")
    monkeypatch.setenv("ONSTEP_DILOCO_TOKENS", str(tmp_path / "tokens"))


@pytest.mark.usefixtures("environment")
def test_training_as_a_worker_arrives_at_the_server(
    tmp_path: Path, corpus: Path, token_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = small_pretrain_config(corpus, token_cache).model
    model.vocab_size = 257
    settings = Settings(num_workers=1, min_workers=1, sync_every=500, codec="int8")
    with DiLoCoServer(build_transformer(model, seed=3), settings=settings, port=0) as server:
        options = ["--server", server.address, "--worker-id", "me", "--sync-every", "2"]
        words = [
            f"dataset.paths=['{corpus}']",
            f"dataset.cache_dir={token_cache}",
            "dataset.split='80,10,10'",
            "dataset.seq_length=32",
            "model.seq_length=32",
            "model.num_layers=1",
            "model.hidden_size=16",
            "model.num_attention_heads=2",
            "scheduler.lr_warmup_iters=1",
            "validation.eval_on_start=false",
            "validation.eval_iters=1",
            "train.train_iters=4",
            "train.global_batch_size=4",
            "dist.device=cpu",
        ]
        assert main(["diloco", "worker", *options, "train", "-q", *words]) == 0
        assert server.sync_round == 2
    logs = (tmp_path / "runs" / "tiny_gpt" / "trainer_logs.json").read_text()
    assert '"diloco/sync_count": 2' in logs
    parent = tmp_path / "runs" / "tiny_gpt"
    assert "was a worker of a DiLoCo server; the fork trains alone" in plan_fork(parent, 4).describe()
    with pytest.raises(ConfigError, match=r"had rounds of a DiLoCo server .* fork at a step with a checkpoint: 4"):
        plan_fork(parent, 3)


@pytest.mark.process
def test_another_program_gets_the_settings_in_its_environment(tmp_path: Path) -> None:
    code = "import os; print(*(f'{k}={v}' for k, v in sorted(os.environ.items()) if k.startswith('DILOCO_')))"
    command = ["-m", "onstep", "diloco", "worker", "--server", "host:1", "--codec", "int4", "--dylu"]
    command += ["--ca-file", "ca.pem"]
    done = subprocess.run(
        [sys.executable, *command, sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={name: value for name, value in os.environ.items() if not name.startswith("DILOCO_")},
    )
    assert done.stdout.strip() == "DILOCO_CA_FILE=ca.pem DILOCO_CODEC=int4 DILOCO_DYLU=True DILOCO_SERVER=host:1"


@pytest.mark.usefixtures("environment")
def test_what_is_no_program_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diloco", "worker", "--server", "host:1", "trian"]) == 1
    assert "'trian' is neither train nor finetune, nor a program that can be started" in capsys.readouterr().err
