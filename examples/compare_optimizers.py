"""Train the same model with three optimizers, compare the runs, and draw their losses.

    python examples/compare_optimizers.py

Prints the table of `onstep logs compare` and writes `runs/optimizers.png`; `onstep logs report` makes a page of it.
"""

from __future__ import annotations

from onstep import JsonLogger, pretrain
from onstep.cli.main import main as onstep
from onstep.config import apply_overrides
from onstep.recipes import tiny_gpt_pretrain_config

OPTIMIZERS = {
    "adamw": ["optimizer.optimizer=adam", "optimizer.lr=3e-3"],
    "muon": ["optimizer.optimizer=muon", "optimizer.lr=3e-3"],
    "sgd": ["optimizer.optimizer=sgd", "optimizer.lr=0.1"],
}


def main() -> None:
    for name, settings in OPTIMIZERS.items():
        config = tiny_gpt_pretrain_config()
        apply_overrides(
            config,
            [
                f"run.name={name}",
                "tokenizer.tokenizer_type=bytes",
                "model.num_layers=2",
                "model.hidden_size=64",
                "train.train_iters=40",
                "train.global_batch_size=8",
                "train.micro_batch_size=8",
                "scheduler.lr_warmup_iters=4",
                "logger.log_interval=2",
                "validation.eval_interval=20",
                "validation.eval_iters=2",
                *settings,
            ],
        )
        pretrain(config, callbacks=[JsonLogger()])
    onstep(["logs", "compare", *OPTIMIZERS])
    onstep(["logs", "plot", *OPTIMIZERS, "--loss-curves", "-o", "runs/optimizers.png"])


if __name__ == "__main__":
    main()
