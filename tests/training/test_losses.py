"""One loss and one gradient for every split of a step into micro-batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from onstep.data import StepBatches
from onstep.errors import ConfigError, LossError
from onstep.optim import TrainingOptimizer
from onstep.training import LossShare, MeanLoss, train_step
from tests.support.small_runs import RaggedRows, TinyModel, mean_step, run, small_state, split, sum_step

SPLITS = [[12], [6, 6], [3, 3, 3, 3], [1] * 12, [5, 4, 3], [1, 11]]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}  # float32: sums of other orders, a few units of 1e-7 each
TOTAL_LABELS = sum(int(row["labels"].ne(-100).sum()) for row in map(RaggedRows().__getitem__, range(12)))


def share_step(data_iterator: Any, model: Any) -> Any:
    batch = next(data_iterator)
    return model(**batch) / TOTAL_LABELS, lambda loss: LossShare(loss, batch["labels"].ne(-100).sum(), {})


def mean_loss_step(data_iterator: Any, model: Any) -> Any:
    batch = next(data_iterator)
    labels = batch["labels"].ne(-100).sum()
    return model(**batch, reduction="mean"), lambda loss: MeanLoss(loss, labels, labels, {})


def bare_step(data_iterator: Any, model: Any) -> Any:
    return model(**next(data_iterator), reduction="mean"), lambda loss: loss


def one_step(
    step: Any, batches: StepBatches, dtype: torch.dtype = torch.float64, **fields: Any
) -> tuple[dict[str, Any], list[torch.Tensor], Any]:
    """The losses that a step reports and the gradients that it leaves, unclipped; the state after it."""
    model, state = TinyModel(dtype=dtype), small_state(**fields)
    optimizer = TrainingOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), clip_grad=None)
    result = train_step(step, batches, [model], optimizer, None, state)
    assert result.skipped_iter == 0
    return result.loss_dict, [p.grad for p in model.parameters() if p.grad is not None], state


def of_one_big_batch(dtype: torch.dtype, reduction: str = "mean") -> tuple[torch.Tensor, list[torch.Tensor]]:
    model = TinyModel(dtype=dtype)
    loss = model(**split(RaggedRows(), [12]).micro_batches[0], reduction=reduction)
    loss.backward()
    return loss.detach(), [p.grad for p in model.parameters() if p.grad is not None]


def assert_close(left: list[torch.Tensor], right: list[torch.Tensor], tolerance: float) -> None:
    for mine, theirs in zip(left, right, strict=True):
        assert mine.dtype == theirs.dtype
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance * theirs.abs().max().item())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("sizes", SPLITS, ids=str)
@pytest.mark.parametrize("step", [sum_step, mean_step, share_step, mean_loss_step, bare_step])
def test_every_split_gives_the_loss_and_gradients_of_the_big_batch(
    step: Any, sizes: list[int], dtype: torch.dtype
) -> None:
    losses, gradients, _ = one_step(step, split(RaggedRows(), sizes), dtype)
    loss, expected = of_one_big_batch(dtype)
    assert list(losses) == ["lm loss"]
    assert_close([losses["lm loss"], *gradients], [loss, *expected], TOLERANCE[dtype])


@pytest.mark.parametrize(("weighting", "weigh"), [("samples", len), ("microbatches", lambda rows: 1)])
def test_means_are_weighted_as_the_configuration_says(weighting: str, weigh: Any) -> None:
    batches = split(RaggedRows(), [5, 4, 3])
    losses, gradients, _ = one_step(mean_step, batches, loss_weighting=weighting)
    model = TinyModel(dtype=torch.float64)
    weights = [weigh(batch["tokens"]) for batch in batches.micro_batches]
    means = [model(**batch, reduction="mean") for batch in batches.micro_batches]
    total = sum(w * mean for w, mean in zip(weights, means, strict=True)) / sum(weights)
    total.backward()
    expected = [p.grad for p in model.parameters()]
    assert_close([losses["lm loss"], *gradients], [total.detach(), *expected], 1e-12)


def test_means_over_batches_without_labels_are_weighted_by_samples() -> None:
    def step(data_iterator: Any, model: Any) -> Any:
        (tokens,) = next(data_iterator)
        return model.embed(tokens).square().mean(), lambda loss: (loss, {})

    rows = torch.arange(12).reshape(6, 2)
    batches = StepBatches([[rows[:4]], [rows[4:]]], None, 6, [False, False])
    losses, gradients, state = one_step(step, batches)
    model = TinyModel(dtype=torch.float64)
    loss = model.embed(rows).square().mean()
    loss.backward()
    assert_close([losses["lm loss"], gradients[0]], [loss.detach(), model.embed.weight.grad], 1e-12)
    assert state.last_step_loss.tokens is None


def test_asking_for_tokens_where_there_are_no_labels_is_refused_with_help() -> None:
    batches = StepBatches([{"tokens": torch.zeros(2, 2).long()}], None, 2, [False])

    def step(data_iterator: Any, model: Any) -> Any:
        return model.embed(next(data_iterator)["tokens"]).mean(), lambda loss: (loss, {})

    with pytest.raises(ConfigError, match=r"loss_weighting=tokens.*samples"):
        one_step(step, batches, loss_weighting="tokens")


@pytest.mark.parametrize("step", [sum_step, mean_step, share_step, mean_loss_step])
def test_a_filler_counts_zero(step: Any) -> None:
    full = split(RaggedRows(), [6, 6])
    first = full.micro_batches[0]
    filled = StepBatches([*full.micro_batches, first], None, 12, [False, False, True])
    losses, gradients, state = one_step(step, filled)
    expected, expected_gradients, expected_state = one_step(step, full)
    assert_close([losses["lm loss"], *gradients], [expected["lm loss"], *expected_gradients], 1e-12)
    assert int(state.last_step_loss.tokens) == int(expected_state.last_step_loss.tokens) == TOTAL_LABELS


@pytest.mark.parametrize("step", [sum_step, mean_step, bare_step, mean_loss_step])
@pytest.mark.parametrize("sizes", [[1, 5], [1, 1, 4]], ids=str)
def test_a_micro_batch_without_labels_contributes_nothing(step: Any, sizes: list[int]) -> None:
    rows = RaggedRows(6, empty=(0,))
    losses, gradients, _ = one_step(step, split(rows, sizes))
    expected, expected_gradients, _ = one_step(sum_step, split(rows, [6]))
    assert_close([losses["lm loss"], *gradients], [expected["lm loss"], *expected_gradients], 1e-12)


@pytest.mark.parametrize("step", [sum_step, mean_step, mean_loss_step])
@pytest.mark.parametrize("sizes", [[4], [2, 2]], ids=str)
def test_a_step_without_a_single_label_has_a_zero_loss(step: Any, sizes: list[int]) -> None:
    losses, gradients, _ = one_step(step, split(RaggedRows(4, empty=(0, 1, 2, 3)), sizes))
    assert losses["lm loss"] == 0
    assert all(not gradient.any() for gradient in gradients)


def reporting(report: Any) -> Any:
    def step(data_iterator: Any, model: Any) -> Any:
        batch = next(data_iterator)
        count = batch["labels"].ne(-100).sum()
        return model(**batch), lambda loss: (loss, count, report(loss, count))

    return step


def test_reports_of_sum_and_count_and_of_means_are_reduced_over_micro_batches() -> None:
    step = reporting(
        lambda loss, count: {"lm loss": torch.stack([loss.detach(), count.double()]), "mean": (loss / count).detach()}
    )
    losses, _, _ = one_step(step, split(RaggedRows(), [5, 4, 3]))
    loss, _ = of_one_big_batch(torch.float64)
    assert set(losses) == {"lm loss", "mean"}
    assert_close([losses["lm loss"], losses["mean"]], [loss, loss], 1e-12)
    assert all(value.ndim == 0 and not value.requires_grad for value in losses.values())


def test_a_report_may_be_a_pair_of_plain_numbers() -> None:
    losses, _, _ = one_step(reporting(lambda loss, count: {"accuracy": (3.0, 4)}), split(RaggedRows(), [6, 6]))
    assert losses["accuracy"].item() == 0.75


def test_a_report_of_another_size_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"Invalid value shape: \(3,\) for key odd"):
        one_step(reporting(lambda loss, count: {"odd": torch.zeros(3)}), split(RaggedRows(), [6, 6]))


def test_a_report_that_some_micro_batches_lack_is_refused() -> None:
    calls: list[int] = []

    def once(loss: Any, count: Any) -> dict[str, Any]:
        calls.append(1)
        return {"rare": torch.ones(())} if len(calls) == 1 else {}

    with pytest.raises(ConfigError, match="'rare' is reported for only some"):
        one_step(reporting(once), split(RaggedRows(), [6, 6]))


def test_shares_do_not_mix_with_other_losses() -> None:
    calls: list[int] = []

    def step(data_iterator: Any, model: Any) -> Any:
        calls.append(1)
        return (share_step if len(calls) == 1 else sum_step)(data_iterator, model)

    with pytest.raises(LossError, match="LossShare for some"):
        one_step(step, split(RaggedRows(), [6, 6]))


def test_what_is_no_loss_is_refused_with_the_documented_forms() -> None:
    def step(data_iterator: Any, model: Any) -> Any:
        return model(**next(data_iterator)), lambda loss: {"loss": loss}

    with pytest.raises(LossError, match=r"returned a mapping with loss; .*\(loss_sum, num_tokens, report\)"):
        one_step(step, split(RaggedRows(), [12]))


def counting(count: Any) -> Any:
    def step(data_iterator: Any, model: Any) -> Any:
        batch = next(data_iterator)
        return model(**batch), lambda loss: (loss, count(batch), {})

    return step


@pytest.mark.parametrize(
    ("count", "message"),
    [
        (lambda batch: torch.tensor(-5), r"num_tokens=-5; it must be one number >= 0, .*labels\.ne\(-100\)\.sum\(\)"),
        (lambda batch: -5, "num_tokens=-5"),
        (lambda batch: None, "num_tokens=None"),
        (lambda batch: batch["labels"].ne(-100).sum(-1), r"a Tensor of shape \(6,\) and torch.int64 as num_tokens; "),
    ],
)
def test_what_is_no_count_of_labels_is_refused(count: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        one_step(counting(count), split(RaggedRows(), [6, 6]))


class Unread(torch.Tensor):
    """A count that is not read at once, like one on an accelerator."""


@pytest.mark.parametrize("interval", [2, 0])
def test_a_negative_count_on_an_accelerator_is_refused_where_it_is_read(interval: int) -> None:
    state = small_state(train_iters=4)
    state.cfg.logger.log_interval = interval
    step = counting(lambda batch: torch.tensor(-5).as_subclass(Unread))
    with pytest.raises(ConfigError, match=r"that the loss function returned add up to -\d0; num_tokens: it must be"):
        run(state, step=step)
    assert state.train_state.step == (interval or 4)


def test_a_count_of_one_row_is_that_of_its_batch() -> None:
    step = counting(lambda batch: batch["labels"].ne(-100).sum(-1))
    losses, gradients, _ = one_step(step, split(RaggedRows(), [1] * 12))
    loss, expected = of_one_big_batch(torch.float64)
    assert_close([losses["lm loss"], *gradients], [loss, *expected], 1e-12)
