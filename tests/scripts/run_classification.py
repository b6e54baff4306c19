"""Trains a classifier of sentences, in the manner of GLUE: train, evaluate, predict."""

import logging
import os
import sys
from dataclasses import dataclass, field

import numpy as np
from datasets import load_dataset
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    EvalPrediction,
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
    test_file: str | None = None
    max_seq_length: int = field(default=32, metadata={"help": "Longer sentences are cut."})
    max_train_samples: int | None = field(default=None, metadata={"help": "For a quick try."})


def main():
    parser = HfArgumentParser((ModelArguments, DataTrainingArguments, TrainingArguments))
    model_args, data_args, training_args = parser.parse_args_into_dataclasses()
    logging.basicConfig(handlers=[logging.StreamHandler(sys.stdout)], level=training_args.get_process_log_level())

    last_checkpoint = None
    if os.path.isdir(training_args.output_dir) and training_args.do_train:
        last_checkpoint = get_last_checkpoint(training_args.output_dir)
    set_seed(training_args.seed)

    files = {"train": data_args.train_file, "validation": data_args.validation_file}
    if training_args.do_predict:
        if data_args.test_file is None:
            raise ValueError("--do_predict requires --test_file")
        files["test"] = data_args.test_file
    raw_datasets = load_dataset("json", data_files=files, cache_dir=model_args.cache_dir)
    label_list = sorted(raw_datasets["train"].unique("label"))
    label_to_id = {label: number for number, label in enumerate(label_list)}

    config = AutoConfig.from_pretrained(model_args.model_name_or_path, num_labels=len(label_list))
    tokenizer = AutoTokenizer.from_pretrained(model_args.model_name_or_path)
    model = AutoModelForSequenceClassification.from_pretrained(model_args.model_name_or_path, config=config)
    model.config.label2id = label_to_id
    model.config.id2label = {number: label for label, number in label_to_id.items()}

    def preprocess(examples):
        result = tokenizer(examples["sentence"], max_length=data_args.max_seq_length, truncation=True)
        result["label"] = [label_to_id[label] for label in examples["label"]]
        return result

    with training_args.main_process_first(desc="tokenizing"):
        # "sentence" stays: the Trainer drops the columns that the model does not accept
        tokenized = raw_datasets.map(preprocess, batched=True)
    train_dataset = tokenized["train"]
    if data_args.max_train_samples is not None:
        train_dataset = train_dataset.select(range(min(len(train_dataset), data_args.max_train_samples)))

    def compute_metrics(p: EvalPrediction):
        logits = p.predictions[0] if isinstance(p.predictions, tuple) else p.predictions
        found = np.argmax(logits, axis=1)
        positive = (found == 1) & (p.label_ids == 1)
        f1 = 2 * positive.sum() / max((found == 1).sum() + (p.label_ids == 1).sum(), 1)
        return {"accuracy": (found == p.label_ids).astype(np.float32).mean().item(), "f1": float(f1)}

    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=train_dataset if training_args.do_train else None,
        eval_dataset=tokenized["validation"] if training_args.do_eval else None,
        compute_metrics=compute_metrics,
        processing_class=tokenizer,
        data_collator=DataCollatorWithPadding(tokenizer, pad_to_multiple_of=8),
    )

    if training_args.do_train:
        train_result = trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint or last_checkpoint)
        metrics = train_result.metrics
        metrics["train_samples"] = len(train_dataset)
        trainer.save_model()
        trainer.log_metrics("train", metrics)
        trainer.save_metrics("train", metrics)
        trainer.save_state()

    if training_args.do_eval:
        metrics = trainer.evaluate(eval_dataset=tokenized["validation"])
        metrics["eval_samples"] = len(tokenized["validation"])
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)

    if training_args.do_predict:
        predictions = trainer.predict(
            tokenized["test"].remove_columns("label"), metric_key_prefix="predict"
        ).predictions
        output_file = os.path.join(training_args.output_dir, "predict_results.txt")
        if trainer.is_world_process_zero():
            with open(output_file, "w") as writer:
                writer.write("index\tprediction\n")
                for index, row in enumerate(np.argmax(predictions, axis=1)):
                    writer.write(f"{index}\t{label_list[row]}\n")

    trainer.create_model_card(finetuned_from=model_args.model_name_or_path, tasks="text-classification", language="en")


if __name__ == "__main__":
    main()
