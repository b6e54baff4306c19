"""Loss of the demo's model with its weights in each precision, against float32.

    python benchmarks/weight_precision.py [--steps 200] [--optimizer adam] [--directory DIR]

Each run has the same data, seed and first weights. `difference` is that of the mean loss of the last 20 steps from
float32's, `largest` the largest difference of the running mean of 20 steps at any time. Bytes are those of a trained
weight with its gradient and the optimizer's state, counted from the tensors.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from onstep import Callback, pretrain
from onstep.config import ConfigContainer
from onstep.recipes.tiny import demo_pretrain_config

MODES: dict[str, dict[str, Any]] = {
    "float32": {},
    "float32, bf16_mixed": {"mixed_precision": "bf16_mixed"},
    "bfloat16 + float32 masters": {"params_dtype": "bfloat16"},
    "bfloat16, stochastic rounding": {"params_dtype": "bfloat16", "main_params_dtype": "bfloat16"},
    "bfloat16, Kahan summation": {
        "params_dtype": "bfloat16",
        "main_params_dtype": "bfloat16",
        "rounding": "kahan",
    },
    "bfloat16, rounded to nearest": {
        "params_dtype": "bfloat16",
        "main_params_dtype": "bfloat16",
        "rounding": "nearest",
    },
}
WINDOW = 20


class Losses(Callback):
    """Keeps the loss of each step, and the bytes per trained weight at the end."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.bytes_per_weight = 0.0

    def on_train_step_end(self, context: Any) -> None:
        """Read the loss, and count bytes."""
        self.losses.append(next(iter(context.loss_dict.values())).item())
        optimizer = context.optimizer
        params = [param for group in optimizer.param_groups for param in group["params"]]
        tensors = [one for param in params for one in (param, param.grad, *optimizer.state[param].values())]
        size = sum(one.nbytes for one in tensors if one is not None)
        self.bytes_per_weight = size / sum(param.numel() for param in params)


def trained(mode: str, steps: int, optimizer: str | None, directory: Path) -> Losses:
    """A run of the demo's model."""
    config: ConfigContainer = demo_pretrain_config()
    config.run.output_dir, config.run.name = str(directory), None
    config.dataset.cache_dir = str(directory / "cache")
    config.train.train_iters, config.scheduler.max_steps = steps, None
    config.validation.eval_iters, config.validation.eval_on_start = 0, False
    config.logger.console, config.checkpoint.save_interval = "quiet", None
    if optimizer == "adam":
        config.optimizer.optimizer, config.optimizer.lr, config.optimizer.adam_beta2 = "adam", 1e-3, 0.999
    for key, value in MODES[mode].items():
        setattr(config if key == "mixed_precision" else config.optimizer, key, value)
    losses = Losses()
    pretrain(config, callbacks=[losses])
    return losses


def running_means(losses: list[float]) -> np.ndarray:
    """The mean of each window."""
    return np.convolve(losses, np.ones(WINDOW) / WINDOW, mode="valid")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--optimizer", choices=("muon", "adam"), default="adam")
    parser.add_argument("--directory", type=Path, default=None)
    args = parser.parse_args()
    directory = args.directory or Path(tempfile.mkdtemp())
    print(f"{'weights':32} {'loss':>8} {'difference':>11} {'largest':>9} {'bytes/weight':>13}")
    exact: np.ndarray | None = None
    for mode in MODES:
        run = trained(mode, args.steps, args.optimizer, directory)
        means = running_means(run.losses)
        exact = means if exact is None else exact
        apart = means - exact
        print(
            f"{mode:32} {means[-1]:8.4f} {apart[-1]:+11.4f} {np.abs(apart).max():9.4f} {run.bytes_per_weight:13.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
