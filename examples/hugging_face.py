"""Train a model of transformers as its own Trainer would: only the import line differs.

    python examples/hugging_face.py

A GPT-2 of two layers on the sources of Python's standard library, its bytes as tokens; no download is needed. The
output directory is one of Hugging Face: `from_pretrained` opens it. Requires `pip install 'onstep[hf]'`.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, set_seed

from onstep import Trainer, TrainingArguments

LENGTH = 64


def rows(count: int) -> list[dict[str, torch.Tensor]]:
    """The first bytes of the json package, in rows of `LENGTH`."""
    source = b"".join(path.read_bytes() for path in sorted(Path(json.__file__).parent.glob("*.py")))
    tokens = torch.tensor(list(source[: count * LENGTH])).view(-1, LENGTH)
    return [{"input_ids": row, "labels": row} for row in tokens]


def main() -> None:
    set_seed(0)
    sizes = GPT2Config(
        vocab_size=256, n_positions=LENGTH, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0
    )
    data = rows(400)
    args = TrainingArguments(
        "runs/hugging_face",
        learning_rate=3e-3,
        per_device_train_batch_size=16,
        num_train_epochs=3,
        eval_strategy="epoch",
        save_strategy="epoch",
        logging_steps=10,
        load_best_model_at_end=True,
        metric_for_best_model="loss",
    )
    trainer = Trainer(GPT2LMHeadModel(sizes), args, train_dataset=data[:360], eval_dataset=data[360:])
    trainer.train()

    model = AutoModelForCausalLM.from_pretrained("runs/hugging_face")
    with torch.no_grad():
        loss = torch.stack([model(input_ids=r["input_ids"][None], labels=r["labels"][None]).loss for r in data[360:]])
    print(f"eval_loss {trainer.evaluate()['eval_loss']:.4f}, of the weights opened by transformers {loss.mean():.4f}")


if __name__ == "__main__":
    main()
