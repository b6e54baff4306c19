"""LoRA trained by Hugging Face's Trainer, and by a plain loop, on the batches and the first adapter of a run."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from onstep import finetune
from onstep.config import ConfigContainer
from onstep.training.setup.lora import save_adapter

RATE, CLIP = 1e-2, 1.0


@dataclass
class Observed:
    """What a run trained on, and what came out."""

    rows: list[dict[str, Tensor]] = field(default_factory=list)
    """Samples in the order of training: `input_ids`, and `labels` that are shifted already."""
    losses: list[float] = field(default_factory=list)
    adapter: dict[str, Tensor] = field(default_factory=dict)


def observed_run(config: ConfigContainer) -> Observed:
    """Fine-tune with a constant learning rate and no dropout; the first adapter is left in `first/`."""
    config.optimizer.lr, config.optimizer.min_lr, config.scheduler.lr_decay_style = RATE, None, "constant"
    config.scheduler.lr_warmup_fraction, config.peft.dropout, config.optimizer.clip_grad = None, 0.0, CLIP
    config.optimizer.adam_beta1, config.optimizer.adam_beta2, config.optimizer.adam_eps = 0.9, 0.999, 1e-8
    config.validation.eval_interval, config.validation.eval_after_training = None, False
    config.checkpoint.save_interval, config.logger.log_interval = None, 1
    found = Observed()

    def note(module: nn.Module, args: Any, kwargs: Any) -> None:
        tokens, labels = args[:2]
        rows = zip(tokens, labels, strict=True)
        found.rows += [{"input_ids": row.clone(), "labels": targets.clone()} for row, targets in rows]

    def watch(chunks: list[nn.Module]) -> None:
        save_adapter(chunks[0], config.peft, "first", None)  # type: ignore[arg-type]
        chunks[0].register_forward_pre_hook(note, with_kwargs=True)

    finetune(config, pre_wrap_hooks=[watch])
    lines = map(json.loads, Path("runs/run/record.jsonl").read_text().splitlines())
    found.losses = [line["loss"] for line in lines if line.get("kind") == "log" and "loss" in line]
    found.adapter = load_file(Path("runs/run/adapter/adapter_model.safetensors"))
    return found


def base(**options: Any) -> Any:
    """The base with the first adapter, trainable."""
    return PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained("weights", **options), "first", is_trainable=True
    )


def by_their_trainer(model: Any, run: Observed, batch_size: int, **options: Any) -> Observed:
    """The same steps by Hugging Face's Trainer."""
    args = transformers.TrainingArguments(
        "theirs",
        per_device_train_batch_size=batch_size,
        max_steps=len(run.losses),
        learning_rate=RATE,
        lr_scheduler_type="constant",
        max_grad_norm=CLIP,
        train_sampling_strategy="sequential",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
        use_cpu=True,
        **options,
    )
    rows = [{**row, "shift_labels": row["labels"]} for row in run.rows]
    trainer = transformers.Trainer(model, args, train_dataset=rows)
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    losses = [record["loss"] for record in trainer.state.log_history if "loss" in record]
    return Observed(run.rows, losses, adapter_of(model))


def by_hand(model: Any, run: Observed, batch_size: int) -> Observed:
    """The same steps by a plain loop over the module."""
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer, losses = torch.optim.AdamW(trained, lr=RATE, weight_decay=0.0, fused=True), []
    model.train()
    for step in range(len(run.losses)):
        rows = run.rows[step * batch_size : (step + 1) * batch_size]
        batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
        loss = model(input_ids=batch["input_ids"], labels=batch["labels"], shift_labels=batch["labels"]).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, CLIP)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return Observed(run.rows, losses, adapter_of(model))


def adapter_of(model: Any) -> dict[str, Tensor]:
    """The added weights under the names of an adapter's file."""
    return {
        name.replace(".default.", "."): param.detach()
        for name, param in model.named_parameters()
        if param.requires_grad
    }


def largest_difference(one: Observed, other: Observed) -> tuple[float, float]:
    """Of the losses, and of the adapters' weights."""
    losses = max(abs(a - b) for a, b in zip(one.losses, other.losses, strict=True))
    assert one.adapter.keys() == other.adapter.keys()
    return losses, max(float((one.adapter[name] - other.adapter[name]).abs().max()) for name in one.adapter)
