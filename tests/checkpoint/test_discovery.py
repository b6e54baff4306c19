"""Finding checkpoints: the newest verified one, with a reason for each that is refused, and none by a typing error."""

from __future__ import annotations

from pathlib import Path

import pytest

from onstep.checkpoint.catalog.discovery import checkpoints, newest_verified, resolve
from onstep.checkpoint.storage.manifest import MANIFEST
from onstep.errors import CheckpointError
from tests.support.small_checkpoints import FILES, write_checkpoint


def found(root: Path, max_step: int | None = None) -> tuple[int | None, list[str]]:
    """The step of the newest verified checkpoint, and what was said about newer ones."""
    said: list[str] = []
    info = newest_verified(root, max_step, said.append)
    return (None if info is None else info.step), said


@pytest.mark.parametrize("name", [MANIFEST, *FILES])
@pytest.mark.parametrize("place", ["first", "middle", "last"])
def test_one_flipped_byte_in_any_file_makes_resume_fall_back(place: str, name: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 10)
    path = write_checkpoint(tmp_path, 20) / name
    content = bytearray(path.read_bytes())
    content[{"first": 0, "middle": len(content) // 2, "last": len(content) - 1}[place]] ^= 1
    path.write_bytes(content)
    step, said = found(tmp_path)
    assert step == 10
    assert len(said) == 1
    assert "checkpoint-20 is rejected" in said[0]
    assert str(path) in said[0]


@pytest.mark.parametrize("name", [MANIFEST, *FILES])
@pytest.mark.parametrize("damage", ["gone", "empty", "longer"])
def test_a_file_that_is_gone_or_of_another_size_makes_resume_fall_back(damage: str, name: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 10)
    path = write_checkpoint(tmp_path, 20) / name
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(b"" if damage == "empty" else path.read_bytes() + b"\n")
    step, said = found(tmp_path)
    assert step == 10
    assert str(path) in said[0]


def test_several_damaged_ones_are_all_named(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        write_checkpoint(tmp_path, step)
    for step in (20, 30):
        (tmp_path / f"checkpoint-{step}" / "model" / "state.json").write_bytes(b"[]")
    step, said = found(tmp_path)
    assert step == 10
    assert ["checkpoint-30" in line for line in said] == [True, False]
    (tmp_path / "checkpoint-10" / MANIFEST).unlink()
    assert found(tmp_path)[0] is None


def test_a_missing_or_empty_directory_has_no_checkpoint(tmp_path: Path) -> None:
    assert found(tmp_path) == found(tmp_path / "missing") == (None, [])
    assert checkpoints(tmp_path / "missing") == []


def test_checkpoints_beyond_a_step_are_not_looked_at(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        write_checkpoint(tmp_path, step)
    assert found(tmp_path, max_step=20) == (20, [])
    assert found(tmp_path, max_step=25) == (20, [])
    assert found(tmp_path, max_step=5) == (None, [])


def test_the_order_is_by_number_not_by_name_time_or_pointer(tmp_path: Path) -> None:
    for step in (100, 9, 20):
        write_checkpoint(tmp_path, step)
    assert (tmp_path / "latest").read_text() == "checkpoint-20\n"
    assert [info.step for info in checkpoints(tmp_path)] == [100, 20, 9]
    assert found(tmp_path)[0] == 100
    (tmp_path / "latest").write_text("checkpoint-31337\n")
    assert found(tmp_path)[0] == 100


def test_what_only_looks_like_a_checkpoint_is_none(tmp_path: Path) -> None:
    real = write_checkpoint(tmp_path, 10)
    write_checkpoint(tmp_path, 7).rename(tmp_path / "checkpoint-007")
    for name in ("checkpoint-abc", "checkpoint-", "checkpoint-11-best", "xcheckpoint-12"):
        (tmp_path / name).mkdir()
        (tmp_path / name / MANIFEST).write_bytes((real / MANIFEST).read_bytes())
    (tmp_path / "checkpoint-40").write_bytes(b"a file")
    (tmp_path / "checkpoint-50").mkdir()
    (tmp_path / "checkpoint-60").symlink_to(real)
    (tmp_path / "checkpoint-70").mkdir()
    (tmp_path / "checkpoint-70" / MANIFEST).write_bytes((real / MANIFEST).read_bytes())
    assert [info.step for info in checkpoints(tmp_path)] == [10]
    step, said = found(tmp_path)
    assert step == 10
    assert "checkpoint-70 has the manifest of step 10" in said[0]
    assert "manifest.json is missing" in said[1]
    assert len(said) == 2


def test_a_half_deleted_checkpoint_is_none_whatever_is_left_of_it(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 10)
    half = write_checkpoint(tmp_path, 20)
    half.rename(tmp_path / ".trash-checkpoint-20-0123abcd")
    assert [info.step for info in checkpoints(tmp_path)] == [10]
    assert found(tmp_path) == (10, [])


def test_a_checkpoint_whose_replacement_never_came_is_found(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, 10)
    aside = path.rename(tmp_path / ".superseded-checkpoint-10-0123abcd")
    info = newest_verified(tmp_path)
    assert info is not None
    assert (info.step, info.path) == (10, aside)
    write_checkpoint(tmp_path, 10)
    info = newest_verified(tmp_path)
    assert info is not None
    assert info.path == path
    assert [each.path for each in checkpoints(tmp_path)] == [path]


def test_a_path_leads_to_a_checkpoint_a_directory_of_them_or_a_run(tmp_path: Path) -> None:
    root = tmp_path / "run" / "checkpoints"
    for step in (10, 20):
        write_checkpoint(root, step)
    assert resolve(root / "checkpoint-10").step == 10
    assert resolve(str(root)).step == resolve(tmp_path / "run").step == 20
    assert resolve(root, step=10).path == root / "checkpoint-10"
    kept = (root / "checkpoint-10").rename(tmp_path / "kept")
    assert resolve(kept).step == 10


def test_a_mistyped_path_is_answered_with_its_neighbours(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    write_checkpoint(root, 10)
    with pytest.raises(CheckpointError, match=r"does not exist \(near it: .*checkpoint-10\)"):
        resolve(root / "chekpoint-10")
    with pytest.raises(CheckpointError, match=r"near it: .*/checkpoints\)"):
        resolve(tmp_path / "checkpoint")
    with pytest.raises(CheckpointError, match=r"near it: .*/checkpoints\)"):
        resolve(tmp_path / "chckpoints" / "checkpoint-10")
    with pytest.raises(CheckpointError, match="does not exist; give a checkpoint"):
        resolve(tmp_path / "zzz" / "checkpoint-10")


def test_a_path_without_a_verified_checkpoint_says_why(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has no directory checkpoint-<step>"):
        resolve(tmp_path)
    path = write_checkpoint(tmp_path, 10)
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 20; available steps: 10\."):
        resolve(tmp_path, step=20)
    with pytest.raises(CheckpointError, match="of step 10, not of step 20"):
        resolve(path, step=20)
    with pytest.raises(CheckpointError, match="is a file"):
        resolve(tmp_path / "latest")
    (path / "model" / "state.json").write_bytes(b"[]")
    for damaged in (path, tmp_path):
        with pytest.raises(CheckpointError, match=r"state\.json does not have the BLAKE3 hash"):
            resolve(damaged)
    with pytest.raises(CheckpointError, match=r"state\.json does not have the BLAKE3 hash"):
        resolve(tmp_path, step=10)


def test_falling_back_is_said_only_where_there_is_one_before(tmp_path: Path) -> None:
    for step in (10, 20):
        (write_checkpoint(tmp_path, step) / "model" / "state.json").write_bytes(b"[]")
    _, said = found(tmp_path)
    assert said[0].startswith("Checkpoint checkpoint-20 is rejected, falling back to the previous one: ")
    assert said[1].startswith("Checkpoint checkpoint-10 is rejected, and no earlier one exists: ")
    assert found(tmp_path, max_step=15)[1] == said[1:]
    for step in (None, 20):
        with pytest.raises(CheckpointError) as raised:
            resolve(tmp_path, step=step)
        message = str(raised.value)
        assert message.endswith(
            "; its content has changed. Put back the files that were saved, or use another checkpoint."
        )
        assert ".." not in message
        assert ".;" not in message
        assert ("falling back" in message) == (step is None)


@pytest.mark.parametrize(
    ("names", "said", "unsaid"),
    [
        (["pytorch_model.bin", "config.json"], "save_pretrained('NEW_DIR') writes safetensors", "no usable weights"),
        (["model.safetensors", "config.json"], "load them with transformers", "pickle"),
        (["model-00001-of-00002.safetensors", "optimizer.pt", "rng_state_0.pth"], "pickle files are not read", "NEW_"),
        (["model.safetensors", "pytorch_model.bin"], "load them with transformers", "NEW_"),
        (["trainer_state.json"], "no usable weights", "load them"),
    ],
)
def test_a_directory_of_hugging_face_is_told_apart_with_the_way_to_its_weights(
    names: list[str], said: str, unsaid: str, tmp_path: Path
) -> None:
    directory = tmp_path / "checkpoint-500"
    directory.mkdir()
    for name in names:
        (directory / name).write_bytes(b"not to be opened")
    for path, step in ((directory, None), (tmp_path, None), (tmp_path, 500)):
        with pytest.raises(CheckpointError, match="not an Onstep checkpoint") as raised:
            resolve(path, step)
        assert names[0] in str(raised.value)
        assert said in str(raised.value)
        assert unsaid not in str(raised.value)


def test_a_damaged_checkpoint_of_the_asked_step_is_not_replaced_by_another(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 10)
    (write_checkpoint(tmp_path, 20) / "model" / "state.json").write_bytes(b"[]")
    with pytest.raises(CheckpointError, match=r"state\.json"):
        resolve(tmp_path, step=20)
    assert resolve(tmp_path).step == 10
