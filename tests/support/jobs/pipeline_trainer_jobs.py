"""What the ranks of the tests of Trainers on a pipeline run: `job_*(settings)`."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from onstep import Trainer, TrainingArguments
from onstep.errors import ConfigError

SIZES = {"vocab_size": 67, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32}


class Rows(torch.utils.data.Dataset[Any]):
    """Rows of random tokens with labels of several lengths; of eight rows, two have none."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = torch.randint(67, (12,), generator=torch.Generator().manual_seed(index))
        labels = tokens.clone()
        labels[0 if index % 8 > 5 else 3 + index % 8 :] = -100
        return {"input_ids": tokens, "labels": labels}


WITHOUT_DROPOUT = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
"""Of GPT-2."""


def model_of(kind: str) -> Any:
    more = WITHOUT_DROPOUT if kind == "gpt2" else {}
    config = AutoConfig.for_model(
        kind, **SIZES, **HEADS, **more, bos_token_id=0, eos_token_id=0, tie_word_embeddings=True
    )
    return AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]


class WithOwnLoss(Trainer):
    """Overrides what a pipeline refuses."""

    def compute_loss(self, model: Any, inputs: Any, *more: Any, **further: Any) -> Any:
        return model(**inputs).loss


def accuracy(prediction: Any) -> dict[str, float]:
    logits, labels = prediction
    return {"accuracy": float((logits.argmax(-1) == labels).mean()), "largest": float(logits.max())}


def own_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-3)


def job_trainers(settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Trainers, one after the other: what they log, evaluate and predict, or why they refuse to train."""
    return [_trained(one) for one in settings["trainers"]]


def _trained(one: dict[str, Any]) -> dict[str, Any]:
    ranks = one["ranks"]
    arguments = TrainingArguments(
        output_dir=one["directory"],
        max_steps=one.get("steps", 4),
        per_device_train_batch_size=one.get("rows", 2),
        gradient_accumulation_steps=4,
        per_device_eval_batch_size=2,
        learning_rate=3e-3,
        weight_decay=0.1,
        max_grad_norm=0.5,
        lr_scheduler_type="constant",
        use_cpu=True,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="steps",
        save_steps=2,
        logging_steps=1,
        load_best_model_at_end=one.get("best", False),
        report_to=[],
        disable_tqdm=True,
        parallelism_config={"pp_size": one.get("size", 2), "dp_replicate_size": -1} if ranks > 1 else None,
        config_overrides={"parallel": one["parallel"]} if ranks > 1 and "parallel" in one else None,
    )
    torch.manual_seed(0)
    kind = WithOwnLoss if one.get("overrides") else Trainer
    model = model_of(one.get("kind", "llama"))
    optimizer: Any = own_optimizer if one.get("factory") else None
    if one.get("asks_again"):
        optimizer = partial(torch.optim.LBFGS, lr=0.1)  # whose class is known once it is made
    if one.get("object"):
        optimizer = own_optimizer(model.parameters())
    try:
        trainer = kind(
            model,
            arguments,
            train_dataset=Rows(64),
            eval_dataset=Rows(5),
            compute_metrics=accuracy,
            optimizers=(optimizer, None),
        )
        trainer.train(resume_from_checkpoint=one.get("resumes"))
    except ConfigError as error:
        return {"refused": str(error), "lost": [name for name, one in model.named_parameters() if one.is_meta]}
    predictions: Any = trainer.predict(Rows(3)).predictions
    logged = [record for record in trainer.state.log_history if "grad_norm" in record]
    evaluated = trainer.evaluate()
    found = {
        "losses": [record["loss"] for record in logged],
        "norms": [record["grad_norm"] for record in logged],
        "evaluated": [evaluated[f"eval_{name}"] for name in ("loss", "accuracy", "largest")],
        "predicted": [float(predictions.mean()), *map(float, predictions.shape)],
    }
    trainer.save_model(one["directory"] + "/final")
    return found
