"""Trains a model to find answers in contexts, which may be longer than it can read at once."""

import json
import re
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from answering import AnsweringTrainer
from arguments import ModelArguments, PredictingDataArguments, described
from stages import count, finish, keep, read_arguments, start, train
from transformers import (
    AutoModelForQuestionAnswering,
    DataCollatorWithPadding,
    EvalPrediction,
    PreTrainedTokenizerFast,
    TrainingArguments,
    default_data_collator,
)


@dataclass
class DataTrainingArguments(PredictingDataArguments):
    max_seq_length: int = described("Tokens of a window over a context, with the question.", 384)
    pad_to_max_length: bool = described("Whether all windows are padded to the same length.", True)
    version_2_with_negative: bool = described("Whether some questions have no answer.", False)
    null_score_diff_threshold: float = described("How much better no answer has to be than the best.", 0.0)
    doc_stride: int = described("Tokens that two windows share.", 128)
    n_best_size: int = described("Places that are considered for each end of an answer.", 20)
    max_answer_length: int = described("Tokens of an answer at most.", 30)


class Windows:
    """Cuts contexts into windows, and finds in the windows what answers the questions."""

    def __init__(self, data_args, training_args, tokenizer):
        self.data_args, self.training_args, self.tokenizer = data_args, training_args, tokenizer
        self.length = min(data_args.max_seq_length, tokenizer.model_max_length)
        self.context = 1 if tokenizer.padding_side == "right" else 0

    def cut(self, rows):
        texts = [[question.lstrip() for question in rows["question"]], rows["context"]]
        tokens = self.tokenizer(
            *(texts if self.context == 1 else reversed(texts)),
            truncation="only_second" if self.context == 1 else "only_first",
            max_length=self.length,
            stride=self.data_args.doc_stride,
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
            padding="max_length" if self.data_args.pad_to_max_length else False,
        )
        return tokens, tokens.pop("overflow_to_sample_mapping")

    def places(self, tokens, window):
        """The characters of each token of the context; None for the others."""
        sides = tokens.sequence_ids(window)
        return [
            span if side == self.context else None
            for span, side in zip(tokens["offset_mapping"][window], sides, strict=True)
        ]

    def to_train(self, rows):
        tokens, owners = self.cut(rows)
        starts, ends = [], []
        for window, owner in enumerate(owners):
            answer, nothing = rows["answers"][owner], 0
            first = last = nothing
            if answer["answer_start"]:
                begin = answer["answer_start"][0]
                end = begin + len(answer["text"][0])
                places = [(token, span) for token, span in enumerate(self.places(tokens, window)) if span is not None]
                if places[0][1][0] <= begin and end <= places[-1][1][1]:
                    first = max(token for token, span in places if span[0] <= begin)
                    last = min(token for token, span in places if span[1] >= end)
            starts.append(first)
            ends.append(last)
        tokens.pop("offset_mapping")
        return {**tokens, "start_positions": starts, "end_positions": ends}

    def to_answer(self, rows):
        tokens, owners = self.cut(rows)
        places = [self.places(tokens, window) for window in range(len(owners))]
        return {**tokens, "offset_mapping": places, "example_id": [rows["id"][owner] for owner in owners]}

    def answers(self, contexts, windows, predictions, stage="eval"):
        starts, ends = predictions[:2]
        if len(starts) != len(windows):
            raise ValueError(f"{len(starts)} predictions for {len(windows)} windows")
        candidates, empty = defaultdict(list), {}
        for row, window in enumerate(windows):
            name, places = window["example_id"], window["offset_mapping"]
            nothing = float(starts[row][0] + ends[row][0])
            empty[name] = min(nothing, empty.get(name, nothing))
            best = [np.argsort(scores[row])[::-1][: self.data_args.n_best_size].tolist() for scores in (starts, ends)]
            for first in best[0]:
                for last in best[1]:
                    is_inside = max(first, last) < len(places) and places[first] and places[last]
                    if is_inside and 0 <= last - first < self.data_args.max_answer_length:
                        score = float(starts[row][first] + ends[row][last])
                        candidates[name].append((score, places[first][0], places[last][1]))
        return self.collected(contexts, candidates, empty, stage)

    def collected(self, contexts, candidates, empty, stage):
        texts, chances = {}, {}
        for row in contexts:
            found = sorted(candidates[row["id"]], reverse=True)[: self.data_args.n_best_size]
            score, begin, end = found[0] if found else (-np.inf, 0, 0)
            texts[row["id"]] = row["context"][begin:end]
            chances[row["id"]] = empty[row["id"]] - score
            if self.data_args.version_2_with_negative and chances[row["id"]] > self.data_args.null_score_diff_threshold:
                texts[row["id"]] = ""
        if self.training_args.should_save:
            directory = Path(self.training_args.output_dir)
            directory.mkdir(parents=True, exist_ok=True)
            (directory / f"{stage}_predictions.json").write_text(json.dumps(texts, indent=4) + "\n")
            if self.data_args.version_2_with_negative:
                (directory / f"{stage}_null_odds.json").write_text(json.dumps(chances, indent=4) + "\n")
        true = [{"id": row["id"], "answers": row["answers"]} for row in contexts]
        return EvalPrediction(
            predictions=[{"id": name, "prediction_text": text} for name, text in texts.items()], label_ids=true
        )


def words(text):
    return re.sub(r"\b(a|an|the)\b|[^\w\s]", " ", text.lower()).split()


def overlap(given, true):
    shared = sum((Counter(words(given)) & Counter(words(true))).values())
    total = len(words(given)) + len(words(true))
    return 2 * shared / total if total else 1.0


def judge(evaluated):
    exact, f1 = [], []
    for given, row in zip(evaluated.predictions, evaluated.label_ids, strict=True):
        true = row["answers"]["text"] or [""]
        exact.append(max(words(given["prediction_text"]) == words(text) for text in true))
        f1.append(max(overlap(given["prediction_text"], text) for text in true))
    return {"exact_match": 100 * float(np.mean(exact)), "f1": 100 * float(np.mean(f1))}


def main():
    model_args, data_args, training_args = read_arguments(ModelArguments, DataTrainingArguments, TrainingArguments)
    found = start(training_args)
    parts = data_args.read(model_args)
    config = model_args.config()
    tokenizer = model_args.tokenizer(use_fast=True)
    model = model_args.pretrained(AutoModelForQuestionAnswering, config)
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ValueError(f"{type(tokenizer).__name__} does not tell the characters of a token: use a fast tokenizer")
    windows = Windows(data_args, training_args, tokenizer)

    def rows_of(part, change):
        rows = data_args.first(parts, part)
        with training_args.main_process_first(desc=f"windows of {part}"):
            return rows, rows.map(change, remove_columns=rows.column_names, **data_args.preparing("windows"))

    train_rows = rows_of("train", windows.to_train)[1] if training_args.do_train else None
    contexts, eval_rows = rows_of("validation", windows.to_answer) if training_args.do_eval else (None, None)
    multiple = 8 if training_args.fp16 else None
    padding = DataCollatorWithPadding(tokenizer, pad_to_multiple_of=multiple)
    trainer = AnsweringTrainer(
        model=model,
        args=training_args,
        train_dataset=train_rows,
        eval_dataset=eval_rows,
        contexts=contexts,
        processing_class=tokenizer,
        data_collator=default_data_collator if data_args.pad_to_max_length else padding,
        answer=windows.answers,
        compute_metrics=judge,
    )
    if training_args.do_train:
        train(trainer, found, count(train_rows, data_args.max_train_samples))
    if training_args.do_eval:
        keep(trainer, "eval", trainer.evaluate(), count(eval_rows, data_args.max_eval_samples))
    if training_args.do_predict:
        contexts, rows = rows_of("test", windows.to_answer)
        keep(trainer, "predict", trainer.predict(rows, contexts).metrics, count(rows, data_args.max_predict_samples))
    finish(trainer, "question-answering", model_args, data_args)


def _mp_fn(index):
    main()


if __name__ == "__main__":
    main()
