"""What a run is trained on is recorded in its directory and in its checkpoints, and compared when it continues."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from onstep import CallbackManager, pretrain
from onstep.checkpoint import newest_verified, read_manifest
from onstep.checkpoint.storage.manifest import MANIFEST
from onstep.config import ConfigContainer
from onstep.data.corpus import file_digests
from onstep.data.corpus.input_files import InputFiles
from onstep.errors import CheckpointError, ConfigError, DataError, RunExistsError
from onstep.training.runs import identity
from onstep.training.runs.identity import Identity, compare
from tests.support.small_configs import small_pretrain_config

Make = Callable[..., ConfigContainer]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "corpus" / "text.txt"
    path.parent.mkdir()
    path.write_text("some text of the corpus. " * 400)
    return path


@pytest.fixture
def make(text: Path, tmp_path: Path) -> Make:
    def config(name: str | None = "run", policy: str = "error", **checkpoint: Any) -> ConfigContainer:
        made = small_pretrain_config(text.parent, tmp_path / "cache")
        made.run.name, made.run.output_dir = name, str(tmp_path / "runs")
        made.dataset.num_workers, made.validation.eval_iters = 0, 0
        made.train.global_batch_size, made.train.train_iters, made.scheduler.lr_warmup_iters = 4, 4, 0
        made.checkpoint.on_config_change, made.checkpoint.save_interval = policy, 2
        for key, value in checkpoint.items():
            setattr(made.checkpoint, key, value)
        return made

    return config


def killed(config: ConfigContainer, step: int = 3) -> None:
    """Run until an error ends the step after the first checkpoint."""

    class DiedError(Exception):
        pass

    def die(context: Any) -> None:
        if context.state.train_state.step == step:
            raise DiedError

    manager = CallbackManager()
    manager.register("on_step_end", die)
    with pytest.raises(DiedError):
        pretrain(config, callbacks=manager)


def change(text: Path) -> None:
    text.write_text("another text of the corpus. " * 400)


def test_a_changed_file_ends_the_start_and_says_what_to_type(make: Make, text: Path) -> None:
    killed(make())
    change(text)
    with pytest.raises(RunExistsError, match=r"corpus/text\.txt was changed") as refusal:
        pretrain(make())
    assert 'checkpoint.on_config_change="apply"' in str(refusal.value)
    assert pretrain(make(policy="apply")).train_state.step == 4


def test_checkpoints_of_a_run_without_a_directory_hold_the_identity(
    make: Make, text: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saves = {"save": str(tmp_path / "saved"), "load": str(tmp_path / "saved")}
    killed(make(None, **saves))
    newest = newest_verified(tmp_path / "saved")
    assert newest is not None
    assert set(newest.manifest.extra["identity"]) == {"data"}
    change(text)
    with pytest.raises(CheckpointError, match=r"checkpoint-2 was trained on other files.*corpus/text\.txt was changed"):
        pretrain(make(None, **saves))
    with caplog.at_level(logging.WARNING):
        assert pretrain(make(None, "apply", **saves)).train_state.step == 4
    assert "corpus/text.txt was changed" in caplog.text
    assert pretrain(make(None, **saves)).train_state.step == 4, "the newest checkpoint was trained on the changed file"


def test_a_run_that_starts_from_another_ones_checkpoint_names_the_file_too(
    make: Make, text: Path, tmp_path: Path
) -> None:
    killed(make("first"))
    change(text)
    load = str(tmp_path / "runs" / "first")
    with pytest.raises(CheckpointError, match=r"corpus/text\.txt was changed.*on_config_change=\"apply\""):
        pretrain(make("second", load=load))
    assert pretrain(make("third", "apply", load=load)).train_state.step == 4


def test_a_checkpoint_of_an_earlier_version_is_continued_with_one_line(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = make("first")
    killed(config)
    first = tmp_path / "runs" / "first" / "checkpoints"
    manifest = read_manifest(first / "checkpoint-2")
    (first / "checkpoint-2" / MANIFEST).write_bytes(replace(manifest, extra={}).to_bytes())
    with caplog.at_level(logging.WARNING):
        assert pretrain(make("second", load=str(first))).train_state.step == 4
    assert caplog.text.count("could not be compared") == 1


def test_a_corpus_is_read_once_to_be_identified_and_found_in_the_cache(
    make: Make, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[str] = []
    original = hashlib.file_digest

    def counted(file: Any, name: Any) -> Any:
        reads.append(file.name)
        return original(file, name)

    monkeypatch.setattr(file_digests, "_SETTLED_SECONDS", -1.0)
    monkeypatch.setattr(hashlib, "file_digest", counted)
    pretrain(make())
    assert [str(one) for one in reads] == [str(text)]


def test_the_list_of_files_survives_a_kill_before_run_json_is_written(make: Make, tmp_path: Path) -> None:
    pretrain(make())
    other = tmp_path / "runs" / "other"
    other.mkdir()
    shutil.copy(tmp_path / "runs" / "run" / "identity.json", other / "identity.json")
    assert pretrain(make("other")).train_state.step == 4


def test_a_run_that_continues_another_one_keeps_its_learned_tokenizer(make: Make, text: Path, tmp_path: Path) -> None:
    def learned(name: str, *arguments: Any, **checkpoint: Any) -> ConfigContainer:
        config = make(name, *arguments, **checkpoint)
        config.tokenizer.tokenizer_type, config.tokenizer.vocab_size = "bpe", 270
        return config

    runs = tmp_path / "runs"
    killed(learned("first"))
    change(text)
    load = str(runs / "first")
    assert pretrain(learned("second", "apply", load=load)).train_state.step == 4
    ours = (runs / "first" / "tokenizer.json").read_bytes()
    assert (runs / "second" / "tokenizer.json").read_bytes() == ours
    (runs / "first" / "tokenizer.json").unlink()
    with pytest.raises(DataError, match=r"tokenizer trained by the run of .*first.* is missing"):
        pretrain(learned("first", "apply"))
    (runs / "first" / "tokenizer.json").write_bytes(ours)
    assert pretrain(learned("first", "apply")).train_state.step == 4


def test_a_file_that_cannot_be_compared_is_named_though_the_run_does_not_need_it(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    killed(make())

    def unreadable(_: Any) -> Any:
        raise DataError("cannot read vocab.txt: Permission denied")

    monkeypatch.setattr(identity, "tokenizer_files", unreadable)
    with caplog.at_level(logging.WARNING):
        assert pretrain(make()).train_state.step == 4
    assert caplog.text.count("could not be compared with what it trained on: cannot read vocab.txt") == 1


def test_a_list_of_files_that_was_deleted_is_written_again(make: Make, tmp_path: Path) -> None:
    killed(make())
    listed = tmp_path / "runs" / "run" / "identity.json"
    before = listed.read_text()
    listed.write_text("{")
    assert pretrain(make()).train_state.step == 4
    assert listed.read_text() == before


@pytest.mark.parametrize("name", ["identity.json", "run.json.tmp", ".run.lock"])
def test_a_directory_in_place_of_a_file_of_the_run_is_named(make: Make, tmp_path: Path, name: str) -> None:
    killed(make())
    path = tmp_path / "runs" / "run" / name
    path.unlink(missing_ok=True)
    path.mkdir()
    with pytest.raises(
        ConfigError, match=rf"directory .*run cannot be written \(.*{name}.*choose another run.output_dir"
    ):
        pretrain(make())
    path.rmdir()
    assert pretrain(make()).train_state.step == 4


@pytest.mark.parametrize("name", ["identity.json", "identity.json.tmp", "run.json.tmp"])
def test_links_in_place_of_files_of_the_run_are_not_followed(make: Make, text: Path, tmp_path: Path, name: str) -> None:
    killed(make())
    change(text)
    other = tmp_path / "other"
    other.write_text("not ours")
    path = tmp_path / "runs" / "run" / name
    path.unlink(missing_ok=True)
    path.symlink_to(other)
    assert pretrain(make(policy="apply")).train_state.step == 4
    assert other.read_text() == "not ours"


@pytest.mark.parametrize("kind", ["a pipe", "a link"])
def test_a_lock_that_is_not_a_file_is_refused(make: Make, tmp_path: Path, kind: str) -> None:
    killed(make())
    lock = tmp_path / "runs" / "run" / ".run.lock"
    lock.unlink()
    os.mkfifo(lock) if kind == "a pipe" else lock.symlink_to("/dev/zero")
    with pytest.raises(ConfigError, match=r"cannot be written \(.*\.run\.lock"):
        pretrain(make())


def test_a_run_within_its_corpus_is_continued(make: Make, text: Path) -> None:
    def inside() -> ConfigContainer:
        config = make()
        config.run.output_dir = str(text.parent / "runs")
        return config

    killed(inside())
    assert pretrain(inside()).train_state.step == 4


def test_a_tokenizer_that_now_has_files_is_not_blamed_on_an_earlier_version() -> None:
    data, tokenizer = InputFiles("d", {"a.txt": "1"}), InputFiles("t", {"tokenizer.json": "2"})
    now = Identity({"data": data, "tokenizer": tokenizer})
    assert compare({"data": "d"}, now).notes == ()  # the configuration says that it has another tokenizer
    [note] = compare(None, now).notes
    assert "this run has no record of its data and tokenizer (an earlier version started it)" in note


def test_a_directory_of_runs_that_cannot_be_read_is_named(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exists = Path.exists

    def denied(path: Path) -> bool:
        if path.name == "run.json":
            raise PermissionError(13, "Permission denied", str(path))
        return exists(path)

    monkeypatch.setattr(Path, "exists", denied)
    with pytest.raises(ConfigError, match=r"cannot be written \(.*run\.json: Permission denied\); choose another"):
        pretrain(make())
