"""What the ranks of the tests of Trainers on a pipeline run: `job_*(settings)`."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, TrainerCallback

from onstep import Callback, Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer, TrainingArguments
from onstep.callbacks import EMA, TextgenCallback
from onstep.errors import ConfigError
from tests.support.jobs.shard_run_jobs import Killing

SIZES = {"vocab_size": 67, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32}


class Rows(torch.utils.data.Dataset[Any]):
    """Rows of random tokens with labels of several lengths; of eight rows, two have none.

    Unless they are alike, every two of them have another length.
    """

    def __init__(self, size: int, *, are_alike: bool = True, has_labels: bool = True) -> None:
        self.size, self.are_alike, self.has_labels = size, are_alike, has_labels

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        length = 12 if self.are_alike else 12 - index // 2 % 3
        tokens = torch.randint(67, (length,), generator=torch.Generator().manual_seed(index))
        labels = tokens.clone()
        labels[0 if index % 8 > 5 else 3 + index % 8 :] = -100
        return {"input_ids": tokens, "labels": labels} if self.has_labels else {"input_ids": tokens}


WITHOUT_DROPOUT = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
"""Of GPT-2."""


def model_of(kind: str, **changed: Any) -> Any:
    more = (WITHOUT_DROPOUT if kind == "gpt2" else {}) | changed
    config = AutoConfig.for_model(
        kind, **{**SIZES, **HEADS, "bos_token_id": 0, "eos_token_id": 0, "tie_word_embeddings": True, **more}
    )
    return AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]


class WithOwnLoss(Trainer):
    """Overrides what a pipeline refuses."""

    def compute_loss(self, model: Any, inputs: Any, *more: Any, **further: Any) -> Any:
        return model(**inputs).loss


def accuracy(prediction: Any) -> dict[str, float]:
    logits, labels = prediction
    return {"accuracy": float((logits.argmax(-1) == labels).mean()), "largest": float(logits.max())}


class Letters:
    """A tokenizer of letters."""

    eos_id = 0

    def encode_text(self, text: str) -> list[int]:
        return [ord(letter) - 32 for letter in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(32 + one) for one in ids)


class Texts:
    """What a TextgenCallback writes."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def add_text(self, tag: str, text: str, step: int) -> None:
        self.found.append(text)

    def flush(self) -> None:
        """All is there."""

    def shared(self) -> list[str]:
        """Those of rank 0, on all ranks."""
        texts = [self.found]
        if torch.distributed.is_initialized():
            torch.distributed.broadcast_object_list(texts)
        return texts[0]


class Heard(TrainerCallback):
    """Notes the events that a callback of transformers gets, with the step, what is due and the names of metrics."""

    def __init__(self) -> None:
        self.lines: list[Any] = []


def _note(event: str) -> Callable[..., None]:
    def on_event(self: Heard, args: Any, state: Any, control: Any, **given: Any) -> None:
        due = [control.should_log, control.should_evaluate, control.should_save, control.should_training_stop]
        told = given.get("logs") or given.get("metrics") or {}
        names = sorted(name for name in told if name != "tok_per_sec")  # which rank 0 alone has
        assert given["model"] is not None
        self.lines.append([event, state.global_step, due, names])

    return on_event


for _event in [name for name in vars(TrainerCallback) if name.startswith("on_")]:
    setattr(Heard, _event, _note(_event))


class Predicts(TrainerCallback):
    """Predicts from rows without labels, of which no rank has a loss, between two steps."""

    def __init__(self) -> None:
        self.trainer: Any = None

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if state.global_step == 1:
            self.trainer.predict(Rows(3, has_labels=False))


class Watched(Callback):
    """Kills this rank in a pass of a Trainer, whose stages are made by then.

    Args:
        killing: what kills it.
    """

    ranks = "all"

    def __init__(self, killing: Killing) -> None:
        self.killing = killing

    def on_train_start(self, context: Any) -> None:
        for chunk in context.model:
            self.killing.watch(chunk)


def own_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def job_trainers(settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Trainers, one after the other: what they log, evaluate and predict, or why they refuse to train."""
    return [_trained(one) for one in settings["trainers"]]


def job_killed(settings: dict[str, Any]) -> dict[str, Any]:
    """A Trainer on a pipeline, from the newest checkpoint unless it is the first start; the digest is of its model."""
    callbacks: list[Callback] = []
    if int(os.environ["RANK"]) == settings.get("killed"):
        killing = Killing(*settings["at"])
        killing.install()
        callbacks.append(Watched(killing))
    one = {"directory": "checkpoints", "ranks": int(os.environ["WORLD_SIZE"]), "steps": settings["steps"]}
    one |= {"checkpoint": {"async_save": settings.get("async", False)}, "resumes": settings.get("seed", 0) > 0}
    found = _trained(one, callbacks)
    torch.distributed.barrier()  # rank 0 has written the model
    digest = sha256(Path("checkpoints/final/model.safetensors").read_bytes()).hexdigest()
    return {**found, "digests": [digest, found["evaluated"], found["predicted"]]}


def _trained(one: dict[str, Any], more_callbacks: Sequence[Callback] = ()) -> dict[str, Any]:
    ranks = one["ranks"]
    more = one.get("arguments", {})
    kind_of = Seq2SeqTrainingArguments if "predict_with_generate" in more else TrainingArguments
    arguments = kind_of(
        output_dir=one["directory"],
        max_steps=-1 if "num_train_epochs" in more else one.get("steps", 4),
        per_device_train_batch_size=one.get("rows", 2),
        gradient_accumulation_steps=4,
        per_device_eval_batch_size=2,
        learning_rate=1e-3,
        weight_decay=0.1,
        max_grad_norm=0.5,
        lr_scheduler_type=one.get("rates", "constant"),
        use_cpu=True,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="steps",
        save_steps=one.get("saves", 2),
        logging_steps=1,
        load_best_model_at_end=one.get("best", False),
        report_to=[],
        disable_tqdm=True,
        parallelism_config={**one.get("axes", {"pp_size": 2}), "dp_replicate_size": -1} if ranks > 1 else None,
        config_overrides={
            "parallel": one.get("parallel", {}) if ranks > 1 else {},
            "checkpoint": one.get("checkpoint", {}),
        },
        **more,
    )
    torch.manual_seed(0)
    kind = WithOwnLoss if one.get("overrides") else Trainer
    kind = Seq2SeqTrainer if kind_of is Seq2SeqTrainingArguments else kind
    model = model_of(one.get("kind", "llama"), **one.get("changed", {}))
    if "vocabulary" in one:
        model.resize_token_embeddings(one["vocabulary"])
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(frozen in name for frozen in one.get("frozen", [])))
    heard, texts = Heard(), Texts()
    generates = TextgenCallback(texts, ["AB", "C"], {"do_sample": False}, max_new_tokens=4)
    predicts = Predicts()
    callbacks: list[Any] = [*more_callbacks, heard, generates, *([predicts] if one.get("predicts") else [])]
    if one.get("averages"):
        callbacks.append(EMA(0.5, apply_at_end=False))
    optimizer: Any = own_optimizer if one.get("factory") else None
    if one.get("asks_again"):
        optimizer = partial(torch.optim.LBFGS, lr=0.1)  # whose class is known once it is made
    if one.get("object"):
        optimizer = own_optimizer(model.parameters())
    try:
        trainer = kind(
            model,
            arguments,
            train_dataset=Rows(one.get("samples", 64), are_alike=not one.get("varied")),
            eval_dataset=Rows(5),
            compute_metrics=accuracy,
            optimizers=(optimizer, None),
            callbacks=callbacks,
            processing_class=Letters(),
        )
        predicts.trainer = trainer
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
    found |= {"heard": heard.lines, "texts": texts.shared()}
    trainer.save_model(one["directory"] + "/final")
    return found
