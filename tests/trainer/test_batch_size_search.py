"""`auto_find_batch_size` across processes: what an unfinished run has found is used again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from onstep import Trainer
from tests.support.small_models import Regression, arguments, regression_rows


class Small(Regression):
    """Runs out of memory with more than 6 samples once it has trained a step, and after its first checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        if self.sizes and len(x) > 6:
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        self.sizes.append(len(x))
        return super().forward(x, labels)


def test_a_run_with_smaller_batches_is_continued_and_the_size_is_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Killed:
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2:
                raise ValueError("killed")

    def trainer(model: nn.Module, **options: Any) -> Trainer:
        values = {
            "max_steps": 6,
            "lr_scheduler_type": "constant",
            "per_device_train_batch_size": 8,
            "save_strategy": "steps",
            "save_steps": 1,
        }
        args = arguments(tmp_path, auto_find_batch_size=True, **values)
        return Trainer(model, args, train_dataset=regression_rows(24), default_callbacks=False, **options)

    with pytest.raises(ValueError, match="killed"):
        trainer(Small(), callbacks=[Killed()]).train()
    assert not [word for word in ("from scratch", "resume_from_checkpoint") if word in caplog.text]
    again = trainer(Small())
    again.train()
    assert again.state.global_step == 6
    assert again.model.sizes == [6] * 5, "it continues from a checkpoint"
    assert (again._train_batch_size, again.args.per_device_train_batch_size) == (6, 8)
    again.model.sizes.clear()
    again.train()
    assert again.model.sizes == [6] * 6
