"""Trains a masked language model on the lines of a text file."""

import logging
import math
import os
import sys
from dataclasses import dataclass, field

from datasets import load_dataset
from transformers import (
    AutoModelForMaskedLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
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
class DataTrainingArguments:
    train_file: str
    validation_file: str
    max_seq_length: int = 24
    mlm_probability: float = field(default=0.15, metadata={"help": "Share of the tokens that are masked."})
    pad_to_max_length: bool = False


def main():
    parser = HfArgumentParser((ModelArguments, DataTrainingArguments, TrainingArguments))
    model_args, data_args, training_args = parser.parse_args_into_dataclasses()
    logging.basicConfig(handlers=[logging.StreamHandler(sys.stdout)], level=training_args.get_process_log_level())

    last_checkpoint = None
    if os.path.isdir(training_args.output_dir):
        last_checkpoint = get_last_checkpoint(training_args.output_dir)
    set_seed(training_args.seed)

    raw_datasets = load_dataset(
        "text",
        data_files={"train": data_args.train_file, "validation": data_args.validation_file},
        cache_dir=model_args.cache_dir,
    )
    tokenizer = AutoTokenizer.from_pretrained(model_args.model_name_or_path)
    model = AutoModelForMaskedLM.from_pretrained(model_args.model_name_or_path)

    def tokenize(examples):
        return tokenizer(
            examples["text"],
            padding="max_length" if data_args.pad_to_max_length else False,
            truncation=True,
            max_length=data_args.max_seq_length,
            return_special_tokens_mask=True,
        )

    with training_args.main_process_first(desc="tokenizing"):
        tokenized = raw_datasets.map(tokenize, batched=True, remove_columns=["text"])

    # with a seed of its own the collator masks the same tokens wherever the global random numbers are
    data_collator = DataCollatorForLanguageModeling(
        tokenizer, mlm_probability=data_args.mlm_probability, seed=training_args.seed
    )

    def preprocess_logits_for_metrics(logits, labels):
        return logits.argmax(dim=-1)

    def compute_metrics(eval_preds):
        predictions, labels = eval_preds
        masked = labels != -100
        return {"accuracy": float((predictions[masked] == labels[masked]).mean())}

    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=tokenized["train"],
        eval_dataset=tokenized["validation"],
        processing_class=tokenizer,
        data_collator=data_collator,
        compute_metrics=compute_metrics,
        preprocess_logits_for_metrics=preprocess_logits_for_metrics,
    )

    if training_args.do_train:
        train_result = trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint or last_checkpoint)
        trainer.save_model()
        metrics = train_result.metrics
        metrics["train_samples"] = len(tokenized["train"])
        trainer.log_metrics("train", metrics)
        trainer.save_metrics("train", metrics)
        trainer.save_state()

    if training_args.do_eval:
        metrics = trainer.evaluate()
        metrics["eval_samples"] = len(tokenized["validation"])
        metrics["perplexity"] = math.exp(metrics["eval_loss"])
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)

    trainer.create_model_card(finetuned_from=model_args.model_name_or_path, tasks="fill-mask")


if __name__ == "__main__":
    main()
