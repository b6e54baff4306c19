"""Both doors give the losses of a hand-written PyTorch loop, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from onstep import CallbackManager, Trainer, TrainingArguments, pretrain
from onstep.config import ConfigContainer, resolve
from onstep.data import TrainLoader, build_datasets, build_tokenizer
from onstep.models import Transformer, build_transformer
from onstep.training.setup.setup import resolve_vocabulary
from plain_loop import plain_loop

STEPS, LR, MIN_LR, WARMUP, DECAY, BETAS, CLIP = 50, 3e-3, 3e-4, 5, 0.1, (0.9, 0.95), 0.5


@pytest.fixture
def config(tiny_config: ConfigContainer) -> ConfigContainer:
    tiny_config.train.train_iters = STEPS
    tiny_config.optimizer.lr, tiny_config.optimizer.min_lr = LR, MIN_LR
    tiny_config.optimizer.weight_decay, tiny_config.optimizer.clip_grad = DECAY, CLIP
    tiny_config.scheduler.lr_warmup_iters = WARMUP
    tiny_config.validation.eval_iters = 0
    return tiny_config


def parts(config: ConfigContainer) -> tuple[Transformer, Any]:
    """The model and training set that the run of `config` starts with."""
    config = resolve(config, 1)
    tokenizer = build_tokenizer(config.tokenizer)
    resolve_vocabulary(config, tokenizer.vocab_size)
    train, _, _ = build_datasets(config.dataset, tokenizer, show_progress=False)
    return build_transformer(config.model, seed=config.rng.seed), train


def by_hand(config: ConfigContainer) -> list[float]:
    model, dataset = parts(config)
    loader = TrainLoader(dataset, micro_batch_size=4, global_batch_size=4, seed=config.rng.seed)
    losses: list[float] = []
    plain_loop(
        model,
        loader,
        steps=STEPS,
        lr=LR,
        min_lr=MIN_LR,
        warmup=WARMUP,
        weight_decay=DECAY,
        betas=BETAS,
        clip=CLIP,
        after_step=lambda loss: losses.append(loss.item()),
    )
    return losses


def recording() -> tuple[CallbackManager, list[float]]:
    manager, losses = CallbackManager(), []
    manager.register("on_train_step_end", lambda context: losses.append(context.loss_dict["lm loss"].item()))
    return manager, losses


def test_pretrain_gives_the_losses_of_plain_pytorch_bit_for_bit(config: ConfigContainer) -> None:
    manager, losses = recording()
    pretrain(config, callbacks=manager)
    assert losses == by_hand(config)
    assert losses[-1] < losses[0] - 0.5, "the run must learn, or equality says little"


class SumLoss(torch.nn.Module):
    """The same model behind Hugging Face's interface: a loss that is divided by `num_items_in_batch`."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.inner = model

    def forward(self, tokens: Any, labels: Any, num_items_in_batch: Any = None) -> dict[str, Any]:
        items = labels.numel() if num_items_in_batch is None else num_items_in_batch
        return {"loss": self.inner(tokens, labels, reduction="sum") / items}


def test_trainer_gives_the_losses_of_plain_pytorch_bit_for_bit(config: ConfigContainer, tmp_path: Path) -> None:
    model, dataset = parts(config)
    manager, losses = recording()
    args = TrainingArguments(
        output_dir=str(tmp_path / "run"),
        per_device_train_batch_size=4,
        max_steps=STEPS,
        learning_rate=LR,
        warmup_steps=WARMUP,
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr": MIN_LR},
        weight_decay=DECAY,
        adam_beta2=BETAS[1],
        max_grad_norm=CLIP,
        seed=config.rng.seed,
        use_cpu=True,
        dataloader_drop_last=True,
    )
    Trainer(SumLoss(model), args, train_dataset=dataset, callbacks=manager, default_callbacks=False).train()
    assert losses == by_hand(config)
