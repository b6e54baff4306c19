"""Trains a classifier on its samples and on adversarial ones: a second backward pass with disturbed embeddings."""

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


@dataclass
class AdversarialArguments(TrainingArguments):
    epsilon: float = field(default=0.5, metadata={"help": "Length of the disturbance."})


class FGM:
    """The fast gradient method: a step of length epsilon along the gradient of the embeddings."""

    def __init__(self, model, epsilon):
        self.model, self.epsilon, self.backup = model, epsilon, {}

    def attack(self):
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad and parameter.grad is not None and "word_embeddings" in name:
                self.backup[name] = parameter.data.clone()
                norm = torch.norm(parameter.grad)
                if norm != 0 and not torch.isnan(norm):
                    parameter.data.add_(self.epsilon * parameter.grad / norm)

    def restore(self):
        for name, parameter in self.model.named_parameters():
            if name in self.backup:
                parameter.data = self.backup.pop(name)


class AdversarialTrainer(Trainer):
    def training_step(self, model, inputs, num_items_in_batch=None):
        model.train()
        inputs = self._prepare_inputs(inputs)
        fgm = FGM(model, self.args.epsilon)
        losses = []
        for is_adversarial in (False, True):
            if is_adversarial:
                fgm.attack()
            with self.compute_loss_context_manager():
                loss = self.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
            if self.args.n_gpu > 1:
                loss = loss.mean()
            loss = loss / self.args.gradient_accumulation_steps
            self.accelerator.backward(loss)
            losses.append(loss.detach())
        fgm.restore()
        return losses[0]


def main():
    parser = HfArgumentParser((ModelArguments, DataArguments, AdversarialArguments))
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

    trainer = AdversarialTrainer(
        model=model,
        args=training_args,
        train_dataset=tokenized["train"],
        eval_dataset=tokenized["validation"],
        processing_class=tokenizer,
        data_collator=DataCollatorWithPadding(tokenizer),
        compute_metrics=lambda p: {"accuracy": float((p.predictions.argmax(-1) == p.label_ids).mean())},
    )
    train_result = trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint or last_checkpoint)
    trainer.save_model()
    trainer.log_metrics("train", train_result.metrics)
    trainer.save_metrics("train", train_result.metrics)
    trainer.save_state()

    metrics = trainer.evaluate()
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)


if __name__ == "__main__":
    main()
