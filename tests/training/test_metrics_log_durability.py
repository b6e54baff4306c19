"""What a checkpoint covers of the metrics log survives power failures and full disks; what is lost is named."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from onstep import Callback, CallbackManager, JsonLogger, pretrain
from onstep.analysis.logs.training_log import TrainingLog
from onstep.analysis.reports.summary import compute_summary_statistics
from onstep.callbacks import GradNormLogger
from onstep.checkpoint import checkpoints
from onstep.config import ConfigContainer
from onstep.record import MetricsLog, Record, read_records, without_wall_clock
from onstep.trackers import replay
from onstep.trackers.services.csv_tracker import CsvTracker
from tests.support.forked_processes import Processes
from tests.support.resuming import Interrupted
from tests.support.train_command import Command
from tests.support.whole_runs import Ranks

LINE = re.compile(rb"\{[^\n]*\}")


def lines_to_keep(content: bytes, number: int) -> list[re.Match[bytes]]:
    return [*LINE.finditer(content)][: number + 1]


def older_copy(path: Path) -> None:
    """The first two records."""
    kept = lines_to_keep(path.read_bytes(), 2)[:2]
    path.write_bytes(b"[\n" + b",\n".join(one[0] for one in kept) + b"\n]")


def cut_in_a_record(path: Path) -> None:
    third = lines_to_keep(content := path.read_bytes(), 2)[2]
    path.write_bytes(content[: third.start() + 20])


def zeros_at_the_end(path: Path) -> None:
    third = lines_to_keep(content := path.read_bytes(), 2)[2]
    path.write_bytes(content[: third.start() + 20] + bytes(len(content) - third.start() - 20))


def zeros_in_the_middle(path: Path) -> None:
    third = lines_to_keep(content := path.read_bytes(), 2)[2]
    path.write_bytes(content[: third.start()] + bytes(30) + content[third.start() + 30 :])


def bytes_that_are_no_text(path: Path) -> None:
    third = lines_to_keep(content := path.read_bytes(), 2)[2]
    path.write_bytes(content[: third.start() + 5] + b"\xff\xfe" * 9 + content[third.start() + 23 :])


Damage = Callable[[Path], None]
LOSES_FROM_THE_THIRD_ON = [older_copy, cut_in_a_record, zeros_at_the_end, zeros_in_the_middle, bytes_that_are_no_text]


def gone(path: Path) -> None:
    path.unlink()


def empty(path: Path) -> None:
    path.write_bytes(b"")


def all_zeros(path: Path) -> None:
    path.write_bytes(bytes(len(path.read_bytes())))


def of_another_run(path: Path) -> None:
    path.write_text(json.dumps([{"timestamp": 1.0 + step, "global_step": step, "loss": 9.0} for step in range(1, 30)]))


LOSES_ALL = [gone, empty, all_zeros, of_another_run]


@pytest.fixture
def config(tiny_config: ConfigContainer, tmp_path: Path) -> ConfigContainer:
    """8 steps, each logged; checkpoints at 4 and 8."""
    tiny_config.run.name, tiny_config.run.output_dir, tiny_config.run.save_weights = "run", str(tmp_path), False
    tiny_config.logger.log_interval, tiny_config.checkpoint.save_interval = 1, 4
    tiny_config.validation.eval_interval = None
    tiny_config.checkpoint.most_recent_k = -1
    return tiny_config


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "trainer_logs.json"


class DiesAt(Callback):
    def __init__(self, step: int) -> None:
        self.dies_at = step

    def on_step_end(self, context: Any) -> None:
        if context.trainer_state.global_step == self.dies_at:
            raise Interrupted


def run(config: ConfigContainer, *callbacks: Any, dies_at: int | None = None) -> None:
    manager = CallbackManager()
    manager.add([JsonLogger(), *callbacks])
    if dies_at is None:
        pretrain(config, callbacks=manager)
        return
    manager.add(DiesAt(dies_at))
    with pytest.raises(Interrupted):
        pretrain(config, callbacks=manager)


def steps(path: Path) -> list[int]:
    return [record["global_step"] for record in read_records(path) if "loss" in record]


def gaps(path: Path) -> list[dict[str, Any]]:
    found = [record["missing_records"] for record in read_records(path) if "missing_records" in record]
    return [{key: gap[key] for key in ("number", "after_step", "up_to_step")} for gap in found]


def damaged(config: ConfigContainer, path: Path, damages: list[Damage]) -> Iterator[Damage]:
    """A run that was interrupted after step 6, as one left it; its log is damaged in one way after the other."""
    run(config, dies_at=6)
    shutil.copytree(path.parent, path.parents[1] / "as-left")
    for damage in damages:
        shutil.rmtree(path.parent)
        shutil.copytree(path.parents[1] / "as-left", path.parent)
        damage(path)
        yield damage


def test_a_lost_end_is_named_and_the_rest_is_continued(
    config: ConfigContainer, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for damage in damaged(config, path, LOSES_FROM_THE_THIRD_ON):
        caplog.clear()
        run(config)
        assert steps(path) == [1, 2, 5, 6, 7, 8], damage
        assert gaps(path) == [{"number": 2, "after_step": 2, "up_to_step": 4}], damage
        assert "2 records after step 2, up to step 4 are missing" in caplog.text, damage
        assert json.loads(path.read_text())


def test_a_lost_file_is_named(config: ConfigContainer, path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for damage in damaged(config, path, LOSES_ALL):
        caplog.clear()
        run(config)
        assert steps(path) == [5, 6, 7, 8], damage
        assert gaps(path) == [{"number": 4, "after_step": None, "up_to_step": 4}], damage
        assert "4 records up to step 4 are missing" in caplog.text, damage
        if damage is of_another_run:
            assert len(read_records(path.with_name("trainer_logs.1.json"))) == 29


def test_a_loss_after_the_checkpoint_is_no_gap(config: ConfigContainer, path: Path) -> None:
    run(config, dies_at=6)
    content = path.read_bytes()
    fifth = lines_to_keep(content, 4)[4]
    path.write_bytes(content[: fifth.start()] + bytes(30) + content[fifth.start() + 30 :])
    run(config)
    assert steps(path) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert gaps(path) == []


def without_the_second(path: Path) -> None:
    """Valid, without a record before its end."""
    second = lines_to_keep(content := path.read_bytes(), 2)[1]
    path.write_bytes(content[: second.start()] + content[second.end() + len(b",\n") :])


def with_another_number(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'"epoch": 0.', b'"epoch": 7.', 1))


@pytest.mark.parametrize("damage", [without_the_second, with_another_number])
def test_a_change_that_leaves_the_log_valid_is_named(
    config: ConfigContainer, path: Path, damage: Damage, caplog: pytest.LogCaptureFixture
) -> None:
    config.validation.eval_interval = 1
    run(config, GradNormLogger(), dies_at=6)
    for name in ("trainer_logs.json", "gradient_norms.json"):
        damage(path.with_name(name))
    run(config, GradNormLogger())
    text = "is not what the run had written up to step 4: " + (
        "it has {} records, not {}" if damage is without_the_second else "its content has changed"
    )
    assert f"{path} {text.format(7, 8)}" in caplog.text
    assert f"{path.with_name('gradient_norms.json')} {text.format(3, 4)}" in caplog.text
    assert len(gaps(path)) == (damage is without_the_second)
    assert steps(path) == [1, 2, 3, 4, 5, 6, 7, 8]


def test_a_gap_is_recorded_once_however_often_the_run_is_resumed(config: ConfigContainer, path: Path) -> None:
    run(config, dies_at=6)
    older_copy(path)
    run(config, dies_at=6)
    run(config, dies_at=7)
    assert steps(path) == [1, 2, 5, 6]
    run(config)
    assert steps(path) == [1, 2, 5, 6, 7, 8]
    assert gaps(path) == [{"number": 2, "after_step": 2, "up_to_step": 4}]


def test_a_gap_is_shown_in_summaries_and_replays(
    config: ConfigContainer, path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(config, dies_at=6)
    older_copy(path)
    run(config)
    notes = compute_summary_statistics(TrainingLog.from_file(path))["notes"]
    assert notes == ["2 records after step 2, up to step 4 are missing"]
    with caplog.at_level(logging.WARNING):
        replay(path, CsvTracker(tmp_path / "metrics.csv"))
    assert "2 records after step 2, up to step 4 are missing" in caplog.text
    header, *rows = (tmp_path / "metrics.csv").read_text().splitlines()
    assert "missing" not in header
    assert [row.split(",")[0] for row in rows if ",train," in row] == ["1", "2", "5", "6", "7", "8"]


class PowerCut:
    """Notes the content that files surely have on the disk: that of their last fsync, under the name of that time."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.durable: dict[str, bytes] = {}
        self.at_rename: dict[str, dict[str, bytes]] = {}
        fsync, rename = os.fsync, os.rename

        def noting_fsync(descriptor: int) -> None:
            fsync(descriptor)
            name = os.readlink(f"/proc/self/fd/{descriptor}")
            if Path(name).is_file():
                self.durable[name] = Path(name).read_bytes()

        def noting_rename(source: Any, target: Any) -> None:
            self.at_rename[Path(target).name] = dict(self.durable)
            rename(source, target)

        patch.setattr(os, "fsync", noting_fsync)
        patch.setattr(os, "rename", noting_rename)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_power_failure_right_after_a_checkpoint_loses_nothing_that_it_covers(
    config: ConfigContainer, path: Path, asynchronous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config.checkpoint.async_save = asynchronous
    config.validation.eval_interval = 2
    config.logger.report_to = ["csv"]
    config.checkpoint.certify, config.checkpoint.save_interval = True, 2
    with monkeypatch.context() as patch:
        power = PowerCut(patch)
        run(config, GradNormLogger(), dies_at=5)
    on_disk = power.at_rename["checkpoint-4"]
    files = ["trainer_logs.json", "gradient_norms.json", "metrics.csv", "decisions.jsonl", "certificate/chain.json"]
    for name in [*files, "record.jsonl"]:
        place = path.parent / name
        assert str(place) in on_disk, f"{name} is not durable when the checkpoint is committed"
        place.write_bytes(on_disk[str(place)])
    run(config, GradNormLogger())
    for log in (path, path.with_name("record.jsonl")):
        assert steps(log) == [1, 2, 3, 4, 5, 6, 7, 8]
        assert gaps(log) == []
    assert [record["step"] for record in read_records(path.parent / "certificate" / "chain.json")] == [*range(1, 9)]
    norms = [record["global_step"] for record in read_records(path.parent / "gradient_norms.json")]
    assert norms == [2, 4, 6, 8]
    rows = [row.split(",")[:2] for row in (path.parent / "metrics.csv").read_text().splitlines()]
    assert [int(step) for step, kind in rows[1:] if kind == "train"] == [1, 2, 3, 4, 5, 6, 7, 8]


class FullDisk(Callback):
    """The disk of the metrics log is full from a step on."""

    def __init__(self, patch: pytest.MonkeyPatch, from_step: int, to_step: int = 10**9) -> None:
        append = MetricsLog.append_encoded

        def refused(metrics_log: MetricsLog, text: str) -> None:
            if self.is_full and metrics_log.path.name == "trainer_logs.json":
                raise OSError(28, "No space left on device")
            append(metrics_log, text)

        self.is_full = False
        self.span = range(from_step, to_step)
        patch.setattr(MetricsLog, "append_encoded", refused)

    def on_step_begin(self, context: Any) -> None:
        self.is_full = context.trainer_state.global_step + 1 in self.span


def whole_records(config: ConfigContainer, name: str = "whole") -> list[Record]:
    import copy

    other = copy.deepcopy(config)
    other.run.name = name
    run(other)
    return [without_wall_clock(one) for one in read_records(Path(other.run.output_dir) / name / "trainer_logs.json")]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_records_that_a_full_disk_refused_come_from_the_checkpoint(
    config: ConfigContainer, path: Path, asynchronous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config.checkpoint.async_save = asynchronous
    expected = whole_records(config)
    with monkeypatch.context() as patch:
        run(config, FullDisk(patch, 3), dies_at=7)
    assert steps(path) == [1, 2]
    run(config)
    assert [without_wall_clock(record) for record in read_records(path)] == expected
    assert gaps(path) == []


def test_records_that_were_written_after_the_checkpoint_that_holds_them_are_there_once(
    config: ConfigContainer, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        run(config, FullDisk(patch, 3, 6), dies_at=7)
    assert steps(path) == [1, 2, 3, 4, 5, 6]
    run(config)
    assert steps(path) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert gaps(path) == []


def test_the_end_of_a_run_says_which_records_are_not_in_the_file(
    config: ConfigContainer, path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as patch:
        run(config, FullDisk(patch, 7))
    assert "records of steps 7 to 8 are not in" in caplog.text
    assert steps(path) == [1, 2, 3, 4, 5, 6]
    config.train.train_iters = 10
    config.checkpoint.on_config_change = "apply"
    run(config)
    assert steps(path) == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]


def test_records_that_cannot_be_made_durable_are_in_the_next_checkpoint(
    config: ConfigContainer, path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config.checkpoint.save_interval = 2
    real = os.fsync

    def broken(descriptor: int) -> None:
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith("trainer_logs.json"):
            raise OSError(5, "Input/output error")
        real(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", broken)
        run(config, dies_at=5)
    assert "could not be made durable" in caplog.text
    assert steps(path) == [1, 2, 3, 4]
    older_copy(path)  # what the disk really has
    run(config)
    assert steps(path) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert gaps(path) == []


@pytest.mark.parametrize("is_checkpoint_older", [False, True])
def test_more_records_than_a_checkpoint_can_hold_leave_a_gap_that_is_named(
    tmp_path: Path, is_checkpoint_older: bool, caplog: pytest.LogCaptureFixture
) -> None:
    from onstep.metrics import JsonLogWriter

    writer = JsonLogWriter("log.json")
    writer.open(tmp_path)
    writer.write_record(1, 0.1, {"loss": 1.0})
    older = json.loads(json.dumps(writer.state_dict()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pwrite", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        for step in range(2, 12_002):
            writer.write_record(step, 0.1, {"loss": 1.0})
        state = json.loads(json.dumps(writer.state_dict()))
        assert writer.metrics_log is not None
        writer.metrics_log._release()  # killed
    assert len(state["held_records"]) == 10_000
    resumed = JsonLogWriter("log.json")
    resumed.load_state_dict(older if is_checkpoint_older else state)
    resumed.open(tmp_path, 1 if is_checkpoint_older else 12_001)
    resumed.close()
    if is_checkpoint_older:
        assert steps(tmp_path / "log.json") == [1]
    else:
        assert gaps(tmp_path / "log.json") == [{"number": 2001, "after_step": 1, "up_to_step": 2002}]
        assert steps(tmp_path / "log.json") == [1, *range(2003, 12_002)]


def test_a_rollback_drops_what_waits_and_belongs_to_the_abandoned_branch(tmp_path: Path) -> None:
    from onstep.metrics import JsonLogWriter

    writer = JsonLogWriter("log.json")
    writer.open(tmp_path)
    writer.write_record(1, 0.1, {"loss": 1.0})
    with pytest.MonkeyPatch.context() as patch:
        disk = FullDisk(patch, 0)
        patch.setattr(MetricsLog, "append_encoded", lambda *_: (_ for _ in ()).throw(OSError(28, "full")))
        writer.write_record(2, 0.2, {"loss": 2.0})
        state = json.loads(json.dumps(writer.state_dict()))
        writer.write_record(3, 0.3, {"loss": 3.0})
    assert not disk.is_full
    writer.load_state_dict(state)
    writer.write_record(3, 0.3, {"loss": 3.5})
    writer.close()
    assert [record["loss"] for record in read_records(tmp_path / "log.json")] == [1.0, 2.0, 3.5]


def test_a_checkpoint_of_the_version_before_names_the_gap_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from onstep.metrics import JsonLogWriter

    path = tmp_path / "log.json"
    path.write_text('[{"global_step": 1}, {"global_step": 2}]')
    writer = JsonLogWriter("log.json")
    writer.load_state_dict({"log_path": str(path), "last_step": 4, "num_records": 4})
    writer.open(tmp_path, 4)
    writer.close()
    assert "2 records after step 2, up to step 4 are missing" in caplog.text


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("log_path", 7),
        ("last_step", "four"),
        ("last_step", -2),
        ("num_records", [1]),
        ("num_records", 10**30),
        ("first_record", 1.5),
        ("last_record", {}),
        ("num_replaced", -1),
        ("held_records", "x"),
        ("held_records", ["[1]"]),
        ("held_records", [{}]),
    ],
)
def test_a_saved_position_of_wrong_type_is_an_error_that_names_it(field: str, value: Any, tmp_path: Path) -> None:
    from onstep.errors import CheckpointError

    state = {"log_path": str(tmp_path / "x.json"), "last_step": 1, "num_records": 1}
    with pytest.raises(CheckpointError, match=f"{field} = .*, which must be .*ckpt_step"):
        JsonLogger().load_state_dict({**state, field: value})


def test_a_checkpoint_does_not_hold_records_that_are_in_the_file(config: ConfigContainer, tmp_path: Path) -> None:
    sizes = []
    for name, interval in (("few", 4), ("many", 1)):
        config.run.name, config.logger.log_interval = name, interval
        run(config)
        newest = checkpoints(tmp_path / name / "checkpoints")[-1].path
        sizes.append((newest / "callbacks" / "rank_0.json").stat().st_size)
    assert abs(sizes[1] - sizes[0]) <= 16


# Other doors


def test_onstep_train_names_what_the_log_lost(
    processes: Processes, tmp_path: Path, corpus: Path, token_cache: Path
) -> None:
    command = Command(processes, tmp_path, corpus, token_cache)
    words = ["logger.log_interval=1", "checkpoint.save_interval=4"]
    assert command.start("run", *words, strike={"event": "on_log", "number": 6, "signal": "SIGKILL"}) == -9
    path = command.run("run") / "trainer_logs.json"
    content = path.read_bytes()
    path.write_bytes(content[: content.index(b'"global_step": 3,')])
    assert command.start("run", *words) == 0
    output = next(iter(sorted((tmp_path / "run").glob("*out*")))).read_text()
    assert "are missing, although the checkpoint covers them" in output
    assert steps(path) == [1, 2, 5, 6, 7, 8, 9]
    assert [gap["up_to_step"] for gap in gaps(path)] == [4]


def test_the_trainer_on_two_ranks_names_what_the_log_lost(
    processes: Processes, tmp_path: Path, corpus: Path, token_cache: Path
) -> None:
    processes.load("transformers.trainer_callback", "transformers.models.qwen2.modeling_qwen2")
    runs = Ranks(processes, tmp_path, "tests.support.jobs.trainer_jobs", corpus=str(corpus), cache=str(token_cache))
    strikes = [{"signal": "SIGKILL", "event": "on_step_end", "number": 8, "rank": rank} for rank in range(2)]
    settings = {"arguments": {"logging_steps": 1}}
    assert runs.start("run", "train", ranks=2, strikes=strikes, **settings) == [-9, -9]
    path = tmp_path / "run" / "runs" / "run" / "trainer_logs.json"
    before = steps(path)
    older_copy(path)
    assert runs.start("run", "train", ranks=2, **settings) == [0, 0], runs.output("run")
    assert "are missing, although the checkpoint covers them" in runs.output("run")
    (gap,) = gaps(path)
    assert gap["after_step"] == before[1]
    found = steps(path)
    assert len(set(found)) == len(found)
    assert found[2] == gap["up_to_step"] + 1
