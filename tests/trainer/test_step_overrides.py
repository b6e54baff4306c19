"""Overrides of what Hugging Face's Trainer does in a step: the batches, the gradient norm, the rate, and the tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from onstep import Trainer
from onstep.errors import ConfigError
from tests.support.small_models import arguments, causal_rows, qwen
from tests.support.state_overrides import OwnSteps, trained

pytestmark = pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")


def records(cls: Any, directory: Path, **options: Any) -> list[dict[str, Any]]:
    """The records of a small causal model, four steps of two micro-batches."""
    values = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2, "logging_steps": 1, **options}
    trainer = cls(qwen(), arguments(directory, **values), train_dataset=causal_rows(8), default_callbacks=False)
    trainer.train()
    return [record for record in trainer.state.log_history if "loss" in record]


@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 0.1}, {"max_grad_norm": 0.0}], ids=str)
def test_methods_of_a_step_that_call_super_change_nothing(options: dict[str, Any], tmp_path: Path) -> None:
    options = {**options, "include_num_input_tokens_seen": "non_padding"}
    mine, plain = records(OwnSteps, tmp_path / "mine", **options), records(Trainer, tmp_path / "plain", **options)
    assert len(mine) == 4
    for name in ("loss", "grad_norm", "learning_rate", "num_input_tokens_seen"):
        expected = [record[name] for record in plain]
        assert [record[name] for record in mine] == pytest.approx(expected, rel=1e-5)


def test_the_count_that_get_batch_samples_returns_divides_the_loss(tmp_path: Path) -> None:
    class Counts(Trainer):
        def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
            assert (num_batches, str(device)) == (2, "cpu")
            samples, count = super().get_batch_samples(epoch_iterator, num_batches, device)
            return samples, 2 * count

    mine, plain = records(Counts, tmp_path / "mine"), records(Trainer, tmp_path / "plain")
    assert mine[0]["loss"] == pytest.approx(plain[0]["loss"] / 2, rel=1e-5)


def test_a_step_may_have_another_number_of_micro_batches(tmp_path: Path) -> None:
    class Joins(Trainer):
        """One large micro-batch in place of two."""

        def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
            samples, count = super().get_batch_samples(epoch_iterator, num_batches, device)
            return [{key: torch.cat([one[key] for one in samples]) for key in samples[0]}], count

    mine, plain = records(Joins, tmp_path / "mine"), records(Trainer, tmp_path / "plain")
    assert [one["loss"] for one in mine] == pytest.approx([one["loss"] for one in plain], rel=1e-5)


@pytest.mark.parametrize(
    ("take", "give", "message"),
    [(1, 1, "has read 1 of the 2 micro-batches of a step; read them all"), (2, 0, "returned no micro-batch")],
)
def test_batches_that_would_be_lost_are_refused(take: int, give: int, message: str, tmp_path: Path) -> None:
    class Loses(Trainer):
        def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
            return [next(epoch_iterator) for _ in range(take)][:give], None

    with pytest.raises(ConfigError, match=f"Loses.get_batch_samples {message}"):
        records(Loses, tmp_path)


def test_the_rate_is_asked_for_before_the_schedule_moves(tmp_path: Path) -> None:
    rates: list[float] = []

    class Notes(Trainer):
        def _get_learning_rate(self) -> float:
            rates.append(super()._get_learning_rate())
            return rates[-1]

    logged = records(Notes, tmp_path, learning_rate=0.04)
    assert rates == [record["learning_rate"] for record in logged] == pytest.approx([0.04, 0.03, 0.02, 0.01])


def test_what_is_due_is_done_only_where_it_is_due(tmp_path: Path) -> None:
    trainer = trained(OwnSteps, tmp_path)
    with pytest.raises(ConfigError, match="_maybe_log_save_evaluate is called after a step"):
        trainer._maybe_log_save_evaluate(torch.zeros(()), None, trainer.model, None, 0, None, 0.0)
