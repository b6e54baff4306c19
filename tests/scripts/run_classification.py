"""Sorts sentences into the classes that the training data names, and writes down the class of unseen ones."""

import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import transformers
from datasets import load_dataset
from transformers.trainer_utils import get_last_checkpoint

# isort: split
# The import line that changes:
from transformers import Trainer, TrainingArguments


@dataclass
class Reviews:
    weights: str
    rows: str
    """Start of the names of the three files of JSON."""
    longest: int = 32
    at_most: int = 10_000

    def read(self):
        return load_dataset("json", data_files={p: f"{self.rows}_{p}.json" for p in ("train", "validation", "test")})


def numbered(row, tokenizer, classes, longest):
    """Tokens and the number of the class. The sentence stays: the Trainer drops what the model does not accept."""
    return {**tokenizer(row["sentence"], truncation=True, max_length=longest), "label": classes.index(row["label"])}


def scores_of(evaluated):
    logits = evaluated.predictions[0] if isinstance(evaluated.predictions, tuple) else evaluated.predictions
    given, meant = logits.argmax(-1), evaluated.label_ids
    hits, claims = int(((given == 1) & (meant == 1)).sum()), int((given == 1).sum() + (meant == 1).sum())
    return {"accuracy": float(np.mean(given == meant)), "f1": 2 * hits / max(claims, 1)}


def model_for(classes, weights):
    config = transformers.AutoConfig.from_pretrained(weights, num_labels=len(classes))
    model = transformers.AutoModelForSequenceClassification.from_pretrained(weights, config=config)
    model.config.id2label = dict(enumerate(classes))
    model.config.label2id = {name: number for number, name in enumerate(classes)}
    return model


class Report:
    """What each stage found, on the console and in the files that tools read."""

    def __init__(self, trainer):
        self.trainer = trainer

    def add(self, stage, metrics, data):
        metrics |= {f"{stage}_samples": len(data)}
        self.trainer.log_metrics(stage, metrics)
        self.trainer.save_metrics(stage, metrics)

    def write_classes(self, logits, classes):
        if self.trainer.is_world_process_zero():
            lines = [f"{number}\t{classes[best]}" for number, best in enumerate(logits.argmax(-1))]
            path = Path(self.trainer.args.output_dir, "predict_results.txt")
            path.write_text("\n".join(["index\tprediction", *lines, ""]))


def run(reviews, options):
    transformers.set_seed(options.seed)
    rows = reviews.read()
    classes = sorted(set(rows["train"]["label"]))
    tokenizer = transformers.AutoTokenizer.from_pretrained(reviews.weights)
    with options.main_process_first(desc="tokenizing"):
        rows = rows.map(partial(numbered, tokenizer=tokenizer, classes=classes, longest=reviews.longest))
    learned = rows["train"].take(min(reviews.at_most, len(rows["train"])))
    trainer = Trainer(
        model_for(classes, reviews.weights),
        options,
        transformers.DataCollatorWithPadding(tokenizer, pad_to_multiple_of=8),
        learned,
        rows["validation"],
        processing_class=tokenizer,
        compute_metrics=scores_of,
    )
    report = Report(trainer)
    if options.do_train:
        found = get_last_checkpoint(options.output_dir) if os.path.isdir(options.output_dir) else None
        report.add("train", trainer.train(resume_from_checkpoint=found).metrics, learned)
        trainer.save_state()
        trainer.save_model()
    if options.do_eval:
        report.add("eval", trainer.evaluate(rows["validation"]), rows["validation"])
    if options.do_predict:
        unlabelled = rows["test"].remove_columns("label")
        report.write_classes(trainer.predict(unlabelled, metric_key_prefix="predict").predictions, classes)
    trainer.create_model_card(language="en", finetuned_from=reviews.weights, tasks="text-classification")


if __name__ == "__main__":
    run(*transformers.HfArgumentParser((Reviews, TrainingArguments)).parse_args_into_dataclasses())
