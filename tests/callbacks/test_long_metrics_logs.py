"""Continuing a long metrics log decodes its end only, and leaves what decoding all of it would leave."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from onstep import Callback, CallbackManager, JsonLogger, Trainer, TrainingArguments, pretrain
from onstep.config import ConfigContainer
from onstep.metrics import JsonLogWriter
from onstep.record import MetricsLogHeldError, read_records, saved_log, without_wall_clock
from onstep.record.saved_log import SavedLog
from tests.support.resuming import Interrupted

NAME = "log.json"


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of characters of each JSON text that is decoded."""
    sizes: list[int] = []
    real = json.JSONDecoder.raw_decode

    def counted(self: json.JSONDecoder, text: str, idx: int = 0) -> Any:
        value, end = real(self, text, idx)
        sizes.append(end - idx)
        return value, end

    monkeypatch.setattr(json.JSONDecoder, "raw_decode", counted)
    return sizes


@pytest.fixture
def bytes_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of bytes of each read of a metrics log."""
    sizes: list[int] = []
    read, read_bytes = os.pread, Path.read_bytes

    def counted_read(descriptor: int, size: int, start: int) -> bytes:
        content = read(descriptor, size, start)
        sizes.append(len(content))
        return content

    def counted_read_bytes(path: Path) -> bytes:
        content = read_bytes(path)
        sizes.append(len(content))
        return content

    monkeypatch.setattr(os, "pread", counted_read)
    monkeypatch.setattr(Path, "read_bytes", counted_read_bytes)
    return sizes


def written(directory: Path, num_records: int, then: int = 0) -> dict[str, Any]:
    """The state of a writer after these records; others follow before it is killed."""
    writer = JsonLogWriter(NAME)
    writer.open(directory)
    for step in range(1, num_records + 1):
        writer.write_record(step, step / 10, {"loss": 1.0 / step})
    state: dict[str, Any] = json.loads(json.dumps(writer.state_dict()))
    for step in range(num_records + 1, num_records + then + 1):
        writer.write_record(step, step / 10, {"loss": 1.0 / step})
    killed(writer)
    return state


def killed(writer: JsonLogWriter) -> None:
    assert writer.metrics_log is not None
    writer.metrics_log._release()


def resumed(directory: Path, state: dict[str, Any], step: int) -> tuple[JsonLogWriter, dict[str, Any]]:
    """A writer that continues the file and adds a record; and its state."""
    writer = JsonLogWriter(NAME)
    writer.load_state_dict({**state, "log_path": str(directory / NAME)})
    writer.open(directory, step)
    writer.write_record(step + 1, 0.5, {"loss": 0.5})
    after = {**writer.state_dict(), "log_path": None, "log_digest": None}
    return writer, after


def test_the_start_of_a_resumed_run_decodes_the_end_of_its_log_and_hashes_the_rest_once(
    tmp_path: Path, decoded: list[int], bytes_read: list[int]
) -> None:
    counts = []
    for number in (3000, 12_000):
        state = written(tmp_path / str(number), number, then=3)
        decoded.clear()
        bytes_read.clear()
        writer, _ = resumed(tmp_path / str(number), state, number)
        killed(writer)
        more_than_once = sum(bytes_read) - (tmp_path / str(number) / NAME).stat().st_size
        counts.append((len(decoded), sum(decoded), more_than_once))
        assert [record["global_step"] for record in read_records(tmp_path / str(number) / NAME)[-2:]] == [
            number,
            number + 1,
        ]
        assert len(read_records(tmp_path / str(number) / "log.branch-1.json")) == 3
    (texts, characters, read), (more_texts, more_characters, more_read) = counts
    assert (texts, read // 100_000) == (more_texts, more_read // 100_000)
    assert more_characters < 1.1 * characters  # the steps have a digit more


def test_a_log_that_must_be_read_as_a_whole_is_decoded_once(tmp_path: Path, decoded: list[int]) -> None:
    state = written(tmp_path, 5000)
    decoded.clear()
    killed(resumed(tmp_path, {**state, "first_record": None}, 5000)[0])
    assert sum(decoded) < 1.1 * (tmp_path / NAME).stat().st_size


def changed(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(change(path.read_bytes()))


CASES: dict[str, Callable[[Path], Any]] = {
    "as it was": lambda path: None,
    "a changed byte in the last record": changed(lambda text: text.replace(b'"loss": 0.125', b'"loss": 0.225')),
    "only the clock of the last record": changed(lambda text: text.replace(b'{"timestamp": 1', b'{"timestamp": 2')),
    "shorter": lambda path: os.truncate(path, 400),
    "shorter by a record": changed(lambda text: b",\n".join(text.split(b",\n")[:7]) + b"\n]"),
    "empty": lambda path: os.truncate(path, 0),
    "gone": Path.unlink,
    "another first record": changed(lambda text: text.replace(b'"loss": 1.0', b'"loss": 3.0')),
    "its closing bracket is lost": changed(lambda text: text.removesuffix(b"\n]")),
    "zeros at the end": changed(lambda text: text + bytes(100)),
    "cut in the middle of a later record": changed(lambda text: text[:-20]),
    "another value than records": changed(lambda text: text.removesuffix(b"]") + b", 7]"),
    "something after the end": changed(lambda text: text + b"[1]"),
    "no text after the position": changed(lambda text: text.removesuffix(b"\n]") + b",\n\xff\xfe"),
    "no text before the position": changed(lambda text: text[:300] + b"\xff" + text[301:]),
    "indented": changed(lambda text: json.dumps(json.loads(text), indent=1).encode()),
    "on one line": changed(lambda text: json.dumps(json.loads(text)).encode()),
    "not a log": lambda path: path.write_text("step,loss\n"),
    "a directory": lambda path: (path.unlink(), path.mkdir()),
}


@pytest.mark.parametrize("then", [0, 3])
@pytest.mark.parametrize("case", CASES)
def test_what_is_left_is_what_reading_all_would_leave(
    tmp_path: Path, case: str, then: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = written(tmp_path / "run", 8, then)
    CASES[case](tmp_path / "run" / NAME)
    found = []
    for name in ("end", "all"):
        shutil.copytree(tmp_path / "run", tmp_path / name)
        caplog.clear()
        if name == "all":
            monkeypatch.setattr(SavedLog, "open_at_end", lambda self, path: None)
        writer, after = resumed(tmp_path / name, state, 8)
        killed(writer)
        texts = sorted(text.replace(str(tmp_path / name), "") for text in caplog.messages)
        found.append((texts, {**after, "last_step": writer.last_step}, content(tmp_path / name)))
    assert found[0] == found[1]


def content(directory: Path) -> dict[str, Any]:
    """All files, without the times of records."""
    return {path.name: plain(path) for path in sorted(directory.iterdir())}


def plain(path: Path) -> Any:
    if path.is_dir():
        return "directory"
    try:
        records = json.loads(path.read_bytes())
        return [without_wall_clock(record) for record in records]
    except (ValueError, AttributeError):
        return path.read_bytes()


def test_a_log_that_a_live_run_writes_is_left_to_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = written(tmp_path, 8)
    live, _ = resumed(tmp_path, state, 8)
    other = JsonLogWriter(NAME)
    other.load_state_dict(state)
    other.open(tmp_path, 8)
    assert other.path == tmp_path / "log.1.json"
    assert len(read_records(tmp_path / NAME)) == 9
    assert "is being written by another live run" in caplog.text
    killed(live)


def dies(call: Callable[..., Any], is_before: bool) -> Callable[..., Any]:
    """Ends the process right before or right after a call."""

    def died(*args: Any, **named: Any) -> Any:
        if not is_before:
            call(*args, **named)
        raise Interrupted

    return died


@pytest.mark.parametrize("is_before", [True, False])
@pytest.mark.parametrize("name", ["replace", "ftruncate", "pwrite"])
def test_a_kill_while_the_log_is_cut_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, is_before: bool
) -> None:
    state = written(tmp_path, 8, then=3)
    with monkeypatch.context() as patch:
        patch.setattr(os, name, dies(getattr(os, name), is_before))
        with pytest.raises(Interrupted):
            resumed(tmp_path, state, 8)
    branches = list(tmp_path.glob("log.branch-*.json"))
    found = [record["global_step"] for path in (tmp_path / NAME, *branches) for record in read_records(path)]
    assert found[:8] == [*range(1, 9)]
    assert {9, 10, 11} <= set(found)
    killed(resumed(tmp_path, state, 8)[0])
    assert [record["global_step"] for record in json.loads((tmp_path / NAME).read_text())] == [*range(1, 10)]


def test_a_failure_while_the_log_is_cut_does_not_keep_it_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = written(tmp_path, 8, then=3)
    with monkeypatch.context() as patch:
        patch.setattr(os, "ftruncate", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        with pytest.raises(Exception, match="No space left"):
            resumed(tmp_path, state, 8)
    try:
        killed(resumed(tmp_path, state, 8)[0])
    except MetricsLogHeldError:
        pytest.fail("still locked")
    assert len(read_records(tmp_path / NAME)) == 9


def test_damage_far_before_the_end_is_found_when_the_history_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {**written(tmp_path, 8), "log_digest": None}  # as in checkpoints before version 0.5
    path = tmp_path / NAME
    path.write_bytes(path.read_bytes().replace(b'"loss": 0.5}', b'"loss": 0.5#'))
    monkeypatch.setattr(saved_log, "MOST_UNSYNCED", 2)
    writer, _ = resumed(tmp_path, state, 8)
    assert writer.position.read() is None
    killed(writer)


# in whole runs


class Steps:
    """The steps of the records that are decoded."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.seen: set[int] = set()
        real = json.JSONDecoder.raw_decode

        def noted(decoder: json.JSONDecoder, text: str, idx: int = 0) -> Any:
            value, end = real(decoder, text, idx)
            for one in value if isinstance(value, list) else [value]:
                if isinstance(one, dict) and "loss" in one and "global_step" in one:
                    self.seen.add(one["global_step"])
            return value, end

        patch.setattr(json.JSONDecoder, "raw_decode", noted)


@pytest.fixture
def config(tiny_config: ConfigContainer, tmp_path: Path) -> ConfigContainer:
    tiny_config.run.name, tiny_config.run.output_dir, tiny_config.run.save_weights = "run", str(tmp_path), False
    tiny_config.logger.log_interval, tiny_config.checkpoint.save_interval = 1, 4
    return tiny_config


def interrupted(config: ConfigContainer) -> None:
    manager = CallbackManager()

    def die(context: Any) -> None:
        if context.trainer_state.global_step == 6:
            raise Interrupted

    manager.add(JsonLogger(note="x"))
    manager.register("on_step_end", die)
    with pytest.raises(Interrupted):
        pretrain(config, callbacks=manager)


def test_a_resumed_run_reads_its_history_when_somebody_looks(
    config: ConfigContainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted(config)
    monkeypatch.setattr(saved_log, "MOST_UNSYNCED", 2)
    steps = Steps(monkeypatch)
    state = pretrain(config, callbacks=[JsonLogger(note="x")])
    assert not steps.seen & {1, 2}  # nor by checkpoints and the final metrics
    number = len(state.info.history)
    assert len(state.info.log_history) == number
    assert [record["step"] for record in state.info.log_history if "loss" in record] == [*range(1, 9)]
    assert steps.seen >= {1, 2}
    assert state.info.log_history is state.info.log_history
    assert any("train_runtime" in record for record in state.info.log_history)


def test_a_history_that_is_gone_gives_what_is_known(
    config: ConfigContainer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    interrupted(config)
    state = pretrain(config, callbacks=[JsonLogger(note="x")])
    (path,) = tmp_path.rglob("record.jsonl")
    path.unlink()
    for _ in range(2):
        assert [record["step"] for record in state.info.log_history if "loss" in record] == [5, 6, 7, 8]
    assert caplog.text.count("state.log_history lacks the records before the resume") == 1


def test_checkpoints_of_a_resumed_run_count_the_records_that_nobody_has_looked_at(
    config: ConfigContainer, tmp_path: Path
) -> None:
    interrupted(config)
    pretrain(config, callbacks=[JsonLogger(note="x")])
    config.train.train_iters = 12
    config.checkpoint.on_config_change = "apply"
    state = pretrain(config, callbacks=[JsonLogger(note="x")])
    assert [record["step"] for record in state.info.log_history if "loss" in record] == [*range(1, 13)]
    (path,) = tmp_path.rglob("trainer_logs.json")
    assert ["experiment_info" in record for record in read_records(path)].count(True) == 1


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.full((2,), index / 8), "labels": torch.ones(1)}


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(2, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.linear(x) - labels).square().mean()}


class DieAt(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, context: Any) -> None:
        if context.trainer_state.global_step == self.step:
            raise Interrupted


def trainer(directory: Path, die_at: int = -1, save_strategy: str = "steps") -> Trainer:
    arguments = TrainingArguments(
        str(directory),
        max_steps=8,
        logging_steps=1,
        save_strategy=save_strategy,
        save_steps=4,
        disable_tqdm=True,
        report_to=["csv"],
        config_overrides={"run.save_weights": False},
    )
    return Trainer(Model(), arguments, train_dataset=Rows(), callbacks=[JsonLogger(), DieAt(die_at)])


def test_a_trainer_that_is_resumed_reads_its_history_when_somebody_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the `trainer_state.json` of its checkpoint, not from a log."""
    with pytest.raises(Interrupted):
        trainer(tmp_path, die_at=6).train()
    monkeypatch.setattr(saved_log, "MOST_UNSYNCED", 2)
    steps, resumed_trainer = Steps(monkeypatch), trainer(tmp_path, save_strategy="no")
    output = resumed_trainer.train(resume_from_checkpoint=True)
    assert not steps.seen & {2}
    assert "train_runtime" in output.metrics
    history = resumed_trainer.state.log_history
    assert [record["step"] for record in history if "loss" in record] == [*range(1, 9)]
    assert not steps.seen & {2}


def test_a_trainer_that_is_resumed_names_a_log_that_has_changed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(Interrupted):
        trainer(tmp_path, die_at=6).train()
    (path,) = tmp_path.rglob("trainer_logs.json")
    path.write_bytes(path.read_bytes().replace(b'"global_step": 2', b'"global_step": 3', 1))
    trainer(tmp_path).train(resume_from_checkpoint=True)
    assert f"{path} is not what the run had written up to step 4: its content has changed" in caplog.text
    assert [record["global_step"] for record in read_records(path) if "loss" in record] == [1, 3, 3, 4, 5, 6, 7, 8]
