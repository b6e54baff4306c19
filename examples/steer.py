"""Steer a running job: halve its learning rate, pause it, evaluate, save and stop.

    python examples/steer.py

The commands come from a second thread here; from another terminal they are `onstep control set lr_factor=0.5`, `pause`,
`resume`, `evaluate` and `save-stop`, and `onstep control open` shows the job in a browser. Each is applied after one
step on all ranks. Requires `pip install 'onstep[control]'`.
"""

from __future__ import annotations

import threading
from typing import Any

from onstep import Callback, pretrain
from onstep.callbacks import TrainerControlCallback
from onstep.config import apply_overrides
from onstep.control import evaluate, get_job_status, pause, resume, save_and_stop, set_value
from onstep.recipes import tiny_gpt_pretrain_config

JOB = "steered-example"


def operate() -> None:
    """What somebody types in the second terminal."""
    print("set:", set_value(JOB, "lr_factor", 0.5, wait=60).message)
    print("pause:", pause(JOB, wait=60).message, "-", get_job_status(JOB)["status"])
    print("resume:", resume(JOB, wait=60).message)
    print("evaluate:", evaluate(JOB, wait=60).data["result"])
    print("save and stop:", save_and_stop(JOB, wait=60).message)


class SecondTerminal(Callback):
    """Starts `operate` once the job can be reached."""

    def on_train_start(self, context: Any) -> None:
        self.thread = threading.Thread(target=operate, daemon=True)
        self.thread.start()


def main() -> None:
    config = tiny_gpt_pretrain_config()
    apply_overrides(
        config,
        [
            "run.name=steer",
            "run.fresh=true",
            "tokenizer.tokenizer_type=bytes",
            "model.num_layers=1",
            "model.hidden_size=32",
            "train.train_iters=1000000",
            "train.global_batch_size=4",
            "train.micro_batch_size=4",
            "scheduler.lr_warmup_iters=2",
            "logger.log_interval=1000",
            "validation.eval_interval=null",
            "validation.eval_iters=1",
        ],
    )
    terminal = SecondTerminal()
    state = pretrain(config, callbacks=[TrainerControlCallback(job_id=JOB), terminal])
    terminal.thread.join()
    print(f"stopped after step {state.train_state.step} of {config.train.train_iters}")


if __name__ == "__main__":
    main()
