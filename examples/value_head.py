"""Train a value head: how many bytes of the line are still to come, told from the text so far?

    python examples/value_head.py [--steps 400] [KEY=VALUE ...]

The model reads Python source byte by byte (the standard library's, or that of `dataset.paths=[...]`). Its output layer
is replaced by a head with one number for each position, trained to be log(1 + bytes up to the next line break). A
constant guess has the variance of that number as its mean squared error; what the head learns shows against it.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from onstep import pretrain
from onstep.config import ConfigContainer, apply_overrides
from onstep.recipes import tiny_gpt_pretrain_config
from onstep.training import CallbackManager, make_value_model

LINE_BREAK = 10
"""The byte of "\\n"; the tiny recipe's tokens are bytes."""


def bytes_left(tokens: Tensor) -> Tensor:
    """For each position of (batch, seq) the bytes between it and the next line break: 0 at a break, -1 after the last.

    >>> bytes_left(torch.tensor([[97, 98, 10, 99]]))
    tensor([[ 1,  0,  0, -1]])
    """
    length = tokens.shape[1]
    positions = torch.arange(length, device=tokens.device)
    breaks = torch.where(tokens == LINE_BREAK, positions, length)
    following = breaks.flip(1).cummin(dim=1).values.flip(1)
    return torch.where(following < length, (following - positions - 1).clamp(min=0), -1)


def value_step(data_iterator: Iterator[dict[str, Tensor]], model: nn.Module) -> Any:
    """A forward step: values instead of logits, and the squared error of those that have a target."""
    tokens = next(data_iterator)["tokens"]
    left = bytes_left(tokens)
    known = (left >= 0) & (tokens != LINE_BREAK)  # after a break the next line is not known to exist
    values = model(tokens).squeeze(-1)

    def loss_function(values: Tensor) -> tuple[Tensor, Tensor, dict[str, tuple[Tensor, Tensor]]]:
        target = left.clamp(min=0).float().log1p()
        error = torch.where(known, values - target, 0.0).square().sum()
        count = known.sum()
        mean, square = (torch.where(known, one, 0.0).sum() for one in (target, target.square()))
        report = {"squared error": (error, count), "target": (mean, count), "target squared": (square, count)}
        return error, count, report

    return values, loss_function


def small_config(steps: int, overrides: Sequence[str] = ()) -> ConfigContainer:
    """The recipe of the tiny model, with this many steps and a measurement at the end."""
    config = tiny_gpt_pretrain_config()
    settings = [
        f"train.train_iters={steps}",
        f"scheduler.lr_warmup_iters={max(1, steps // 20)}",
        "validation.eval_interval=null",
        "validation.eval_on_start=false",
        "dataset.split=90,10,0",
        "logger.log_interval=50",
    ]
    apply_overrides(config, [*settings, *overrides])
    return config


def train_value_head(config: ConfigContainer) -> tuple[float, float]:
    """Train, and give the mean squared errors on the validation text: of the head, and of the best constant guess."""
    measured: dict[str, float] = {}
    callbacks = CallbackManager()
    callbacks.register("on_eval_end", lambda context: measured.update(context.metrics))
    hook = make_value_model(config.model.hidden_size, sequence_parallel=False)

    pretrain(config, value_step, callbacks, pre_wrap_hooks=[hook])

    return measured["eval_loss"], measured["eval_target squared"] - measured["eval_target"] ** 2


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Train a value head on the length of lines of Python source.")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    chosen = parser.parse_args(arguments)
    head, constant = train_value_head(small_config(chosen.steps, chosen.overrides))
    text = f"mean squared error of log(1 + bytes left): value head {head:.4f}, constant guess {constant:.4f}"
    print(text)


if __name__ == "__main__":
    main()
