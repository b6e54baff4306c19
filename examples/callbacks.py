"""Three callbacks: one that measures, one that asks the loop for something, and one written for Hugging Face.

    python examples/callbacks.py

They see the same events through `pretrain` and `Trainer`. What a callback asks for is decided once for all ranks, and
`onstep why runs/callbacks` says who asked for what.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from onstep import Callback, TrainerCallback, pretrain
from onstep.callbacks import EMA
from onstep.cli.main import main as onstep
from onstep.config import apply_overrides
from onstep.recipes import tiny_gpt_pretrain_config


class WeightNorm(Callback):
    """Adds the norm of all weights to each record, for every log and tracker."""

    def on_log_step(self, context: Any) -> None:
        squares = [parameter.detach().square().sum() for parameter in context.unwrapped_model.parameters()]
        context.logs["weight_norm"] = float(torch.stack(squares).sum().sqrt())


class GoodEnough(Callback):
    """Saves at each new best validation loss, and stops at a target."""

    def __init__(self, target: float) -> None:
        self.target, self.best = target, float("inf")

    def on_eval_end(self, context: Any) -> None:
        loss = context.metrics["eval_loss"]
        if loss < self.best:
            self.best = loss
            context.control.save(f"the validation loss {loss:.3f} is the best so far")
        if loss < self.target:
            context.control.stop(f"the validation loss is below {self.target}")


class Stopwatch(TrainerCallback):
    """Written for Hugging Face's Trainer."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.started = time.monotonic()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "loss" in logs:
            seconds = time.monotonic() - self.started
            print(
                f"{seconds:5.1f} s  step {state.global_step:3}  loss {logs['loss']:.3f}  |w| {logs['weight_norm']:.2f}"
            )


def main() -> None:
    config = tiny_gpt_pretrain_config()
    apply_overrides(
        config,
        [
            "run.name=callbacks",
            "run.fresh=true",
            "tokenizer.tokenizer_type=bytes",
            "model.num_layers=2",
            "model.hidden_size=64",
            "train.train_iters=200",
            "train.global_batch_size=8",
            "train.micro_batch_size=8",
            "scheduler.lr_warmup_iters=5",
            "logger.log_interval=10",
            "validation.eval_interval=20",
            "validation.eval_iters=2",
        ],
    )
    state = pretrain(config, callbacks=[Stopwatch(), WeightNorm(), GoodEnough(target=3.2), EMA(decay=0.9)])
    print(f"ended at step {state.train_state.step}; what was decided:")
    onstep(["why", str(state.run_dir.path)])


if __name__ == "__main__":
    main()
