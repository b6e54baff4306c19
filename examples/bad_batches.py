"""What happens when a gradient is NaN: the same damage under three policies.

    python examples/bad_batches.py

A callback damages the gradients of one step, as a broken sample or a hardware fault would. By default the run ends with
an error before the update is applied; `skip` omits the update and leaves the samples out from then on; `rollback`
returns to the checkpoint before it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from onstep import Callback, OnstepError, pretrain
from onstep.cli.main import main as onstep
from onstep.config import apply_overrides
from onstep.recipes import tiny_gpt_pretrain_config

BAD_STEP = 8


class Damage(Callback):
    """Makes the gradients of step `BAD_STEP` NaN, once."""

    is_done = False

    def on_forward_backward_end(self, context: Any) -> None:
        if context.step == BAD_STEP - 1 and not self.is_done:
            self.is_done = True
            for parameter in context.model[0].parameters():
                parameter.grad.mul_(float("nan"))


def train(policy: str) -> None:
    config = tiny_gpt_pretrain_config()
    apply_overrides(
        config,
        [
            f"run.name=nan-{policy}",
            "run.fresh=true",
            f"train.on_nonfinite={policy}",
            "tokenizer.tokenizer_type=bytes",
            "model.num_layers=1",
            "model.hidden_size=32",
            "train.train_iters=12",
            "train.global_batch_size=4",
            "train.micro_batch_size=4",
            "scheduler.lr_warmup_iters=2",
            "logger.log_interval=4",
            "validation.eval_interval=null",
            "validation.eval_iters=1",
            "checkpoint.save_interval=4",
        ],
    )
    pretrain(config, callbacks=[Damage()])


def main() -> None:
    for policy in ("raise", "skip", "rollback"):
        print(f"--- train.on_nonfinite={policy}")
        try:
            train(policy)
        except OnstepError as error:
            print(f"{type(error).__name__}: {error}")
        newest = max(Path("runs").glob(f"nan-{policy}*"), key=lambda path: path.stat().st_mtime)
        onstep(["why", str(newest)])


if __name__ == "__main__":
    main()
