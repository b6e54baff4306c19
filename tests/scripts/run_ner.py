"""Trains a tagger of names: one label per word, on its first token."""

import logging
import os
import sys
from dataclasses import dataclass, field

import numpy as np
from datasets import load_dataset
from transformers import (
    AutoConfig,
    AutoModelForTokenClassification,
    AutoTokenizer,
    DataCollatorForTokenClassification,
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
    test_file: str
    text_column_name: str = "tokens"
    label_column_name: str = "ner_tags"
    return_entity_level_metrics: bool = field(default=False, metadata={"help": "Metrics of each kind of name too."})


def main():
    parser = HfArgumentParser((ModelArguments, DataTrainingArguments, TrainingArguments))
    model_args, data_args, training_args = parser.parse_args_into_dataclasses()
    logging.basicConfig(handlers=[logging.StreamHandler(sys.stdout)], level=training_args.get_process_log_level())
    last_checkpoint = get_last_checkpoint(training_args.output_dir) if os.path.isdir(training_args.output_dir) else None
    set_seed(training_args.seed)

    files = {"train": data_args.train_file, "validation": data_args.validation_file, "test": data_args.test_file}
    raw_datasets = load_dataset("json", data_files=files, cache_dir=model_args.cache_dir)
    label_list = sorted({tag for tags in raw_datasets["train"][data_args.label_column_name] for tag in tags})
    label_to_id = {label: number for number, label in enumerate(label_list)}
    config = AutoConfig.from_pretrained(
        model_args.model_name_or_path,
        num_labels=len(label_list),
        label2id=label_to_id,
        id2label=dict(enumerate(label_list)),
    )
    tokenizer = AutoTokenizer.from_pretrained(model_args.model_name_or_path)
    model = AutoModelForTokenClassification.from_pretrained(model_args.model_name_or_path, config=config)

    def tokenize_and_align_labels(examples):
        tokenized = tokenizer(examples[data_args.text_column_name], truncation=True, is_split_into_words=True)
        tokenized["labels"] = []
        for number, tags in enumerate(examples[data_args.label_column_name]):
            words, labels = tokenized.word_ids(batch_index=number), []
            for before, word in zip([None, *words], words, strict=False):
                is_first = word is not None and word != before
                labels.append(label_to_id[tags[word]] if is_first else -100)
            tokenized["labels"].append(labels)
        return tokenized

    with training_args.main_process_first(desc="tokenizing"):
        tokenized = raw_datasets.map(tokenize_and_align_labels, batched=True)

    def compute_metrics(p):
        predictions, labels = p
        found = np.argmax(predictions, axis=2)
        counted = labels != -100
        named, meant = counted & (found != label_to_id["O"]), counted & (labels != label_to_id["O"])
        right = (named & meant & (found == labels)).sum()
        results = {
            "precision": float(right / max(named.sum(), 1)),
            "recall": float(right / max(meant.sum(), 1)),
            "accuracy": float((found == labels)[counted].mean()),
        }
        if data_args.return_entity_level_metrics:
            for label, number in label_to_id.items():
                results[f"{label}_recall"] = float((found == labels)[labels == number].mean())
        return results

    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=tokenized["train"],
        eval_dataset=tokenized["validation"],
        processing_class=tokenizer,
        data_collator=DataCollatorForTokenClassification(tokenizer, pad_to_multiple_of=8),
        compute_metrics=compute_metrics,
    )

    if training_args.do_train:
        train_result = trainer.train(resume_from_checkpoint=last_checkpoint)
        trainer.save_model()
        metrics = train_result.metrics
        metrics["train_samples"] = len(tokenized["train"])
        trainer.log_metrics("train", metrics)
        trainer.save_metrics("train", metrics)
        trainer.save_state()

    if training_args.do_eval:
        metrics = trainer.evaluate()
        metrics["eval_samples"] = len(tokenized["validation"])
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)

    if training_args.do_predict:
        predictions, labels, metrics = trainer.predict(tokenized["test"], metric_key_prefix="predict")
        trainer.log_metrics("predict", metrics)
        trainer.save_metrics("predict", metrics)
        if trainer.is_world_process_zero():
            with open(os.path.join(training_args.output_dir, "predictions.txt"), "w") as writer:
                for found, row in zip(np.argmax(predictions, axis=2), labels, strict=True):
                    tags = [label_list[tag] for tag, label in zip(found, row, strict=True) if label != -100]
                    writer.write(" ".join(tags) + "\n")

    trainer.create_model_card(finetuned_from=model_args.model_name_or_path, tasks="token-classification")


if __name__ == "__main__":
    main()
