"""Trains a classifier of sentences or pairs of sentences, for a task of GLUE or for files of one's own."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from arguments import HeadArguments, PredictingDataArguments, described
from stages import count, finish, keep, logger, read_arguments, start, train
from transformers import (
    AutoModelForSequenceClassification,
    DataCollatorWithPadding,
    EvalPrediction,
    PretrainedConfig,
    Trainer,
    TrainingArguments,
    default_data_collator,
)

TASKS = {
    "cola": ("sentence", None),
    "mnli": ("premise", "hypothesis"),
    "mrpc": ("sentence1", "sentence2"),
    "qnli": ("question", "sentence"),
    "qqp": ("question1", "question2"),
    "rte": ("sentence1", "sentence2"),
    "sst2": ("sentence", None),
    "stsb": ("sentence1", "sentence2"),
    "wnli": ("sentence1", "sentence2"),
}


@dataclass
class DataTrainingArguments(PredictingDataArguments):
    task_name: str | None = described(f"One of {', '.join(TASKS)}.")
    max_seq_length: int = described("Tokens of a row at most.", 128)
    pad_to_max_length: bool = described("Whether all rows are padded to the same length.", True)

    def __post_init__(self):
        if self.task_name is not None and self.task_name.lower() not in TASKS:
            raise ValueError(f"--task_name is one of {', '.join(TASKS)}, not {self.task_name!r}")
        if self.task_name is not None and self.dataset_name is None:
            self.dataset_name, self.dataset_config_name = "nyu-mll/glue", self.task_name.lower()


class Labels:
    """What is predicted: one of the labels of the training rows, or a number."""

    def __init__(self, rows):
        self.is_regression = rows.features["label"].dtype.startswith("float")
        named = getattr(rows.features["label"], "names", None)
        self.names = [] if self.is_regression else named or sorted(set(rows["label"]))
        self.count = 1 if self.is_regression else len(self.names)
        self.numbers = {name: number for number, name in enumerate(self.names)}

    def agree(self, config):
        """Keep the order of a model that was trained on the same labels."""
        known = config.label2id
        if known != PretrainedConfig(num_labels=self.count).label2id and set(known) == set(self.numbers):
            self.numbers = {name: int(known[name]) for name in self.names}
        if not self.is_regression:
            config.label2id = dict(self.numbers)
            config.id2label = {number: name for name, number in self.numbers.items()}

    def number(self, label):
        return label if self.is_regression or isinstance(label, int) else self.numbers[label]

    def found(self, predictions):
        scores = predictions[0] if isinstance(predictions, tuple) else predictions
        return np.squeeze(scores) if self.is_regression else np.argmax(scores, axis=1)

    def judge(self, evaluated: EvalPrediction):
        found = self.found(evaluated.predictions)
        if self.is_regression:
            return {"mse": float(((found - evaluated.label_ids) ** 2).mean())}
        hits = found == evaluated.label_ids
        recalls = [hits[evaluated.label_ids == number].mean() for number in np.unique(evaluated.label_ids)]
        return {"accuracy": float(hits.mean()), "recall": float(np.mean(recalls))}


def main():
    model_args, data_args, training_args = read_arguments(HeadArguments, DataTrainingArguments, TrainingArguments)
    found = start(training_args)
    parts = data_args.read(model_args)
    labels = Labels(parts["train"])
    config = model_args.config(num_labels=labels.count, finetuning_task=data_args.task_name)
    tokenizer = model_args.tokenizer()
    model = model_args.pretrained(
        AutoModelForSequenceClassification, config, ignore_mismatched_sizes=model_args.ignore_mismatched_sizes
    )
    labels.agree(model.config)
    if data_args.task_name is not None:
        first, second = TASKS[data_args.task_name.lower()]
    else:
        names = [name for name in parts["train"].column_names if name not in ("label", "idx", "id")]
        first, second = (*names, None)[:2]
    length = min(data_args.max_seq_length, tokenizer.model_max_length)
    padding = "max_length" if data_args.pad_to_max_length else False

    def encode(rows):
        texts = (rows[first],) if second is None else (rows[first], rows[second])
        tokens = tokenizer(*texts, padding=padding, max_length=length, truncation=True)
        if "label" in rows:
            tokens["label"] = [labels.number(label) for label in rows["label"]]
        return tokens

    with training_args.main_process_first(desc="tokenizing"):
        parts = parts.map(encode, **data_args.preparing("tokens"))
    train_rows = data_args.first(parts, "train") if training_args.do_train else None
    suffix = "_matched" if data_args.task_name == "mnli" else ""
    eval_rows = data_args.first(parts, f"validation{suffix}") if training_args.do_eval else None
    if data_args.pad_to_max_length:
        collator = default_data_collator
    else:
        collator = DataCollatorWithPadding(tokenizer, pad_to_multiple_of=8) if training_args.fp16 else None
    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=train_rows,
        eval_dataset=eval_rows,
        compute_metrics=labels.judge,
        processing_class=tokenizer,
        data_collator=collator,
    )
    if training_args.do_train:
        train(trainer, found, count(train_rows, data_args.max_train_samples))
    if training_args.do_eval:
        evaluated = {data_args.task_name: eval_rows}
        if data_args.task_name == "mnli":
            evaluated["mnli-mm"] = data_args.first(parts, "validation_mismatched")
        together = {}
        for task, rows in evaluated.items():
            metrics = trainer.evaluate(eval_dataset=rows)
            if task == "mnli-mm":
                metrics = {f"{name}_mm": value for name, value in metrics.items()}
            together.update(metrics)
            keep(trainer, "eval", together if task == "mnli-mm" else metrics, len(rows))
    if training_args.do_predict:
        rows = data_args.first(parts, f"test{suffix}").remove_columns("label")
        answers = labels.found(trainer.predict(rows, metric_key_prefix="predict").predictions)
        if trainer.is_world_process_zero():
            names = {number: name for name, number in labels.numbers.items()}
            lines = [
                f"{row}\t{answer:3.3f}" if labels.is_regression else f"{row}\t{names[answer]}"
                for row, answer in enumerate(answers)
            ]
            path = Path(training_args.output_dir, f"predict_results_{data_args.task_name}.txt")
            path.write_text("index\tprediction\n" + "\n".join(lines) + "\n")
            logger.info(f"predictions are in {path}")
    named = (
        {}
        if data_args.task_name is None
        else {"language": "en", "dataset_tags": "glue", "dataset": f"GLUE {data_args.task_name}"}
    )
    finish(trainer, "text-classification", model_args, data_args, **named)


def _mp_fn(index):
    main()


if __name__ == "__main__":
    main()
