"""Train on two processes, and get the losses of one.

    python examples/two_processes.py
    torchrun --nproc-per-node 2 examples/two_processes.py --rank

Started as above, the script runs itself under `torchrun`, then alone, and compares. A step has the same samples however
many processes share them, padded or not, so the losses agree up to the rounding of floating-point sums.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from onstep import JsonLogger, pretrain
from onstep.config import apply_overrides
from onstep.recipes import tiny_gpt_pretrain_config


def train(name: str) -> None:
    """What each rank does: the same on one process and on many."""
    config = tiny_gpt_pretrain_config()
    apply_overrides(
        config,
        [
            f"run.name={name}",
            "tokenizer.tokenizer_type=bytes",
            "model.num_layers=1",
            "model.hidden_size=32",
            "train.train_iters=8",
            "train.global_batch_size=8",
            "train.micro_batch_size=4",
            "scheduler.lr_warmup_iters=2",
            "logger.log_interval=2",
            "validation.eval_interval=null",
            "validation.eval_iters=0",
            "dist.device=cpu",
        ],
    )
    pretrain(config, callbacks=[JsonLogger()])


def losses(name: str) -> list[float]:
    """The logged losses of a run."""
    records = json.loads(Path(f"runs/{name}/trainer_logs.json").read_text(encoding="utf-8"))
    return [record["loss"] for record in records if "loss" in record]


def main() -> None:
    if "--rank" in sys.argv:
        train("two-ranks")
        return
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    subprocess.run([*command, __file__, "--rank"], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    train("one-rank")
    for two, one in zip(losses("two-ranks"), losses("one-rank"), strict=True):
        print(f"loss on two processes {two:.6f}, on one {one:.6f}")


if __name__ == "__main__":
    main()
