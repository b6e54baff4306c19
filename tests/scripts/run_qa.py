"""Finds answers inside contexts longer than the model: a Trainer of its own judges whole contexts by their answers."""

import os
import time
from collections import defaultdict
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import transformers
from datasets import Dataset, load_dataset
from transformers.trainer_utils import EvalLoopOutput, PredictionOutput, get_last_checkpoint, speed_metrics

# isort: split
# The import line that changes:
from transformers import Trainer, TrainingArguments


@dataclass
class Questions:
    weights: str
    rows: str
    """Start of the names of the three files of JSON."""
    window: int = 24
    overlap: int = 4
    """Tokens that two windows over a context share."""
    candidates: int = 4


class Span(NamedTuple):
    """Characters of a context."""

    start: int
    end: int


class Windows:
    """Cuts contexts into windows of tokens, and puts answers together from what is found in them."""

    def __init__(self, chosen, tokenizer):
        self.chosen, self.tokenizer = chosen, tokenizer

    def cut(self, rows):
        """For each window: the number of its row, its inputs, and the span of each token of the context."""
        tokens = self.tokenizer(
            rows["question"],
            rows["context"],
            max_length=self.chosen.window,
            stride=self.chosen.overlap,
            truncation="only_second",
            padding="max_length",
            return_offsets_mapping=True,
            return_overflowing_tokens=True,
        )
        spans = tokens.pop("offset_mapping")
        owners = tokens.pop("overflow_to_sample_mapping")
        for window, owner in enumerate(owners):
            inputs = {name: values[window] for name, values in tokens.items()}
            places = {i: Span(*spans[window][i]) for i, part in enumerate(tokens.sequence_ids(window)) if part == 1}
            yield owner, inputs, places

    def to_train(self, rows):
        columns = defaultdict(list)
        for owner, inputs, places in self.cut(rows):
            answer = rows["answers"][owner]
            span = Span(answer["answer_start"][0], answer["answer_start"][0] + len(answer["text"][0]))
            begins = {place.start: token for token, place in places.items()}
            ends = {place.end: token for token, place in places.items()}
            # the first token, [CLS], stands for an answer that the window does not have in full
            is_inside = span.start in begins and span.end in ends
            inputs["start_positions"] = begins[span.start] if is_inside else 0
            inputs["end_positions"] = ends[span.end] if is_inside else 0
            for name, value in inputs.items():
                columns[name].append(value)
        return dict(columns)

    def to_answer(self, rows):
        columns = defaultdict(list)
        for owner, inputs, places in self.cut(rows):
            inputs["row"] = rows["id"][owner]
            inputs["places"] = [[token, *span] for token, span in places.items()]
            for name, value in inputs.items():
                columns[name].append(value)
        return dict(columns)

    def answers(self, windows, logits):
        """The best scored span of each row over all its windows."""
        found = defaultdict(list)
        for window, begin, end in zip(windows, *logits, strict=True):
            places = {token: Span(*span) for token, *span in window["places"]}
            likely = [np.argsort(scores)[-self.chosen.candidates :] for scores in (begin, end)]
            for first in set(likely[0]) & set(places):
                for last in set(likely[1]) & set(places):
                    if first <= last:
                        span = Span(places[first].start, places[last].end)
                        found[window["row"]].append((float(begin[first] + end[last]), span))
        return {row: max(spans)[1] for row, spans in found.items()}


@dataclass
class Judged:
    """A part of the data: its rows, and the windows over them."""

    rows: Dataset
    windows: Dataset

    def texts(self, answers):
        empty = Span(0, 0)
        return [row["context"][slice(*answers.get(row["id"], empty))] for row in self.rows]

    def score(self, answers):
        pairs = [
            (given.split(), row["answers"]["text"][0].split()) for given, row in zip(answers, self.rows, strict=True)
        ]
        shares = [len(set(given).intersection(right)) / max(1, len(given)) for given, right in pairs]
        exact = [given == right for given, right in pairs]
        return {"exact_match": 100 * float(np.mean(exact)), "f1": 100 * float(np.mean(shares))}


class AnsweringTrainer(Trainer):
    """Evaluates and predicts with scores that need the rows, where the Trainer has the windows only."""

    def __init__(self, *args, cutter=None, judged=None, **kwargs):
        super().__init__(*args, **kwargs)
        self.cutter, self.judged = cutter, judged

    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix="eval"):
        part = self.judged if eval_dataset is None else eval_dataset
        loader = self.get_eval_dataloader(part.windows)
        metrics = self.judge(part, loader, "Answers", ignore_keys, metric_key_prefix).metrics
        if self.args.should_log:
            self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def predict(self, test_dataset, ignore_keys=None, metric_key_prefix="test"):
        loader = self.get_test_dataloader(test_dataset.windows)
        return self.judge(test_dataset, loader, "Unseen questions", ignore_keys, metric_key_prefix)

    def judge(self, part, loader, description, ignore_keys, prefix):
        started = time.time()
        # True or False, and not None: the logits are what the answers are made of
        output: EvalLoopOutput = self.evaluation_loop(
            loader, description, prediction_loss_only=False, ignore_keys=ignore_keys, metric_key_prefix=prefix
        )
        num_batches = -(-output.num_samples // (self.args.eval_batch_size * self.args.world_size))
        metrics = {**output.metrics, **speed_metrics(prefix, started, len(part.windows), num_batches)}
        texts = part.texts(self.cutter.answers(part.windows, output.predictions))
        if self.args.should_save:
            metrics.update({f"{prefix}_{name}": value for name, value in part.score(texts).items()})
        return PredictionOutput(predictions=texts, label_ids=None, metrics=metrics)


def build(chosen, options):
    """The Trainer, and the part whose answers nobody has seen."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(chosen.weights)
    cutter = Windows(chosen, tokenizer)
    parts = ("train", "validation", "test")
    rows = load_dataset("json", data_files={part: f"{chosen.rows}_{part}.json" for part in parts})

    def windows(part, cut):
        return rows[part].map(cut, batched=True, remove_columns=rows[part].column_names)

    with options.main_process_first(desc="windows"):
        known = windows("train", cutter.to_train)
        seen, unseen = (Judged(rows[part], windows(part, cutter.to_answer)) for part in parts[1:])
    trainer = AnsweringTrainer(
        model=transformers.AutoModelForQuestionAnswering.from_pretrained(chosen.weights),
        args=options,
        data_collator=transformers.DataCollatorWithPadding(tokenizer),
        train_dataset=known,
        eval_dataset=seen.windows,
        processing_class=tokenizer,
        cutter=cutter,
        judged=seen,
    )
    return trainer, unseen


def run(chosen, options):
    transformers.set_seed(options.seed)
    trainer, unseen = build(chosen, options)
    stages = {
        "train": lambda: trainer.train(resume_from_checkpoint=newest(options)).metrics,
        "eval": trainer.evaluate,
        "predict": lambda: trainer.predict(unseen, metric_key_prefix="test").metrics,
    }
    for stage, start in stages.items():
        if getattr(options, f"do_{stage}"):
            metrics = start()
            trainer.log_metrics(stage, metrics)
            trainer.save_metrics(stage, metrics)
    trainer.save_state()
    trainer.save_model()
    trainer.create_model_card(tasks="question-answering", finetuned_from=chosen.weights)


def newest(options):
    return get_last_checkpoint(options.output_dir) if os.path.isdir(options.output_dir) else None


if __name__ == "__main__":
    run(*transformers.HfArgumentParser((Questions, TrainingArguments)).parse_args_into_dataclasses())
