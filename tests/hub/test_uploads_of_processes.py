"""Uploads of whole processes: killed ones, interrupted ones, and several ranks."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import torchrun
from tests.support.hub_server import HubServer, environment, hub_server

pytestmark = [pytest.mark.slow, pytest.mark.process]

JOBS = "tests.support.jobs.hub_jobs"


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with hub_server() as hub:
        yield hub


def start(hub: HubServer, directory: Path, **settings: Any) -> subprocess.Popen[str]:
    directory.mkdir(parents=True, exist_ok=True)
    return subprocess.Popen(
        [sys.executable, *torchrun.job(JOBS, "push", settings)],
        cwd=directory,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment(hub)},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def weights_of(directory: Path) -> str:
    return str(json.loads((directory / "result-0.json").read_text())["weights"])


def pushed(hub: HubServer) -> str:
    return hashlib.sha256(hub.files()["model.safetensors"]).hexdigest()


@pytest.mark.parametrize("part", ["/preupload/", "/lfs/", "/commit/"])
def test_a_run_that_is_killed_during_an_upload_continues_and_uploads(tmp_path: Path, hub: HubServer, part: str) -> None:
    with start(hub, tmp_path / "whole", push_to_hub=False) as process:
        said, _ = process.communicate(timeout=120)
    assert process.returncode == 0, said
    hub.hold(part)
    directory = tmp_path / "killed"
    with start(hub, directory, hub_strategy="checkpoint") as process:
        assert hub.arrived.wait(120)
        process.kill()
    assert list((directory / "run").glob(".tmp-hub-*")), "the kill came during the upload"
    hub.released.set()
    with start(hub, directory, hub_strategy="checkpoint") as process:
        said, _ = process.communicate(timeout=120)
    assert process.returncode == 0, said
    assert weights_of(directory) == weights_of(tmp_path / "whole") == pushed(hub)
    assert hub.messages()[-1] == "End of training"
    newest = directory / "run" / "checkpoint-4"
    there = {path: content for path, content in hub.files().items() if path.startswith("last-checkpoint/")}
    assert there == {
        f"last-checkpoint/{path.relative_to(newest).as_posix()}": path.read_bytes()
        for path in newest.rglob("*")
        if path.is_file()
    }
    assert not list((directory / "run").glob(".tmp-*"))


def test_a_run_that_is_killed_during_its_last_upload_uploads_when_it_is_started_again(
    tmp_path: Path, hub: HubServer
) -> None:
    hub.hold("/preupload/")
    with start(hub, tmp_path, hub_strategy="end") as process:
        assert hub.arrived.wait(120)
        process.kill()
    hub.released.set()
    with start(hub, tmp_path, hub_strategy="end") as process:
        said, _ = process.communicate(timeout=120)
    assert process.returncode == 0, said
    assert hub.messages() == ["End of training"]
    assert pushed(hub) == weights_of(tmp_path)


@pytest.mark.parametrize("part", ["/preupload/", "/lfs/"])
def test_ctrl_c_leaves_the_last_upload(tmp_path: Path, hub: HubServer, part: str) -> None:
    hub.hold(part)
    with start(hub, tmp_path, hub_strategy="end") as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "waiting for the upload to the Hub (me/model); Ctrl-C leaves it unfinished" in line:
                break
        process.send_signal(signal.SIGINT)
        rest = process.stdout.read()
        code = process.wait(60)
    assert not hub.released.is_set(), "it ended while the Hub held the request"
    assert "the upload to me/model is left unfinished" in rest
    assert (code, "trained" in rest) == (0, True), rest
    assert not hub.commits()


@pytest.mark.distributed
def test_of_two_ranks_one_uploads(tmp_path: Path, hub: HubServer) -> None:
    settings = {"per_device_train_batch_size": 1, "hub_strategy": "checkpoint"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment(hub).items():
            patch.setenv(name, value)
        code, said = torchrun.finish(torchrun.job(JOBS, "push", settings), tmp_path)
    assert code == 0, said
    results = [json.loads((tmp_path / f"result-{rank}.json").read_text()) for rank in range(2)]
    assert [one["uploads"] for one in results] == [True, False]
    assert hub.messages() == ["Training in progress, step 2", "Training in progress, step 4", "End of training"]
    assert pushed(hub) == results[0]["weights"]
    created = [one for one in hub.requests if one == ("POST", "/api/repos/create")]
    assert len(created) == 1
