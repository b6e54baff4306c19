"""What of a run is uploaded when an upload fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from onstep.hub.pusher import Pusher
from onstep.hub.repository import Repository
from onstep.hub.uploads import Uploads
from tests.support.hub_server import hub_server, using


@pytest.mark.parametrize("strategy", ["checkpoint", "all_checkpoints"])
def test_the_last_upload_has_the_checkpoint_of_one_that_fails_meanwhile(tmp_path: Path, strategy: str) -> None:
    checkpoint = tmp_path / "checkpoint-4"
    checkpoint.mkdir()
    for directory in (checkpoint, tmp_path):
        (directory / "model.safetensors").write_bytes(b"weights")
    with hub_server() as hub, using(hub):
        pusher = Pusher(Uploads(Repository("me/model"), "Later."), strategy, always=False)
        hub.fail("/commit/", 500, times=1)
        hub.hold("/commit/")
        pusher.note(checkpoint)
        first = pusher.push_checkpoint(checkpoint, "step 4")
        assert hub.arrived.wait(30)
        last = pusher.push_directory(tmp_path, "end")
        hub.released.set()
        last.result(30)
        assert first is not None
        assert first.exception() is not None
        assert hub.messages() == ["end"]
        name = {"checkpoint": "last-checkpoint"}.get(strategy, "checkpoint-4")
        assert hub.files().keys() >= {"model.safetensors", f"{name}/model.safetensors"}
    assert not list(tmp_path.glob(".tmp-*"))


def test_an_upload_elsewhere_leaves_due_what_the_own_branch_lacks(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint-4"
    checkpoint.mkdir()
    (checkpoint / "model.safetensors").write_bytes(b"weights")
    with hub_server() as hub, using(hub):
        pusher = Pusher(Uploads(Repository("me/model"), "Later."), "checkpoint", always=False)
        hub.fail("/commit/", 500, times=1)
        pusher.note(checkpoint)
        failed = pusher.push_checkpoint(checkpoint, "step 4")
        assert failed is not None
        assert failed.exception(30) is not None
        pusher.push_directory(tmp_path, "aside", Repository("me/model", revision="aside")).result(30)
        pusher.push_directory(tmp_path, "end").result(30)
        assert hub.messages() == ["end"]
        for branch in ("main", "aside"):
            assert "last-checkpoint/model.safetensors" in hub.files(branch=branch)
