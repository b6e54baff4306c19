"""Trains a tagger: one label for each word, at its first token or at all of them."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from arguments import ModelArguments, PredictingDataArguments, described
from datasets import ClassLabel
from stages import count, finish, keep, read_arguments, start, train
from transformers import (
    AutoModelForTokenClassification,
    DataCollatorForTokenClassification,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)


@dataclass
class TaggerArguments(ModelArguments):
    ignore_mismatched_sizes: bool = described("Whether a head of other sizes is replaced.", False)


@dataclass
class DataTrainingArguments(PredictingDataArguments):
    task_name: str | None = described("Name of the task: ner, pos or chunk.", "ner")
    text_column_name: str | None = described("Column of the words.")
    label_column_name: str | None = described("Column of their labels.")
    max_seq_length: int | None = described("Tokens of a row at most.")
    pad_to_max_length: bool = described("Whether all rows are padded to the same length.", False)
    label_all_tokens: bool = described("Whether all tokens of a word carry its label.", False)
    return_entity_level_metrics: bool = described("Whether each kind of entity is judged too.", False)

    def __post_init__(self):
        self.task_name = self.task_name.lower()


def column(wanted, names, usual, place):
    return wanted or (usual if usual in names else names[place])


class Tags:
    def __init__(self, rows, name):
        feature = rows.features[name]
        inner = getattr(feature, "feature", None)
        if isinstance(inner, ClassLabel):
            self.names, self.numbers = inner.names, {number: number for number in range(len(inner.names))}
        else:
            self.names = sorted({tag for row in rows[name] for tag in row})
            self.numbers = {tag: number for number, tag in enumerate(self.names)}
        # inside an entity, all tokens after the first are inside too
        self.inside = [
            self.names.index(f"I-{name[2:]}") if name.startswith("B-") and f"I-{name[2:]}" in self.names else number
            for number, name in enumerate(self.names)
        ]

    def agree(self, config):
        is_named = config.label2id != PretrainedConfig(num_labels=len(self.names)).label2id
        if is_named and sorted(config.label2id) == sorted(self.names):
            self.names = [config.id2label[number] for number in range(len(self.names))]
            self.numbers = dict(config.label2id)
        config.label2id = {name: number for number, name in enumerate(self.names)}
        config.id2label = dict(enumerate(self.names))


class Judge:
    """Precision and recall of entities: spans of words with the same kind."""

    def __init__(self, tags, is_detailed):
        self.tags, self.is_detailed = tags, is_detailed

    def spans(self, labels):
        found, begin = set(), None
        for place, name in enumerate([*labels, "O"]):
            if begin is not None and not name.startswith("I-"):
                found.add((labels[begin][2:], begin, place))
                begin = None
            if name.startswith("B-") or (name.startswith("I-") and begin is None):
                begin = place
        return found

    def named(self, rows, labels):
        return [
            [self.tags.names[tag] for tag, label in zip(row, true, strict=True) if label != -100]
            for row, true in zip(rows, labels, strict=True)
        ]

    def __call__(self, evaluated):
        scores, labels = evaluated
        found = self.named(np.argmax(scores, axis=2), labels)
        known = self.named(labels, labels)
        ours = {(row, *span) for row, names in enumerate(found) for span in self.spans(names)}
        theirs = {(row, *span) for row, names in enumerate(known) for span in self.spans(names)}
        pairs = [pair for one, other in zip(found, known, strict=True) for pair in zip(one, other, strict=True)]
        overall = {**self.rates(ours, theirs), "accuracy": float(np.mean([one == other for one, other in pairs]))}
        results = {f"overall_{name}": value for name, value in overall.items()} if self.is_detailed else overall
        if self.is_detailed:
            for kind in sorted({span[1] for span in theirs}):
                mine, right = ({span for span in spans if span[1] == kind} for spans in (ours, theirs))
                results.update({f"{kind}_{name}": value for name, value in self.rates(mine, right).items()})
        return results

    def rates(self, ours, theirs):
        hits = len(ours & theirs)
        return {
            "precision": hits / max(1, len(ours)),
            "recall": hits / max(1, len(theirs)),
            "f1": 2 * hits / max(1, len(ours) + len(theirs)),
        }


def main():
    model_args, data_args, training_args = read_arguments(TaggerArguments, DataTrainingArguments, TrainingArguments)
    found = start(training_args)
    parts = data_args.read(model_args)
    known = next(iter(parts.values()))
    words = column(data_args.text_column_name, known.column_names, "tokens", 0)
    labels = column(data_args.label_column_name, known.column_names, f"{data_args.task_name}_tags", 1)
    tags = Tags(known, labels)
    config = model_args.config(num_labels=len(tags.names), finetuning_task=data_args.task_name)
    prefix = {"add_prefix_space": True} if config.model_type in ("bloom", "gpt2", "roberta", "deberta") else {}
    tokenizer = model_args.tokenizer(use_fast=True, **prefix)
    model = model_args.pretrained(
        AutoModelForTokenClassification, config, ignore_mismatched_sizes=model_args.ignore_mismatched_sizes
    )
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ValueError(f"{type(tokenizer).__name__} does not tell the word of a token: use a fast tokenizer")
    tags.agree(model.config)

    def encode(rows):
        padding = "max_length" if data_args.pad_to_max_length else False
        tokens = tokenizer(
            rows[words],
            padding=padding,
            truncation=True,
            max_length=data_args.max_seq_length,
            is_split_into_words=True,
        )
        tokens["labels"] = [align(row, tokens.word_ids(number)) for number, row in enumerate(rows[labels])]
        return tokens

    def align(row, places):
        aligned = []
        for before, word in zip([None, *places], places, strict=False):
            if word is None:
                aligned.append(-100)
            elif word != before:
                aligned.append(tags.numbers[row[word]])
            else:
                aligned.append(tags.inside[tags.numbers[row[word]]] if data_args.label_all_tokens else -100)
        return aligned

    def rows_of(part):
        with training_args.main_process_first(desc=f"tokenizing {part}"):
            return data_args.first(parts, part).map(encode, **data_args.preparing("tokens"))

    train_rows = rows_of("train") if training_args.do_train else None
    eval_rows = rows_of("validation") if training_args.do_eval else None
    predict_rows = rows_of("test") if training_args.do_predict else None
    multiple = 8 if training_args.fp16 else None
    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=train_rows,
        eval_dataset=eval_rows,
        processing_class=tokenizer,
        data_collator=DataCollatorForTokenClassification(tokenizer, pad_to_multiple_of=multiple),
        compute_metrics=Judge(tags, data_args.return_entity_level_metrics),
    )
    if training_args.do_train:
        train(trainer, found, count(train_rows, data_args.max_train_samples))
    if training_args.do_eval:
        keep(trainer, "eval", trainer.evaluate(), count(eval_rows, data_args.max_eval_samples))
    if training_args.do_predict:
        scores, true, metrics = trainer.predict(predict_rows, metric_key_prefix="predict")
        keep(trainer, "predict", metrics)
        if trainer.is_world_process_zero():
            named = trainer.compute_metrics.named(np.argmax(scores, axis=2), true)
            lines = [" ".join(row) + "\n" for row in named]
            Path(training_args.output_dir, "predictions.txt").write_text("".join(lines))
    finish(trainer, "token-classification", model_args, data_args)


def _mp_fn(index):
    main()


if __name__ == "__main__":
    main()
