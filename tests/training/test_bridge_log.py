"""`training_log` called by itself: interval sums, the tag matrix, the console line's fields, the memory flag."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from onstep import CallbackManager
from onstep.data import StepBatches
from onstep.distributed import World
from onstep.events import Control
from onstep.training import GlobalState, training_log
from onstep.training.bridge.interval_sums import add_to_interval
from onstep.training.compute.loss_sums import StepLoss
from onstep.training.compute.step import Step
from onstep.training.interval_log.bridge_log import BridgeLog
from onstep.training.reporting.loss_accumulator import LossAccumulator
from tests.support.read_counter import ReadCounter, StepMarker
from tests.support.recording_loggers import record_all
from tests.support.small_runs import loader, run, small_state

BACKENDS = ("tensorboard", "wandb", "mlflow", "comet")
ALL = frozenset(BACKENDS)


@dataclass
class Log:
    """A run whose steps are reported by hand."""

    state: GlobalState
    totals: dict[str, Any] = field(default_factory=dict)
    flag: bool = True
    values: dict[str, Any] = field(default_factory=dict)
    history: list[float] = field(default_factory=list)

    def step(self, loss: float | None = 2.0, skipped: int = 0, **changed: Any) -> None:
        """Count a step of 4 samples and report it."""
        self.state.train_state.step += 1
        self.state.train_state.consumed_train_samples += 4
        values = {
            "learning_rate": 0.25,
            "decoupled_learning_rate": None,
            "loss_scale": 1.0,
            "grad_norm": None,
            "params_norm": None,
            "num_zeros_in_grad": None,
            **self.values,
            **changed,
        }
        losses = {} if loss is None else {"lm loss": torch.tensor(loss)}
        self.flag = training_log(
            losses,
            self.totals,
            report_memory_flag=self.flag,
            skipped_iter=skipped,
            config=self.state.cfg,
            global_state=self.state,
            history_wct=self.history,
            model=[torch.nn.Linear(1, 1)],
            **values,
        )


@pytest.fixture
def log() -> Log:
    state = small_state(train_iters=100)
    state.cfg.logger.log_interval, state.cfg.logger.console = 4, "bridge"
    return Log(state)


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line for line in capsys.readouterr().out.splitlines() if line.startswith(" [")]


def test_the_signature_is_the_documented_one() -> None:
    parameters = inspect.signature(training_log).parameters
    assert list(parameters) == [
        *("loss_dict", "total_loss_dict", "learning_rate", "decoupled_learning_rate", "loss_scale"),
        *("report_memory_flag", "skipped_iter", "grad_norm", "params_norm", "num_zeros_in_grad", "config"),
        *("global_state", "history_wct", "model"),
        *("pg_collection", "log_max_attention_logit", "loaded_iteration", "seq_length"),
    ]
    optional = [name for name, one in parameters.items() if one.default is not inspect.Parameter.empty]
    assert {name: parameters[name].default for name in optional} == {
        "pg_collection": None,
        "log_max_attention_logit": None,
        "loaded_iteration": 0,
        "seq_length": None,
    }


def test_an_interval_adds_up_what_was_not_skipped_and_begins_anew(log: Log, capsys: pytest.CaptureFixture[str]) -> None:
    log.step(1.0)
    log.step(2.0)
    log.step(100.0, skipped=1)
    assert log.totals["advanced iterations"] == 2
    assert log.totals["skipped iterations"] == 1
    assert log.totals["lm loss"].tolist() == [3.0]
    assert lines(capsys) == []
    log.step(float("nan"), skipped=1)
    [line] = lines(capsys)
    assert " lm loss: 1.500000E+00 |" in line
    assert " number of skipped iterations:   2 | number of nan iterations:   1 |" in line
    assert log.totals["lm loss"].tolist() == [0.0]
    assert [log.totals[f"{name} iterations"] for name in ("advanced", "skipped", "nan")] == [0, 0, 0]


def test_an_interval_of_skipped_steps_alone_has_no_loss(log: Log, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(4):
        log.step(1.0)
    for _ in range(4):
        log.step(1.0, skipped=1)
    first, second = lines(capsys)
    assert " lm loss: 1.000000E+00 |" in first
    assert "lm loss" not in second
    assert " number of skipped iterations:   4 |" in second


def test_adding_up_leaves_the_losses_as_they_are() -> None:
    totals = dict[str, Any]()
    losses = [torch.tensor(value, dtype=torch.float64) for value in (1.0, 2.0)]
    for loss in losses:
        add_to_interval({"lm loss": loss}, totals, 0)
    assert [loss.item() for loss in losses] == [1.0, 2.0]
    assert totals["lm loss"].tolist() == [3.0]


@pytest.mark.parametrize(
    ("loss", "skipped", "num_nan"),
    [(float("inf"), 1, 4), (float("nan"), 1, 4), (3.0, 1, 0), (float("nan"), 0, 0), (None, 1, 0)],
)
def test_only_skipped_steps_are_nan_iterations(
    log: Log, capsys: pytest.CaptureFixture[str], loss: float | None, skipped: int, num_nan: int
) -> None:
    for _ in range(4):
        log.step(loss, skipped)
    assert f"number of nan iterations: {num_nan:3d} |" in lines(capsys)[0]


@pytest.mark.parametrize(("loss", "shown"), [(-1.0, False), (float("nan"), False), (0.0, True), (1.0, True)])
def test_a_negative_or_nan_mean_has_no_field(
    log: Log, capsys: pytest.CaptureFixture[str], loss: float, shown: bool
) -> None:
    for _ in range(4):
        log.step(loss)
    assert ("lm loss:" in lines(capsys)[0]) is shown


def test_every_field_of_the_line_is_in_its_place(log: Log, capsys: pytest.CaptureFixture[str]) -> None:
    log.values = {
        "loss_scale": 1024.0,
        "grad_norm": torch.tensor(1.5),
        "params_norm": 12.0625,
        "num_zeros_in_grad": 7,
        "log_max_attention_logit": 3.25,
    }
    log.state.train_state.skipped_train_samples = 9
    for _ in range(4):
        log.step()
    time = r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\]"
    assert re.fullmatch(
        rf" {time} iteration        4/     100 \| consumed samples:           16 \|"
        r" skipped samples:            9 \| elapsed time per iteration \(ms\): \d+\.\d \|"
        r" learning rate: 2\.500000E-01 \| global batch size:     4 \| lm loss: 2\.000000E\+00 \|"
        r" loss scale: 1024\.0 \| grad norm: 1\.500 \| num zeros: 7 \| params norm: 12\.062 \|"
        r" max attention logit: 3\.250 \| number of skipped iterations:   0 \| number of nan iterations:   0 \|",
        lines(capsys)[0],
    )


def test_no_learning_rate_is_no_field(log: Log, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(4):
        log.step(learning_rate=None)
    assert "learning rate" not in lines(capsys)[0]


@dataclass(frozen=True)
class Row:
    """A row of the tag matrix: what makes the tag appear, and where it goes."""

    tag: str
    value: Any
    vs_samples: bool = False
    backends: frozenset[str] = ALL
    options: tuple[str, ...] = ()
    values: tuple[tuple[str, Any], ...] = ()
    absent_without: bool = True


MATRIX = [
    Row("samples vs steps", 4, backends=frozenset({"wandb", "mlflow"}), absent_without=False),
    Row("learning-rate", 0.125, True, values=(("learning_rate", 0.125),), absent_without=False),
    Row(
        "decoupled-learning-rate", 0.5, backends=frozenset({"tensorboard"}), values=(("decoupled_learning_rate", 0.5),)
    ),
    Row("batch-size", 4, True, absent_without=False),
    Row("lm loss", 2.0, True, absent_without=False),
    Row("loss-scale", 8.0, True, values=(("loss_scale", 8.0),), absent_without=False),
    Row("world-size", 1, True, options=("log_world_size_to_tensorboard",)),
    Row("grad-norm", 1.5, True, values=(("grad_norm", torch.tensor(1.5)),)),
    Row("num-zeros", 7, True, values=(("num_zeros_in_grad", 7),)),
    Row("params-norm", 2.5, True, values=(("params_norm", torch.tensor(2.5)),)),
    Row("max-attention-logit", 3.5, True, values=(("log_max_attention_logit", 3.5),)),
    Row("time/samples", 4, options=("log_runtime_to_tensorboard",)),
]


@pytest.mark.parametrize("row", MATRIX, ids=lambda row: row.tag)
def test_each_tag_goes_where_the_matrix_says(log: Log, row: Row) -> None:
    loggers = record_all(log.state)
    log.step()
    for name, logger in loggers.items():
        assert (row.tag in logger.tags) is (not row.absent_without and name in row.backends)
        logger.points.clear()
    log.state.train_state.step = log.state.train_state.consumed_train_samples = 0
    for option in row.options:
        setattr(log.state.cfg.logger, option, True)
    log.step(**dict(row.values))
    for name, logger in loggers.items():
        expected = {1: pytest.approx(row.value)} if name in row.backends else {}
        assert logger.curve(row.tag) == expected, name
        over_samples = {4: pytest.approx(row.value)} if row.vs_samples and name == "tensorboard" else {}
        assert logger.curve(f"{row.tag} vs samples") == over_samples, name


def test_skipped_samples_are_shown_where_there_are_any(log: Log) -> None:
    loggers = record_all(log.state)
    log.step()
    log.state.train_state.skipped_train_samples = 4
    log.step()
    assert [logger.curve("skipped-train-samples") for logger in loggers.values()] == [{2: 4.0}] * 4


def test_no_loss_scale_where_it_is_switched_off(log: Log) -> None:
    log.state.cfg.logger.log_loss_scale_to_tensorboard = False
    loggers = record_all(log.state)
    log.step()
    assert all("loss-scale" not in logger.tags for logger in loggers.values())


def test_a_step_without_losses_has_no_loss_tag(log: Log) -> None:
    loggers = record_all(log.state)
    log.step(None)
    assert all("lm loss" not in logger.tags for logger in loggers.values())


def test_mlflow_and_comet_get_plain_numbers_from_a_logger_of_the_user(log: Log) -> None:
    loggers = record_all(log.state)
    log.step(grad_norm=torch.tensor(1.5))
    for name in ("mlflow", "comet"):
        assert not any(isinstance(value, Tensor) for _, value, _ in loggers[name].points)


def test_throughput_counts_the_batch_that_was_run(log: Log) -> None:
    log.state.cfg.logger.log_throughput_to_tensorboard, log.state.cfg.logger.throughput_window_size = True, 3
    log.state.num_microbatches, log.history = 1, [0.0, 1.0, 2.0]
    loggers = record_all(log.state)
    log.step()
    assert loggers["wandb"].curve("throughput/samples_per_sec") == {1: 2.0}
    assert loggers["wandb"].curve("throughput/global_batch_size") == {1: 2}
    assert loggers["wandb"].curve("batch-size") == {1: 2}


def test_called_by_hand_it_fills_the_configured_trackers(log: Log, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log.state.cfg.logger.tensorboard_dir = str(tmp_path)
    log.step(3.0)
    log.step(2.0)
    log.state.bridge_trackers.close("completed")
    reader = EventAccumulator(str(tmp_path))
    reader.Reload()
    assert [(point.step, point.value) for point in reader.Scalars("lm loss")] == [(1, 3.0), (2, 2.0)]


def test_points_are_written_at_their_interval_only(log: Log) -> None:
    log.state.cfg.logger.tensorboard_log_interval = 3
    loggers = record_all(log.state)
    for number in range(1, 8):
        log.step(float(number))
    assert loggers["wandb"].curve("lm loss") == {3: 3.0, 6: 6.0}


def test_skipped_train_metrics_write_and_print_nothing_but_begin_anew(
    log: Log, capsys: pytest.CaptureFixture[str]
) -> None:
    log.state.cfg.logger.skip_train_metrics_log = True
    loggers = record_all(log.state)
    for _ in range(4):
        log.step()
    assert all(logger.points == [] for logger in loggers.values())
    assert capsys.readouterr().out == ""
    assert log.totals["advanced iterations"] == 0


@pytest.mark.parametrize(("loaded", "expected"), [(0, [True, False, False]), (2, [True, True, True])])
def test_memory_is_reported_until_the_second_step_of_the_process(log: Log, loaded: int, expected: list[bool]) -> None:
    log.state.cfg.logger.log_interval = 1
    log.values = {"loaded_iteration": loaded}
    flags = []
    for _ in expected:
        log.step()
        flags.append(log.flag)
    assert flags == expected


def test_the_memory_line_names_rank_and_step(
    log: Log, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: {"allocated_bytes.all.peak": 2_500_000_000})
    for _ in range(8):
        log.step()
    printed = capsys.readouterr().out.splitlines()
    assert [line for line in printed if "memory (GB)" in line] == [
        "[Rank 0] (after 4 iterations) memory (GB) | mem-max-allocated-gigabytes: 2.5"
    ]


@pytest.mark.parametrize(("rank", "prints"), [(0, False), (1, True)])
def test_the_last_rank_prints_the_line(log: Log, capsys: pytest.CaptureFixture[str], rank: int, prints: bool) -> None:
    log.state.world = World(rank=rank, size=2)
    log.state.control = Control(rank=rank)
    for _ in range(4):
        log.step()
    found = lines(capsys)
    assert len(found) == int(prints)
    assert all(" global batch size:     8 |" in line for line in found)


def test_a_module_of_the_user_has_no_speed_in_flops(log: Log, capsys: pytest.CaptureFixture[str]) -> None:
    log.state.cfg.logger.log_throughput, log.state.cfg.model.vocab_size = True, 100
    for _ in range(4):
        log.step()
    printed = capsys.readouterr().out
    assert "TFLOP" not in printed
    assert "Theoretical" not in printed


class QuietTensorBoard:
    """Takes points without looking at them."""

    def __init__(self) -> None:
        self.values: list[Any] = []

    def add_scalar(self, tag: str, value: Any, step: int) -> None:
        self.values.append(value)


def test_a_step_that_is_not_logged_reads_nothing_for_tensorboard_and_console() -> None:
    state = small_state(train_iters=6)
    state.cfg.logger.log_interval, state.cfg.logger.log_params_norm = 3, True
    state.cfg.logger.console = "bridge"
    state.tensorboard_logger = quiet = QuietTensorBoard()
    manager = CallbackManager()
    with ReadCounter() as counter:
        manager.add(StepMarker(counter))
        run(state, manager)
    reads = counter.by_step()
    assert {step for step, count in reads.items() if count} <= {3, 6}
    assert sum(isinstance(value, Tensor) for value in quiet.values) >= 6 * 6


def test_an_epoch_that_ends_within_an_interval_is_logged_with_what_there_is(
    capsys: pytest.CaptureFixture[str],
) -> None:
    state = small_state(train_iters=5)
    state.cfg.logger.log_interval, state.cfg.logger.log_on_each_epoch = 2, True
    state.cfg.logger.console = "bridge"
    run(state, data=loader())  # an epoch has 3 steps
    steps = [int(re.findall(r"iteration +(\d+)/", line)[0]) for line in lines(capsys)]
    assert steps == [2, 3, 4, 5]


def test_nothing_is_done_where_nobody_wants_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **options: Any) -> bool:
        raise AssertionError

    monkeypatch.setattr("onstep.training.interval_log.bridge_log.report_step", fail)
    state = small_state(train_iters=3)
    state.cfg.logger.log_interval = 1
    run(state)
    assert "training_log" not in {feature.name for feature in state.features.built}


def test_a_snapshot_is_written_also_without_train_metrics(
    log: Log, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda **options: {"segments": []})
    profiling = log.state.cfg.profiling
    profiling.record_memory_history, profiling.profile_step_end = True, 2
    profiling.memory_snapshot_path = str(tmp_path / "memory.pickle")
    log.state.cfg.logger.skip_train_metrics_log = True
    log.step()
    assert list(tmp_path.iterdir()) == []
    log.step()
    assert [path.name for path in tmp_path.iterdir()] == ["memory_0.pickle"]


def test_the_loop_prints_the_lines_that_training_log_prints_of_its_own_sums(
    log: Log, capsys: pytest.CaptureFixture[str]
) -> None:
    """Steps that are left out, and one that is not finite: the loop's one accumulator tells them as the dictionary."""

    def losses(step: int) -> float:
        return {2: float("nan"), 3: 1e9}.get(step, 1.0 + step)

    for step in range(1, 9):
        log.step(losses(step), skipped=int(step in (2, 3)), learning_rate=None)
    by_hand = [line[line.index(" lm loss") :] for line in lines(capsys)]

    accumulator = LossAccumulator()
    state = small_state(train_iters=8)
    state.cfg.logger.log_interval, state.cfg.logger.console = 4, "bridge"
    optimizer = SimpleNamespace(param_groups=[])
    job: Any = SimpleNamespace(run=state, model=[torch.nn.Linear(1, 1)], optimizer=optimizer, accumulator=accumulator)
    log_of_loop = BridgeLog(job)
    log_of_loop.restart_interval()
    for step in range(1, 9):
        loss, is_skipped = StepLoss(torch.tensor(losses(step)), 1, None), step in (2, 3)
        state.train_state.step = step
        accumulator.add(None if step == 2 else loss, None, successful=not is_skipped)
        job.last = Step(step, StepBatches([], None, None, []), applied=not is_skipped)
        job.last.total = loss
        log_of_loop.after_count(job.last)
        log_of_loop._report(is_logged=step % 4 == 0)
        if step % 4 == 0:
            accumulator.flush()
    assert [line[line.index(" lm loss") :] for line in lines(capsys)] == by_hand
    assert "number of skipped iterations:   2 | number of nan iterations:   1 |" in by_hand[0]
