"""Without a server: readers make nothing, uploads are given up, ranks wait for rank 0, and durations are remembered."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from onstep.checkpoint import Retention
from onstep.cli.main import main
from onstep.errors import StoreError
from onstep.mirror import beat
from onstep.mirror.attach import attach
from onstep.mirror.beat import Beat
from onstep.mirror.run_files import RunFiles
from onstep.stores.bucket import PART_BYTES, Bucket
from tests.support.mirrored_places import commit, place_of


def test_readers_make_no_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    url = f"file://{tmp_path}/store/run"
    for words in (["why"], ["checkpoint", "list"], ["checkpoint", "verify"], ["generate"], ["logs", "summary"]):
        assert main([*words, url]) in (0, 1)
    bucket = Bucket(url)
    assert (bucket.list(), bucket.get("run.json")) == ([], None)
    bucket.delete(["run.json"])
    assert not (tmp_path / "store").exists()
    bucket.put("run.json", b"{}")
    assert [one.name for one in Bucket(url).list()] == ["run.json"]


def test_an_upload_that_is_given_up_ends_before_its_next_part(tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(bytes(20 * PART_BYTES))
    bucket, sent = Bucket(f"file://{tmp_path}/store"), []

    def note(number: int) -> None:
        sent.append(number)
        if len(sent) == 12:
            bucket.leave()

    with pytest.raises(StoreError, match="given up"):
        bucket.upload("large", tmp_path / "large", note)
    assert sent[-1] == 3 * PART_BYTES
    assert len(sent) == 12
    with pytest.raises(StoreError, match="given up"):
        bucket.list()
    assert Bucket(bucket.url).list() == []


def test_other_ranks_wait_for_rank_0_while_it_lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beat, "LOST_SECONDS", 1.0)
    Beat(tmp_path / "beat").wait_for_end()  # there is none
    of_main = Beat(tmp_path / "beat")
    of_main.write()
    waiting = threading.Thread(target=Beat(tmp_path / "beat").wait_for_end)
    waiting.start()
    for _ in range(15):
        of_main.write()
        time.sleep(0.1)
        assert waiting.is_alive()
    of_main.end()
    waiting.join()
    of_main.write()
    Beat(tmp_path / "beat").wait_for_end()  # rank 0 is lost


def test_the_next_owner_knows_how_long_uploads_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url, upload, seen = f"file://{tmp_path}/store/run", Bucket.upload, []
    mirror = attach(place_of(url, tmp_path / "one"), Retention())
    assert mirror.seconds_to_upload == 0.0

    def upload_slowly(bucket: Bucket, name: str, *given: object) -> object:
        time.sleep(0.2)
        seen.append(mirror.seconds_to_upload)
        return upload(bucket, name, *given)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(Bucket, "upload", upload_slowly)
        commit(mirror, 1)
        mirror.close()
    assert seen[0] >= 0.2
    heir = attach(place_of(url, tmp_path / "two"), Retention())
    assert heir.seconds_to_upload == mirror.seconds_to_upload >= 0.2
    heir.close()


def test_what_is_due_is_said_with_its_size(tmp_path: Path) -> None:
    mirror = attach(place_of(f"file://{tmp_path}/store/run", tmp_path), Retention())
    commit(mirror, 1, size=3_000_000)
    commit(mirror, 2, size=3_000_000)
    assert mirror.due == "the checkpoints of steps 1, 2 and files of the run, 6.0 MB"
    mirror.sync()
    assert mirror.due == "files of the run, 0.0 MB"
    assert RunFiles(mirror.bucket, mirror.directory).left_bytes == sum(
        (mirror.directory / name).stat().st_size for name in ("run.json", "record.jsonl")
    )
    mirror.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_last_upload_that_ends_by_an_unexpected_error_is_unfinished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror = attach(place_of(f"file://{tmp_path}/store/run", tmp_path), Retention())
    commit(mirror, 1)

    def fail(files: RunFiles, renew: object) -> None:
        raise RuntimeError("a fault of the test")

    monkeypatch.setattr(RunFiles, "upload", fail)
    mirror.close()
    assert mirror.unfinished is not None
    assert "The same command on this machine uploads it" in mirror.unfinished
    mirror.abandon()
    for thread in threading.enumerate():
        if thread.name == "onstep-last-upload":
            thread.join()  # its error is reported within this test
