"""Train a small language model on Python's own sources, and let it continue a text.

    python examples/language_model.py [KEY=VALUE ...]

The same as `onstep train`, from Python: a recipe is a function that returns a configuration, which is changed and
passed on. `runs/language_model` holds checkpoints, weights and the metrics log; the same command continues an
interrupted run. Try `train.train_iters=1500 run.name=longer`, or `"dataset.paths=[my/texts]"`.
"""

from __future__ import annotations

import sys

import torch

from onstep import DefaultMetrics, JsonLogger, ProgressCallback, pretrain
from onstep.config import apply_overrides
from onstep.data import ByteTokenizer
from onstep.models import generate, load_hf
from onstep.recipes import tiny_gpt_pretrain_config

SETTINGS = [
    "run.name=language_model",
    "tokenizer.tokenizer_type=bytes",
    "model.num_layers=2",
    "model.hidden_size=64",
    "model.seq_length=128",
    "dataset.seq_length=128",
    "train.train_iters=300",
    "train.global_batch_size=8",
    "train.micro_batch_size=8",
    "scheduler.lr_warmup_iters=20",
    "validation.eval_interval=100",
    "validation.eval_iters=4",
    "logger.log_interval=50",
]


def main(overrides: list[str]) -> None:
    config = tiny_gpt_pretrain_config()
    apply_overrides(config, [*SETTINGS, *overrides])
    pretrain(config, callbacks=[DefaultMetrics(), ProgressCallback(), JsonLogger()])

    model, tokenizer = load_hf(f"runs/{config.run.name}/model"), ByteTokenizer()
    prompt = torch.tensor([tokenizer.encode_text("def ")])
    tokens = generate(model, prompt, max_new_tokens=60, temperature=0.7, seed=1, eos_id=tokenizer.eos_id)
    print(tokenizer.decode(tokens[0].tolist()))


if __name__ == "__main__":
    main(sys.argv[1:])
