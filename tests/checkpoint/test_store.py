"""The store: what is written is durable and hashed, a commit is all or nothing, and nothing else is ever removed."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from blake3 import blake3

from onstep.checkpoint.catalog.discovery import newest_verified
from onstep.checkpoint.storage.manifest import verify
from onstep.checkpoint.storage.store import HASH_ASIDE_BYTES, FileStore, Operation
from onstep.checkpoint.storage.transaction import SaveTransaction, sweep
from onstep.errors import CheckpointError
from tests.support.small_checkpoints import FILES, make_manifest, prepared, write_checkpoint


@pytest.mark.parametrize("sizes", [[], [0], [10, 0, 5], [HASH_ASIDE_BYTES * 3 + 7, 12, HASH_ASIDE_BYTES]])
def test_the_digest_is_of_the_bytes_in_the_file(sizes: list[int], tmp_path: Path) -> None:
    with FileStore().open(tmp_path / "file") as file:
        for index, size in enumerate(sizes):
            buffer = bytearray(os.urandom(size))
            file.write(buffer)
            buffer[:] = bytes([index]) * size
    content = (tmp_path / "file").read_bytes()
    assert (file.digest.size, file.digest.blake3) == (sum(sizes), blake3(content).hexdigest())


def test_words_of_several_bytes_are_written_whole(tmp_path: Path) -> None:
    words = memoryview(bytearray(range(64))).cast("q")
    with FileStore().open(tmp_path / "file") as file:
        assert file.write(words) == 64
    assert (tmp_path / "file").read_bytes() == bytes(range(64))


def test_a_file_that_failed_has_no_digest(tmp_path: Path) -> None:
    def fail_the_fsync(operation: Operation) -> None:
        if operation.kind == "fsync":
            raise OSError(errno.EIO, "Input/output error")

    file = FileStore(fail_the_fsync).open(tmp_path / "file")
    file.write(b"bytes")
    with pytest.raises(CheckpointError, match=r"fsync of .*file failed: Input/output error"):
        file.close()
    with pytest.raises(CheckpointError, match="not durable"):
        _ = file.digest
    with pytest.raises(CheckpointError, match="closed"):
        file.write(b"more")


def test_an_existing_file_or_link_is_never_written_through(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_bytes(b"mine")
    (tmp_path / "link").symlink_to(precious)
    (tmp_path / "dangling").symlink_to(tmp_path / "new")
    for name in ("precious", "link", "dangling"):
        with pytest.raises(CheckpointError, match="File exists"):
            FileStore().open(tmp_path / name)
    assert precious.read_bytes() == b"mine"
    assert not (tmp_path / "new").exists()


def test_a_tree_is_removed_without_following_links(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_bytes(b"mine")
    directory = write_checkpoint(tmp_path / "root", 10)
    (directory / "to-folder").symlink_to(outside)
    (directory / "model" / "to-file").symlink_to(outside / "file")
    FileStore().remove_tree(directory)
    assert (outside / "file").read_bytes() == b"mine"
    assert [path.name for path in (tmp_path / "root").iterdir()] == ["latest"]


def test_a_link_in_place_of_a_tree_is_left_alone(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (tmp_path / "checkpoint-10").symlink_to(outside)
    FileStore().remove_tree(tmp_path / "checkpoint-10")
    assert outside.is_dir()
    assert (tmp_path / "checkpoint-10").is_symlink()


def test_a_commit_is_a_verified_checkpoint_that_latest_names(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "a" / "root", 10)
    assert path == tmp_path / "a" / "root" / "checkpoint-10"
    assert verify(path).step == 10
    assert {name: (path / name).read_bytes() for name in FILES} == FILES
    assert sorted(entry.name for entry in path.parent.iterdir()) == ["checkpoint-10", "latest"]
    assert (path.parent / "latest").read_text() == "checkpoint-10\n"


def test_a_commit_without_a_listed_file_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 10)
    transaction, digests = prepared(tmp_path, 20)
    (transaction.directory / "rng" / "rank_0.json").unlink()
    with pytest.raises(CheckpointError, match=r"rank_0\.json is missing"):
        transaction.commit(make_manifest(20, digests))
    transaction.abandon()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["checkpoint-10", "latest"]


def test_a_manifest_of_another_step_is_refused(tmp_path: Path) -> None:
    transaction, digests = prepared(tmp_path, 20)
    with pytest.raises(CheckpointError, match="checkpoint of step 20 with a manifest of 10"):
        transaction.commit(make_manifest(10, digests))
    transaction.abandon()


def test_a_verified_checkpoint_makes_way_only_when_it_is_asked_to(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 10, {"file": b"old"})
    transaction, digests = prepared(tmp_path, 10, {"file": b"new"})
    with pytest.raises(CheckpointError, match="replace=True"):
        transaction.commit(make_manifest(10, digests))
    transaction.abandon()
    assert (tmp_path / "checkpoint-10" / "file").read_bytes() == b"old"
    transaction, digests = prepared(tmp_path, 10, {"file": b"new"})
    transaction.commit(make_manifest(10, digests), replace=True)
    assert (tmp_path / "checkpoint-10" / "file").read_bytes() == b"new"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["checkpoint-10", "latest"]


@pytest.mark.parametrize("is_saved_before", [True, False])
def test_files_of_other_code_become_part_of_a_checkpoint_that_adopts_them(
    tmp_path: Path, is_saved_before: bool
) -> None:
    target = tmp_path / "checkpoint-10"
    if is_saved_before:
        write_checkpoint(tmp_path, 10, {"file": b"old"})
    (target / "adapter").mkdir(parents=True)
    (target / "adapter" / "weights.bin").write_bytes(b"mine")
    for outcome in ("abandoned", "committed"):
        transaction = SaveTransaction(FileStore(), tmp_path, 10)
        transaction.prepare(adopts=True)
        if outcome == "abandoned":
            transaction.abandon()
            assert (target / "adapter" / "weights.bin").read_bytes() == b"mine"
            continue
        digests = {"file": FileStore().write_file(transaction.directory / "file", b"new")}
        transaction.commit(make_manifest(10, digests), replace=True)
    assert verify(target).step == 10
    assert {path.name for path in target.iterdir()} == {"adapter", "file", "manifest.json"}
    assert (target / "file").read_bytes() == b"new"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["checkpoint-10", "latest"]


@pytest.mark.parametrize("kind", ["file", "link"])
def test_only_a_directory_is_adopted(tmp_path: Path, kind: str) -> None:
    target = tmp_path / "checkpoint-10"
    (tmp_path / "elsewhere").mkdir()
    if kind == "file":
        target.write_bytes(b"mine")
    else:
        target.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="is not a checkpoint"):
        SaveTransaction(FileStore(), tmp_path, 10).prepare(adopts=True)


def test_a_damaged_checkpoint_makes_way(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_checkpoint(tmp_path, 10, {"file": b"old"})
    (path / "file").write_bytes(b"bad")
    write_checkpoint(tmp_path, 10, {"file": b"new"})
    assert (path / "file").read_bytes() == b"new"
    assert "Replacing a damaged checkpoint" in caplog.text
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["checkpoint-10", "latest"]


@pytest.mark.parametrize("kind", ["file", "folder", "empty directory", "link"])
def test_what_is_no_checkpoint_is_not_replaced(kind: str, tmp_path: Path) -> None:
    target, elsewhere = tmp_path / "checkpoint-10", tmp_path / "elsewhere"
    write_checkpoint(elsewhere, 10)
    if kind == "file":
        target.write_bytes(b"mine")
    elif kind == "link":
        target.symlink_to(elsewhere / "checkpoint-10")
    else:
        target.mkdir()
        if kind == "folder":
            (target / "pytorch_model.bin").write_bytes(b"mine")
    with pytest.raises(CheckpointError, match="is not a checkpoint"):
        SaveTransaction(FileStore(), tmp_path, 10).prepare()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["checkpoint-10", "elsewhere"]
    assert verify(elsewhere / "checkpoint-10").step == 10


def test_a_sweep_removes_what_saves_left_and_nothing_else(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 10)
    foreign = ["checkpoint-abc", "checkpoint-007", "checkpoint-30", ".tmp-mine", ".trash-mine", ".superseded-x", "runs"]
    for name in foreign:
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_bytes(b"mine")
    (tmp_path / "progress.txt").write_text("mine")
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "file").write_bytes(b"mine")
    left = [".tmp-checkpoint-20-0123abcd", ".trash-checkpoint-5-0123abcd"]
    for name in left:
        (tmp_path / name / "model").mkdir(parents=True)
        (tmp_path / name / "model" / "link").symlink_to(tmp_path / "linked")
    (tmp_path / ".tmp-checkpoint-20-0123abcd.lock").touch()
    (tmp_path / ".tmp-checkpoint-20-0123abcd.latest").touch()
    removed = sweep(FileStore(), tmp_path)
    assert sorted(path.name for path in removed) == [
        ".tmp-checkpoint-20-0123abcd",
        ".tmp-checkpoint-20-0123abcd.latest",
        ".tmp-checkpoint-20-0123abcd.lock",
        ".trash-checkpoint-5-0123abcd",
    ]
    kept = [*foreign, "checkpoint-10", "latest", "progress.txt", "linked"]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == sorted(kept)
    assert all((tmp_path / name / "file").read_bytes() == b"mine" for name in [*foreign, "linked"])


def test_a_sweep_of_a_missing_directory_makes_none(tmp_path: Path) -> None:
    assert sweep(FileStore(), tmp_path / "missing") == []
    assert not (tmp_path / "missing").exists()


def test_a_sweep_puts_a_checkpoint_back_whose_replacement_never_came(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, 10)
    path.rename(tmp_path / ".superseded-checkpoint-10-0123abcd")
    assert sweep(FileStore(), tmp_path) == []
    newest = newest_verified(tmp_path)
    assert newest is not None
    assert newest.path == path


def test_a_link_named_like_leftovers_leads_the_sweep_nowhere(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_bytes(b"mine")
    root = tmp_path / "root"
    root.mkdir()
    for name in (".trash-checkpoint-5-0123abcd", ".tmp-checkpoint-5-0123abcd"):
        (root / name).symlink_to(outside)
    sweep(FileStore(), root)
    assert (outside / "file").read_bytes() == b"mine"


def test_a_save_that_fails_while_tidying_up_still_raises_its_own_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fails = False

    def fail(operation: Operation) -> None:
        if fails:
            raise OSError(errno.EIO, "Input/output error")

    transaction = SaveTransaction(FileStore(fail), tmp_path, 10)
    transaction.prepare()
    fails = True
    transaction.abandon()
    assert "remain until the next start" in caplog.text
    assert transaction.directory in sweep(FileStore(), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_without_locks_is_saved_to_and_never_swept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(descriptor: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", no_locks)
    transaction, digests = prepared(tmp_path, 10)
    assert sweep(FileStore(), tmp_path) == []
    assert verify(transaction.commit(make_manifest(10, digests))).step == 10
