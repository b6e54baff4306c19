"""What the ranks of the tests of tensor-parallel trainers run: `job_*(settings)`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from onstep import Trainer, TrainingArguments
from onstep.errors import ConfigError

SIZES = {"vocab_size": 67, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32}


class Rows(torch.utils.data.Dataset[Any]):
    """Rows of random tokens."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = torch.randint(67, (12,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def model_of(kind: str) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **SIZES, **HEADS, bos_token_id=0, eos_token_id=0)
    return AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]


def job_trainers(settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Trainers, one after the other: what they log, evaluate and predict, or why they refuse to train."""
    return [_trained(one) for one in settings["trainers"]]


def _trained(one: dict[str, Any]) -> dict[str, Any]:
    arguments = TrainingArguments(
        output_dir=one["directory"],
        max_steps=one.get("steps", 4),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        use_cpu=True,
        save_strategy="steps",
        save_steps=2,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        parallelism_config={"tp_size": one["ranks"]} if one["ranks"] > 1 else None,
    )
    model = model_of(one.get("kind", "llama"))
    try:
        trainer = Trainer(model, arguments, train_dataset=Rows(64), eval_dataset=Rows(5))
        trainer.train(resume_from_checkpoint=one.get("resumes"))
    except ConfigError as error:
        return {"refused": str(error)}
    predictions: Any = trainer.predict(Rows(3)).predictions
    logged = [record for record in trainer.state.log_history if "grad_norm" in record]
    found = {
        "losses": [record["loss"] for record in logged],
        "norms": [record["grad_norm"] for record in logged],
        "evaluated": trainer.evaluate()["eval_loss"],
        "predicted": float(predictions.mean()),
    }
    trainer.save_model(one["directory"] + "/final")
    return found
