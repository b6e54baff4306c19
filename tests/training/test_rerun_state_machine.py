"""A suspicious result is computed again, in place and after a restart, and the fault attributed."""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from onstep.checkpoint import RngState, decode_state, encode_state
from onstep.config import RerunStateMachineConfig
from onstep.data import StepBatches
from onstep.distributed import World
from onstep.errors import ConfigError
from onstep.training.compute.losses import MicroLoss
from onstep.training.rerun.machine import RerunStateMachine
from onstep.training.rerun.rejections import (
    RerunDiagnostic,
    RerunErrorInjector,
    RerunMode,
    RerunState,
    UnexpectedResultError,
    relative_difference,
)
from onstep.training.rerun.rerun import fresh_batches, validate_losses
from onstep.training.rerun.snapshot import RerunDataIterator
from onstep.training.stages.forward_backward import BufferGuard
from tests.support.forked_processes import Processes

Compute = Callable[[int, float], float]
"""(run of the step, what the data gives) -> result"""


def right(run: int, value: float) -> float:
    return value


def wrong_once(run: int, value: float) -> float:
    """A transient error: only the first run is wrong."""
    return math.nan if run == 0 else value


def always_wrong(run: int, value: float) -> float:
    """A persistent error, or a result that is right and looks wrong."""
    return math.nan


def machine(device: str = "node-1/gpu-0", **options: Any) -> RerunStateMachine:
    return RerunStateMachine(mode=options.pop("mode", "validate_results"), device=device, **options)


def data() -> RerunDataIterator:
    return RerunDataIterator({"x": torch.tensor(float(number))} for number in range(100))


def step(
    machine: RerunStateMachine, iterator: Any = None, compute: Compute = right, **validation: Any
) -> tuple[list[float], tuple[bool, bool, int]]:
    """One step of two micro-batches; the results of each run, and what the machine says."""
    results: list[float] = []
    run = 0
    while machine.should_run_forward_backward(iterator):
        for _ in range(2):
            value = float(next(iterator)["x"]) if iterator is not None else 1.0
            value += float(torch.rand(())) + random.random() + float(np.random.rand())
            result = compute(run, value)
            results.append(result)
            machine.validate_result(torch.tensor(result), is_nan, "found NaN", **validation)
        run += 1
    return results, machine.should_checkpoint_and_exit()


def is_nan(result: Any) -> bool:
    return bool(torch.isnan(result))


def generators() -> tuple[Any, ...]:
    return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()


def restarted(before: RerunStateMachine, device: str, **options: Any) -> RerunStateMachine:
    """The machine of the next process, from what a checkpoint holds."""
    after = machine(device, **options)
    after.load_state_dict(decode_state(*encode_state(before.state_dict())))
    return after


def test_disabled_runs_once_and_asks_nobody() -> None:
    class Alone(World):
        def agree(self, votes: list[int]) -> list[int]:
            raise AssertionError("no collective")

        def gather_numbers(self, numbers: list[float]) -> list[list[float]]:
            raise AssertionError("no collective")

    one = RerunStateMachine(Alone(), device="d")
    assert one.get_mode() is RerunMode.DISABLED
    iterator = iter([{"x": torch.tensor(1.0)}] * 4)
    for expected in (1, 2):
        results, decision = step(one, iterator)
        assert (len(results), decision, one.current_iteration) == (2, (False, False, 0), expected)


def test_disabled_a_rejected_result_raises_and_names_its_place() -> None:
    one = RerunStateMachine(World(rank=3, size=1), device="node-7/gpu-2")
    one.current_iteration = 41
    with pytest.raises(UnexpectedResultError) as caught:
        step(one, compute=always_wrong)
    assert isinstance(caught.value, RuntimeError)
    text = str(caught.value)
    assert "Rank 3, device node-7/gpu-2, iteration 41: Unexpected result nan (message='found NaN')" in text


def test_disabled_a_result_that_is_not_fatal_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    _, decision = step(RerunStateMachine(device="d"), compute=always_wrong, fatal=False)
    assert decision == (False, False, 0)
    assert "Unexpected result nan" in caplog.text


def test_a_step_without_rejection_runs_once() -> None:
    one = machine()
    before = generators()
    results, decision = step(one, data())
    assert (len(results), decision, one.current_iteration) == (2, (False, False, 0), 1)
    assert generators() != before


def test_a_transient_error_is_found_in_place() -> None:
    one = machine()
    results, decision = step(one, data(), wrong_once)
    assert decision == (False, True, 17)
    assert len(results) == 4
    assert one.state is RerunState.RERUNNING_IN_PLACE
    assert one.diagnosis is not None
    assert one.diagnosis.kind is RerunDiagnostic.TRANSIENT_ERROR
    assert "node-1/gpu-0" in str(one.diagnosis)


def test_a_rerun_has_the_same_data_and_random_numbers() -> None:
    other, _ = step(machine(), data())
    torch.manual_seed(3), random.seed(3), np.random.seed(3)
    expected, _ = step(machine(), data())
    torch.manual_seed(3), random.seed(3), np.random.seed(3)
    results, _ = step(machine(mode="report_determinism_stats"), data())
    assert results == expected + expected
    assert other != expected


def test_what_is_reproduced_saves_at_the_place_before_the_step_and_leaves() -> None:
    one, iterator = machine(), data()
    step(one, iterator)
    before = generators()
    _, decision = step(one, iterator, always_wrong)
    assert decision == (True, True, 16)
    assert one.state is RerunState.WILL_RERUN_FROM_CHECKPOINT
    assert one.diagnosis is None
    assert generators() == before
    assert one.current_iteration == 1
    assert [float(next(iterator)["x"]) for _ in range(3)] == [2.0, 3.0, 4.0]


@pytest.mark.parametrize(
    ("device", "compute", "exit_code", "kind"),
    [
        ("node-2/gpu-0", always_wrong, 17, RerunDiagnostic.CORRECT_RESULT),
        ("node-2/gpu-0", right, 17, RerunDiagnostic.PERSISTENT_ERROR),
        ("node-1/gpu-0", always_wrong, 16, None),
        ("node-1/gpu-0", right, 16, None),
    ],
)
def test_after_a_restart_the_fault_is_attributed(
    device: str, compute: Compute, exit_code: int, kind: RerunDiagnostic | None, caplog: pytest.LogCaptureFixture
) -> None:
    before = machine()
    step(before, data(), always_wrong)
    after = restarted(before, device)
    results, decision = step(after, data(), compute)
    assert (len(results), decision) == (2, (False, True, exit_code))
    assert (after.diagnosis and after.diagnosis.kind) is kind
    assert "Rank 0, device node-1/gpu-0, iteration 0" in caplog.records[-1].getMessage()


def test_a_checkpoint_of_another_time_has_nothing_in_question() -> None:
    before = machine()
    step(before, data())
    after = restarted(before, "node-2/gpu-0")
    _, decision = step(after, data())
    assert (decision, after.current_iteration) == (((False, False, 0)), 2)


def test_a_question_stays_until_the_step_was_computed_again() -> None:
    before = machine()
    step(before, data(), always_wrong)
    saved_before_the_step = restarted(before, "node-1/gpu-0")
    after = restarted(saved_before_the_step, "node-2/gpu-0")
    _, decision = step(after, data(), right)
    assert decision == (False, True, 17)


@pytest.mark.parametrize("options", [{"mode": "disabled"}, {"world": World(rank=0, size=2)}])
def test_a_question_that_cannot_be_answered_is_dropped(options: Any, caplog: pytest.LogCaptureFixture) -> None:
    before = machine()
    step(before, data(), always_wrong)
    after = restarted(before, "node-2/gpu-0", **options)
    assert "not recomputed" in caplog.text
    assert after.state_dict()["rejections"] == []
    if not after.is_enabled:
        assert step(after, data())[1] == (False, False, 0)


def test_what_is_not_fatal_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    for compute in (always_wrong, wrong_once):
        one, iterator = machine(), data()
        results, decision = step(one, iterator, compute, fatal=False)
        assert (len(results), decision, one.current_iteration) == (4, (False, False, 0), 1)
        assert float(next(iterator)["x"]) == 2.0
        assert "not fatal" in caplog.text


def test_a_result_that_is_suspicious_only_the_second_time_is_transient() -> None:
    one = machine()
    values = iter([math.nan, 1.0, math.nan, math.nan])
    while one.should_run_forward_backward():
        for _ in range(2):
            one.validate_result(torch.tensor(next(values)), is_nan)
    assert one.should_checkpoint_and_exit() == (False, True, 17)


def test_a_difference_within_the_tolerance_counts_as_the_same() -> None:
    def compute(run: int, value: float) -> float:
        return 1000.0 + run

    for tolerance, code in ((0.01, 16), (0.0, 17)):
        one = machine()
        while one.should_run_forward_backward():
            run = 0 if one.state is RerunState.INITIAL_RUN else 1
            one.validate_result(compute(run, 0.0), lambda value: value > 10, "large", tolerance=tolerance)
        assert one.should_checkpoint_and_exit()[2] == code


def test_a_comparison_function_of_ones_own_decides() -> None:
    one = machine()
    compared: list[tuple[Any, Any]] = []

    def compare(first: Any, second: Any) -> float:
        compared.append((first, second))
        return 0.0

    texts = iter(["a", "b"])
    while one.should_run_forward_backward():
        one.validate_result(next(texts), lambda text: True, comparison_func=compare)
    assert compared == [("a", "b")]
    assert one.should_checkpoint_and_exit() == (True, True, 16)


@pytest.mark.parametrize(
    ("kind", "in_place", "elsewhere"),
    [
        ("transient_error", 17, None),
        ("persistent_error", 16, "persistent_error"),
        ("correct_result", 16, "correct_result"),
    ],
)
def test_simulated_errors_give_the_documented_decisions(kind: str, in_place: int, elsewhere: str | None) -> None:
    config = RerunStateMachineConfig("validate_results", error_injection_rate=1, error_injection_type=kind)
    one = RerunStateMachine.from_config(config, World(), device="node-1/gpu-0")
    _, decision = step(one, data())
    assert decision == (in_place == 16, True, in_place)
    if elsewhere is None:
        assert one.diagnosis is not None
        assert one.diagnosis.kind.value == kind
        return
    saved = RngState().state_dict()
    for device, code in (("node-1/gpu-0", 16), ("node-2/gpu-0", 17)):
        RngState().load_state_dict(saved)
        after = restarted(one, device, error_injector=RerunErrorInjector(1, kind))
        assert step(after, data())[1] == (False, True, code)
        assert (after.diagnosis.kind.value if after.diagnosis else None) == (elsewhere if code == 17 else None)


def test_the_injector_draws_no_random_numbers_of_the_run() -> None:
    before = generators()
    injector = RerunErrorInjector(3)
    injected = [injector.maybe_inject() for _ in range(50)]
    assert generators() == before
    assert injected.count(True) == 1
    assert not any(RerunErrorInjector(0).maybe_inject() for _ in range(50))


def test_statistics_count_what_is_not_deterministic(caplog: pytest.LogCaptureFixture) -> None:
    one = machine(mode=RerunMode.REPORT_DETERMINISM_STATS)
    for _ in range(3):
        while one.should_run_forward_backward():
            again = one.state is not RerunState.INITIAL_RUN
            one.validate_result(4.0, is_nan, "steady")
            one.validate_result(5.0 if again else 4.0, is_nan, "shaky")
        assert one.should_checkpoint_and_exit() == (False, False, 0)
    assert one.current_iteration == 3
    with caplog.at_level(logging.INFO):
        stats = one.report_determinism_stats()
    assert (stats["steady"].count, stats["steady"].num_different) == (3, 0)
    assert (stats["shaky"].num_different, stats["shaky"].largest) == (3, pytest.approx(0.2))
    assert "shaky" in caplog.text


def test_a_result_is_large_against_the_first_ones() -> None:
    one = machine()

    def is_large(value: float, **options: Any) -> bool:
        return one.is_unexpectedly_large(value, 10.0, "loss", num_samples=3, **options)

    assert [is_large(value) for value in (1.0, math.nan, 50.0, 2.0)] == [False] * 4
    assert [is_large(value) for value in (500.0, 501.0, -501.0, 1e9, 3.0)] == [False, True, True, True, False]
    one = restarted(one, "elsewhere")
    assert is_large(501.0)
    assert not is_large(1.0, resample=True)


def test_a_rerun_takes_no_samples_of_what_is_large() -> None:
    one = machine()
    for _ in range(2):
        while one.should_run_forward_backward():
            one.is_unexpectedly_large(1.0, 10.0, "loss")
            one.validate_result(torch.tensor(math.nan), is_nan, fatal=False)
    assert one.state_dict()["largest"]["loss"]["num_samples"] == 2


def test_the_mode_changes_between_steps_only() -> None:
    one = machine()
    with one.disabled():
        with pytest.raises(UnexpectedResultError):
            one.validate_result(torch.tensor(math.nan), is_nan)
        assert not one.is_enabled
    assert one.is_enabled
    one.should_run_forward_backward()
    with pytest.raises(RuntimeError, match="between steps"):
        one.set_mode("disabled")


def test_data_that_cannot_rewind_is_refused() -> None:
    with pytest.raises(TypeError, match="RerunDataIterator"):
        machine().should_run_forward_backward(iter([1]))
    with pytest.raises(ConfigError, match="go together"):
        machine(state_save_func=dict)


def test_what_the_caller_saves_is_restored_for_a_rerun() -> None:
    model: list[nn.Module] = [nn.Sequential(nn.BatchNorm1d(2))]
    buffers = BufferGuard(model, saved_only=False)
    means: list[list[float]] = []
    one = machine(
        mode="report_determinism_stats",
        state_save_func=buffers.keep,
        state_restore_func=lambda _: buffers.restore(),
    )
    while one.should_run_forward_backward():
        model[0](torch.arange(6.0).reshape(3, 2))
        means.append(next(model[0].buffers()).tolist())
    assert means[0] == means[1]
    assert means[0] != [0.0, 0.0]


def test_a_buffer_that_a_forward_pass_replaced_is_put_back_too() -> None:
    model = nn.Module()
    model.register_buffer("seen", torch.zeros(2), persistent=False)
    saved, every = BufferGuard([model]), BufferGuard([model], saved_only=False)
    saved.keep()
    every.keep()
    model.seen = torch.ones(2)
    saved.restore()
    assert model.seen.tolist() == [1.0, 1.0]
    every.restore()
    assert model.seen.tolist() == [0.0, 0.0]


def test_a_buffer_may_change_its_size_between_steps_and_within_one() -> None:
    model = nn.Module()
    model.register_buffer("angles", torch.arange(2.0), persistent=False)
    guard = BufferGuard([model], saved_only=False)
    guard.keep()
    model.angles = torch.arange(5.0)  # text generation at a logged step needs more positions
    guard.keep()
    model.angles = torch.zeros(7)
    guard.restore()
    assert model.angles.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    model.angles += 1
    guard.restore()
    assert model.angles.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0], "what was kept is not what the model goes on with"


class TestRerunDataIterator:
    def test_it_passes_on_and_keeps_nothing_before_the_first_advance(self) -> None:
        iterator = RerunDataIterator([1, 2, 3])
        assert next(iterator) == 1
        iterator.rewind()
        assert list(iterator) == [2, 3]

    def test_it_gives_a_step_again_and_then_goes_on(self) -> None:
        iterator = RerunDataIterator({"n": number, "more": [number]} for number in range(5))
        iterator.advance()
        first = next(iterator)
        del first["n"]
        first["more"].clear()
        next(iterator)
        iterator.rewind()
        again = next(iterator)
        assert again == {"n": 0, "more": [0]}
        again.clear()
        iterator.rewind()
        assert [one["n"] for one in iterator] == [0, 1, 2, 3, 4]
        iterator.rewind()
        next(iterator)
        iterator.advance()
        iterator.rewind()
        assert next(iterator)["n"] == 1

    def test_its_state_holds_what_was_kept(self) -> None:
        iterator = RerunDataIterator(iter([torch.tensor(1), torch.tensor(2), torch.tensor(3)]))
        iterator.advance()
        next(iterator), next(iterator)
        iterator.rewind()
        next(iterator)
        other = RerunDataIterator(iter([torch.tensor(4)]))
        other.load_state_dict(decode_state(*encode_state(iterator.state_dict())))
        assert [int(one) for one in other] == [2, 4]

    def test_the_machine_takes_one_for_each_chunk(self) -> None:
        one, iterators = machine(mode="report_determinism_stats"), [data(), data()]
        seen: list[float] = []
        while one.should_run_forward_backward(iterators):
            seen += [float(next(iterator)["x"]) for iterator in iterators]
        assert seen == [0.0] * 4

    def test_the_next_process_gets_the_micro_batches_of_the_step_in_question(self) -> None:
        before = machine()
        step(before, data(), always_wrong)
        later = RerunDataIterator({"x": torch.tensor(float(number))} for number in range(2, 100))
        seen: list[float] = []
        after = restarted(before, "node-2/gpu-0")
        while after.should_run_forward_backward(later):
            seen += [float(next(later)["x"]) for _ in range(3)]
            after.validate_result(torch.tensor(1.0), is_nan, "found NaN")
        assert seen == [0.0, 1.0, 2.0]


def test_each_run_of_a_step_has_whole_micro_batches() -> None:
    batches = StepBatches([{"x": torch.ones(2), "more": [1]}], None, 2, [False])
    for _ in range(2):
        (batch,) = fresh_batches(batches).micro_batches
        assert sorted(batch) == ["more", "x"]
        assert batch["more"] == [1]
        assert batch["x"] is batches.micro_batches[0]["x"]
        batch.pop("x"), batch["more"].clear()


def micro(loss: float, weight: Any = 1.0, kind: Any = "mean") -> MicroLoss:
    return MicroLoss(torch.tensor(loss), weight, kind, {}, None)


def losses_step(one: RerunStateMachine, micros: list[MicroLoss], **config: Any) -> tuple[int, tuple[bool, bool, int]]:
    runs = 0
    while one.should_run_forward_backward():
        runs += 1
        validate_losses(one, micros, RerunStateMachineConfig(**config))
    return runs, one.should_checkpoint_and_exit()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_the_loop_validates_its_losses(bad: float) -> None:
    assert losses_step(machine(), [micro(1.0), micro(2.0)]) == (1, (False, False, 0))
    assert losses_step(machine(), [micro(1.0), micro(bad)]) == (2, (True, True, 16))
    assert losses_step(machine(), [micro(bad)], check_for_nan_in_loss=False) == (1, (False, False, 0))
    assert losses_step(machine(mode="disabled"), [micro(bad)]) == (1, (False, False, 0))


def test_a_micro_batch_without_labels_is_not_suspicious() -> None:
    assert losses_step(machine(), [micro(1.0), micro(math.nan, torch.tensor(0))]) == (1, (False, False, 0))


def test_a_spike_is_computed_again_and_trained_on(caplog: pytest.LogCaptureFixture) -> None:
    one = machine()
    spiky = {"check_for_spiky_loss": True, "spiky_loss_factor": 2.0}
    for _ in range(100):
        assert losses_step(one, [micro(3.0)], **spiky)[0] == 1
    assert losses_step(one, [micro(500.0, 100, "sum")], **spiky) == (1, (False, False, 0))
    assert losses_step(one, [micro(700.0, 100, "sum")], **spiky) == (2, (False, False, 0))
    assert "Spiky loss" in caplog.text


def test_relative_differences() -> None:
    nan, inf = math.nan, math.inf
    same = [(1.0, 1.0), (nan, nan), (inf, inf), (0.0, -0.0), (torch.tensor([1.0, nan]), torch.tensor([1.0, nan]))]
    assert [relative_difference(*pair) for pair in same] == [0.0] * 5
    apart = [(nan, 1.0), (inf, 1.0), (inf, -inf), (torch.zeros(2), torch.zeros(3))]
    assert [relative_difference(*pair) for pair in apart] == [inf] * 4
    assert relative_difference(torch.tensor([1.0, 4.0]), torch.tensor([1.0, 5.0])) == pytest.approx(0.2)


@pytest.mark.distributed
def test_one_rank_in_question_makes_all_rerun_and_leave_alike(processes: Processes, tmp_path: Path) -> None:
    calls = processes.results("tests.support.jobs.rerun_jobs", "decide", tmp_path)
    assert calls[0] == calls[1]
    assert calls[0] == {
        "transient": [2, [False, True, 17], "transient_error", 1],
        "in_place": [2, [True, True, 16], None, None],
        "same_device": [1, [False, True, 16], None, None],
        "other_device": [1, [False, True, 17], "persistent_error", 1],
    }
