"""Trains a classifier whose rare class weighs more, and logs the share of each class that it was shown.

The weighted cross entropy is a method of the Trainer, or with --loss_as_function a function passed to it.
"""

import logging
import os
import sys
from dataclasses import dataclass, field

import torch
from datasets import load_dataset
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    EarlyStoppingCallback,
    HfArgumentParser,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint

# isort: split
# The import line that changes:
from transformers import Trainer, TrainingArguments

logger = logging.getLogger(__name__)


@dataclass
class ModelArguments:
    model_name_or_path: str
    cache_dir: str | None = None


@dataclass
class DataArguments:
    train_file: str
    validation_file: str
    class_weights: list[float] = field(default_factory=lambda: [1.0, 3.0])
    loss_as_function: bool = False


class WeightedTrainer(Trainer):
    class_weights = None

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.shown = torch.zeros(2)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        if self.class_weights is None:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        weights = torch.tensor(self.class_weights, device=outputs.logits.device)
        loss = torch.nn.functional.cross_entropy(outputs.logits, labels, weight=weights)
        if model.training:
            self.shown += torch.bincount(labels.cpu(), minlength=2)
        return (loss, outputs) if return_outputs else loss

    def log(self, logs, start_time=None):
        if "loss" in logs and self.shown.sum() > 0:
            logs["share_of_positives"] = (self.shown[1] / self.shown.sum()).item()
        super().log(logs, start_time)


def main():
    parser = HfArgumentParser((ModelArguments, DataArguments, TrainingArguments))
    model_args, data_args, training_args = parser.parse_args_into_dataclasses()
    logging.basicConfig(handlers=[logging.StreamHandler(sys.stdout)], level=training_args.get_process_log_level())
    last_checkpoint = get_last_checkpoint(training_args.output_dir) if os.path.isdir(training_args.output_dir) else None
    set_seed(training_args.seed)

    raw_datasets = load_dataset(
        "json",
        data_files={"train": data_args.train_file, "validation": data_args.validation_file},
        cache_dir=model_args.cache_dir,
    )
    tokenizer = AutoTokenizer.from_pretrained(model_args.model_name_or_path)
    model = AutoModelForSequenceClassification.from_pretrained(model_args.model_name_or_path, num_labels=2)

    def preprocess(examples):
        result = tokenizer(examples["sentence"], truncation=True)
        result["labels"] = [int(label == "positive") for label in examples["label"]]
        return result

    with training_args.main_process_first():
        tokenized = raw_datasets.map(preprocess, batched=True, remove_columns=["sentence", "label"])

    def weighted_loss(outputs, labels, num_items_in_batch=None):
        weights = torch.tensor(data_args.class_weights, device=labels.device)
        losses = torch.nn.functional.cross_entropy(outputs["logits"], labels, weight=weights, reduction="none")
        return losses.sum() / (labels.numel() if num_items_in_batch is None else num_items_in_batch)

    def compute_metrics(p):
        found = p.predictions.argmax(-1)
        recalls = [float((found == p.label_ids)[p.label_ids == label].mean()) for label in (0, 1)]
        return {"balanced_accuracy": sum(recalls) / 2}

    trainer = WeightedTrainer(
        model=model,
        args=training_args,
        train_dataset=tokenized["train"],
        eval_dataset=tokenized["validation"],
        processing_class=tokenizer,
        data_collator=DataCollatorWithPadding(tokenizer),
        compute_loss_func=weighted_loss if data_args.loss_as_function else None,
        compute_metrics=compute_metrics,
        callbacks=[EarlyStoppingCallback(early_stopping_patience=5)],
    )
    if not data_args.loss_as_function:
        trainer.class_weights = data_args.class_weights
    train_result = trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint or last_checkpoint)
    trainer.save_model()
    trainer.log_metrics("train", train_result.metrics)
    trainer.save_metrics("train", train_result.metrics)
    trainer.save_state()

    metrics = trainer.evaluate()
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)
    trainer.create_model_card()


if __name__ == "__main__":
    main()
