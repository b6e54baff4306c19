"""Models and data of a few hundred numbers, for the tests of the Trainer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import IterableDataset

from onstep import CallbackManager, Trainer, TrainingArguments

IGNORE = -100
VOCABULARY = 23


class Regression(nn.Module):
    """One linear layer whose loss is a mean; it knows nothing of tokens."""

    def __init__(self, width: int = 3, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layer = nn.Linear(width, 1)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.layer(x).squeeze(-1)
        if labels is None:
            return {"logits": logits}
        return {"loss": (logits - labels).square().mean(), "logits": logits}


class TokenModel(nn.Module):
    """Predicts a label for each token; without `num_items_in_batch` its loss is a mean over the labels."""

    def __init__(self, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(VOCABULARY, 8, dtype=dtype)
        self.head = nn.Linear(8, VOCABULARY, dtype=dtype)

    def logits(self, input_ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embedding(input_ids)))

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.logits(input_ids)
        loss = cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE)
        return {"loss": loss, "logits": logits}


class CountingTokenModel(TokenModel):
    """The same, dividing the sum of its losses by `num_items_in_batch` where it is given."""

    def forward(self, input_ids: Tensor, labels: Tensor, num_items_in_batch: Any = None) -> dict[str, Tensor]:
        logits = self.logits(input_ids)
        total = cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum")
        items = labels.ne(IGNORE).sum() if num_items_in_batch is None else num_items_in_batch
        return {"loss": total / items, "logits": logits}


class LogitsModel(TokenModel):
    """Gives logits alone; the loss is a matter of the Trainer."""

    def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
        return {"logits": self.logits(input_ids)}


class NextTokenForCausalLM(TokenModel):
    """Shifts its labels itself, as causal models of `transformers` do; its loss is a mean."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.logits(input_ids)
        loss = cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORE)
        return {"loss": loss, "logits": logits}


class Stream(IterableDataset[Any]):
    """A dataset without a length."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __iter__(self) -> Any:
        return iter(self.rows)


def regression_rows(count: int = 12, width: int = 3) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    weights = torch.arange(1.0, width + 1)
    features = torch.randn(count, width, generator=generator)
    return [{"x": row, "labels": row @ weights} for row in features]


def ragged_rows(count: int = 24, longest: int = 9, *, shared: int = 2) -> list[dict[str, Tensor]]:
    """Token rows of unequal numbers of labels: each is padded to `longest`, its padding and more not trained on."""
    generator = torch.Generator().manual_seed(7)
    rows = []
    for number in range(count):
        length = shared + number % (longest - shared + 1)
        ids = torch.randint(1, VOCABULARY, (longest,), generator=generator)
        labels = torch.where(torch.arange(longest) < length, ids.roll(1), IGNORE)
        rows.append({"input_ids": torch.where(torch.arange(longest) < length, ids, 0), "labels": labels})
    return rows


def causal_rows(count: int = 16, length: int = 10) -> list[dict[str, list[int]]]:
    """Rows for a causal model: padded on the right, padding not trained on, unequal lengths."""
    generator = torch.Generator().manual_seed(3)
    rows = []
    for number in range(count):
        used = 4 + (5 * number) % (length - 3)
        ids = torch.randint(1, VOCABULARY, (length,), generator=generator).tolist()
        ids = ids[:used] + [0] * (length - used)
        labels = ids[:used] + [IGNORE] * (length - used)
        mask = [1] * used + [0] * (length - used)
        rows.append({"input_ids": ids, "labels": labels, "attention_mask": mask})
    return rows


def qwen(seed: int = 0, **options: Any) -> Any:
    """A real `Qwen2ForCausalLM` of some thousand parameters."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    return Qwen2ForCausalLM(_qwen_config(Qwen2Config, **options))


def qwen_classifier(seed: int = 0, num_labels: int = 3) -> Any:
    from transformers import Qwen2Config, Qwen2ForSequenceClassification

    torch.manual_seed(seed)
    return Qwen2ForSequenceClassification(_qwen_config(Qwen2Config, num_labels=num_labels, pad_token_id=0))


def _qwen_config(cls: Any, **options: Any) -> Any:
    return cls(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32,
        **options,
    )


def arguments(directory: Any, **options: Any) -> TrainingArguments:
    """Small steps on the CPU in a directory of the test."""
    values: dict[str, Any] = {
        "output_dir": str(directory / "run"),
        "use_cpu": True,
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "num_train_epochs": 1,
        "learning_rate": 0.05,
        "train_sampling_strategy": "sequential",
        "config_overrides": {"run.save_weights": False},
    }
    return TrainingArguments(**{**values, **options})


def quiet(model: Any, args: Any, train_dataset: Any = None, **options: Any) -> Trainer:
    """A Trainer without the default callbacks."""
    return Trainer(model, args, train_dataset=train_dataset, default_callbacks=False, **options)


def losses_of(trainer: Trainer) -> list[float]:
    """The logged losses of a run that logs every step."""
    assert trainer.state is not None
    return [record["loss"] for record in trainer.state.log_history if "loss" in record]


def recorder(event: str, note: Any) -> CallbackManager:
    """A manager that calls `note(context)` at one event."""
    manager = CallbackManager()
    manager.register(event, lambda context: note(context))
    return manager
