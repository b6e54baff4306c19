"""What only one of a machine and the store has is not lost: at a start, while a run trains, and at its end."""

from __future__ import annotations

import logging
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from onstep import Callback, pretrain
from onstep.checkpoint import Retention, checkpoints
from onstep.config import ConfigContainer
from onstep.errors import ConfigError, StoreError
from onstep.mirror import mirror as mirroring
from onstep.mirror.attach import attach
from onstep.mirror.local_space import trim
from onstep.mirror.mirror import Mirror
from onstep.mirror.remote_checkpoints import RemoteCheckpoints
from onstep.stores.bucket import Bucket
from onstep.stores.lease import LEASE, LeaseState, parse_lease
from tests.support.mirrored_places import commit, place_of
from tests.support.waiting import until


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A run of which the store has step 1, and this machine step 2, too."""
    url = f"file://{tmp_path}/store/run"
    mirror = attach(place_of(url, tmp_path), Retention())
    commit(mirror, 1)
    mirror.close()
    commit(mirror, 2)
    return url


def steps(mirror: Mirror) -> list[int]:
    return sorted(info.step for info in checkpoints(mirror.root))


def test_a_start_that_fails_leaves_what_is_not_uploaded(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise StoreError("listing failed")

    with monkeypatch.context() as patch:
        patch.setattr(RemoteCheckpoints, "valid", refuse)
        with pytest.raises(StoreError, match="listing"):
            attach(place_of(url, tmp_path), Retention())
    again = attach(place_of(url, tmp_path), Retention())
    assert steps(again) == [1, 2]
    again.close()
    assert sorted({one.step for one in RemoteCheckpoints(again.bucket).all()}) == [1, 2]


def test_a_directory_without_its_checkpoints_is_fetched_and_what_it_had_is_kept(url: str, tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    (tmp_path / "run" / "notes.txt").write_text("mine")
    mirror = attach(place_of(url, tmp_path), Retention())
    assert steps(mirror) == [1]
    assert (tmp_path / ".mirrored" / "replaced" / "notes.txt").read_text() == "mine"
    mirror.close()


def test_a_directory_that_another_machine_has_continued_is_kept_aside(url: str, tmp_path: Path) -> None:
    other = attach(place_of(url, tmp_path / "other"), Retention())
    commit(other, 2, "of the other")
    other.close()
    mirror = attach(place_of(url, tmp_path), Retention())
    assert b"of the other" in (mirror.root / "checkpoint-2" / "model" / "model.safetensors").read_bytes()
    kept = tmp_path / ".mirrored" / "replaced" / "checkpoints" / "checkpoint-2" / "model" / "model.safetensors"
    assert b"of the other" not in kept.read_bytes()
    mirror.close()


def test_the_lease_is_renewed_while_a_run_is_fetched(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetch = RemoteCheckpoints.fetch

    def fetch_slowly(remote: RemoteCheckpoints, *given: Any) -> Path:
        until(lambda: lease_in(url).beat > 5)
        return fetch(remote, *given)

    monkeypatch.setattr(RemoteCheckpoints, "fetch", fetch_slowly)
    mirror = attach(place_of(url, tmp_path / "other"), Retention())
    assert steps(mirror) == [1]
    mirror.close()


def lease_in(url: str) -> LeaseState:
    found = Bucket(url).get(LEASE)
    assert found is not None
    return parse_lease(found[0], url)


def test_a_log_that_is_missing_here_stays_in_the_store(url: str, tmp_path: Path) -> None:
    (tmp_path / "run" / "record.jsonl").unlink()
    mirror = attach(place_of(url, tmp_path), Retention())
    (mirror.directory / "own.txt").write_text("of this process")
    mirror.sync()
    (mirror.directory / "own.txt").unlink()
    mirror.close()
    assert {one.name for one in mirror.files.remote()} == {"run.json", "record.jsonl"}


def test_a_checkpoint_that_goes_before_it_is_uploaded_is_named(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(mirroring, "LOOK_SECONDS", 0.02)
    mirror = attach(place_of(url, tmp_path, limit_bytes=1.0), Retention())
    mirror.sync()
    with monkeypatch.context() as patch:
        patch.setattr(Bucket, "put", _refuse)
        commit(mirror, 3)
        commit(mirror, 4)
        mirror.start()
        until(lambda: steps(mirror) == [4])
    mirror.close()
    assert [text for text in caplog.messages if "scratch_gib" in text] == [
        "checkpoint 3 is deleted to keep to run.scratch_gib, and is not known to be in the store"
    ]


def test_links_to_a_deleted_checkpoint_count_as_local_space_from_their_first_request(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size, valid, go = 100_000, RemoteCheckpoints.valid, threading.Event()
    mirror = attach(place_of(url, tmp_path, limit_bytes=3.5 * size), Retention())
    mirror.sync()

    def wait_with_links(remote: RemoteCheckpoints, lease: LeaseState | None) -> Any:
        if (tmp_path / ".mirrored" / mirroring.UPLOADING).exists():
            go.wait()
        return valid(remote, lease)

    monkeypatch.setattr(RemoteCheckpoints, "valid", wait_with_links)
    monkeypatch.setattr(mirroring, "LOOK_SECONDS", 0.02)
    commit(mirror, 3, size=size)
    mirror.start()
    until(lambda: (tmp_path / ".mirrored" / mirroring.UPLOADING).exists())
    for step in (4, 5, 6):
        commit(mirror, step, size=size)
    until(lambda: 4 not in steps(mirror))
    time.sleep(0.2)  # the same look may delete more
    files = {path.stat().st_ino for path in tmp_path.rglob("model.safetensors") if path.stat().st_size > size}
    go.set()
    mirror.close()
    assert len(files) == 2


def test_manifests_count_as_local_space(url: str, tmp_path: Path) -> None:
    mirror = attach(place_of(url, tmp_path), Retention())
    newest = max(checkpoints(mirror.root), key=lambda info: info.step)
    of_files = newest.manifest.size_bytes
    trim(mirror.root, 3 * of_files + 1, None, {1}, None)  # with room for a third one, and none for manifests
    assert steps(mirror) == [2]
    mirror.close()


def _refuse(*_: object) -> None:
    raise StoreError("the bucket is away")


class Cut(Callback):
    """Cuts the line to the store when training has ended."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._patch = patch

    def on_train_end(self, context: object) -> None:
        self._patch.setattr(Bucket, "put", _refuse)


def test_a_run_that_is_not_in_the_store_at_its_end_fails(
    tiny_config: ConfigContainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirroring, "END_SECONDS", 0.1)
    run, tiny_config.train.train_iters, tiny_config.scheduler.lr_warmup_iters = tiny_config.run, 2, 1
    run.name, run.output_dir, run.scratch_dir = "run", f"file://{tmp_path}/store", str(tmp_path / "scratch")
    tiny_config.checkpoint.save_interval = 2
    with monkeypatch.context() as patch, pytest.raises(StoreError, match="The same command on this machine uploads it"):
        pretrain(tiny_config, callbacks=[Cut(patch)])
    pretrain(tiny_config)
    assert [one.step for one in RemoteCheckpoints(Bucket(f"{run.output_dir}/run")).all()] == [2]


@pytest.mark.parametrize("name", ["one#2", "what?", "half%"])
def test_a_name_that_cannot_be_part_of_a_url_is_refused(
    tiny_config: ConfigContainer, tmp_path: Path, name: str
) -> None:
    tiny_config.run.name, tiny_config.run.output_dir = name, f"file://{tmp_path}/store"
    with pytest.raises(ConfigError, match="choose another name"):
        pretrain(tiny_config)
