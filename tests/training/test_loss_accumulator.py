"""The one accumulator: means for the record and for Megatron Bridge's line, read once, continued from a checkpoint."""

from __future__ import annotations

import math

import pytest
import torch

from onstep.training.compute.loss_sums import StepLoss
from onstep.training.reporting.loss_accumulator import LossAccumulator


def step_loss(value: float, **reports: float) -> StepLoss:
    return StepLoss(torch.tensor(value), 1, 4, {name: torch.tensor(one) for name, one in reports.items()})


@pytest.mark.parametrize("num_before", [1, 100])
def test_the_line_leaves_out_what_was_not_applied_and_the_record_does_not(num_before: int) -> None:
    accumulator = LossAccumulator()
    for _ in range(num_before):
        accumulator.add(step_loss(2.0), None, successful=True)
    accumulator.add(step_loss(math.inf), None, successful=False)
    for _ in range(100):
        accumulator.add(step_loss(4.0), None, successful=True)
    report = accumulator.flush()
    assert report is not None
    assert (report.num_steps, report.num_skipped, report.loss) == (num_before + 101, 1, math.inf)
    assert report.applied == {"lm loss": (2.0 * num_before + 400.0) / (num_before + 100)}


def test_reported_losses_have_their_own_names_in_the_line() -> None:
    accumulator = LossAccumulator()
    accumulator.add(step_loss(9.0, **{"lm loss": 1.0}), None, successful=True)
    accumulator.add(step_loss(9.0, **{"lm loss": 3.0, "z": 1.0}), None, successful=True)
    accumulator.add(step_loss(9.0, **{"lm loss": 50.0}), None, successful=False)
    report = accumulator.read()
    assert report is not None
    assert report.applied == {"lm loss": 2.0, "z": 0.5}
    assert report.others == {"lm loss": 18.0, "z": 1.0}


def test_an_interval_without_an_applied_step_has_no_mean_of_them() -> None:
    accumulator = LossAccumulator()
    accumulator.add(step_loss(1.0), None, successful=False)
    accumulator.add(None, None, successful=False)
    report = accumulator.flush()
    assert report is not None
    assert (report.num_steps, report.num_losses, report.loss, report.applied) == (2, 1, 1.0, {})


def test_what_was_read_is_not_read_again_until_there_is_a_step() -> None:
    accumulator = LossAccumulator()
    accumulator.add(step_loss(1.0), None, successful=True)
    first = accumulator.read(last={"grad_norm": torch.tensor(2.0), "loss_scale": 8.0})
    assert first is not None
    assert first.extras == {"last": {"grad_norm": 2.0, "loss_scale": 8.0}}
    assert accumulator.read() is first
    accumulator.add(step_loss(3.0), None, successful=True)
    second = accumulator.flush()
    assert second is not None
    assert second.loss == 2.0
    assert accumulator.read() is None


@pytest.mark.parametrize("counts", [(0, 3, 2**24 + 1), (0.25, 3.0, 7.0)])
def test_counts_on_the_device_and_on_the_host_give_the_same_means(counts: tuple[float, ...]) -> None:
    on_device = [torch.tensor(count) for count in counts]
    reports = []
    for given in (list(counts), on_device, [counts[0], *on_device[1:]], [on_device[0].float(), *on_device[1:]]):
        accumulator = LossAccumulator()
        for count in given:
            accumulator.add(StepLoss(torch.tensor(5.0), count, count, {}), count, successful=True)
        reports.append(accumulator.flush())
    assert reports[0] is not None
    assert reports[0].loss == pytest.approx(sum(5.0 / max(count, 1) for count in counts) / 3)
    assert reports[0].tokens == round(sum(counts))
    assert all(report == reports[0] for report in reports[1:])


def test_steps_that_wait_are_continued_with_what_became_of_them() -> None:
    whole, first, second = LossAccumulator(), LossAccumulator(), LossAccumulator()
    steps = [(1.0, True), (7.0, False), (2.0, True)]
    for value, successful in steps:
        whole.add(step_loss(value), None, successful)
    for value, successful in steps[:2]:
        first.add(step_loss(value), None, successful)
    second.load_state_dict(first.state_dict())
    second.add(step_loss(2.0), None, successful=True)
    assert second.flush() == whole.flush()


def test_a_checkpoint_from_before_knows_of_no_skipped_steps() -> None:
    accumulator, loaded = LossAccumulator(), LossAccumulator()
    accumulator.add(step_loss(1.0), None, successful=True)
    older = {name: value for name, value in accumulator.state_dict().items() if name != "unapplied"}
    loaded.load_state_dict(older)
    assert loaded.flush() == accumulator.flush()
