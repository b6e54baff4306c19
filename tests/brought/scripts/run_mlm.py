"""Trains a masked language model on texts, from pretrained or random weights."""

import math
from dataclasses import dataclass

from arguments import CorpusArguments, LanguageModelArguments, described
from corpus import most_likely, packed, row_length, share_of_hits, tokenized, with_rows_for_tokens
from stages import count, finish, keep, read_arguments, start, train
from transformers import AutoModelForMaskedLM, DataCollatorForLanguageModeling, Trainer, TrainingArguments


@dataclass
class DataTrainingArguments(CorpusArguments):
    streaming: bool = described("Whether to read the rows while training.", False)
    max_seq_length: int | None = described("Tokens of a row.")
    mlm_probability: float = described("Share of the tokens that are masked.", 0.15)
    line_by_line: bool = described("Whether each line is a row.", False)
    pad_to_max_length: bool = described("Whether lines are padded to the same length.", False)


def accuracy_of_masked(evaluated):
    return share_of_hits(evaluated.predictions, evaluated.label_ids)


def main():
    model_args, data_args, training_args = read_arguments(
        LanguageModelArguments, DataTrainingArguments, TrainingArguments
    )
    found = start(training_args)
    parts = data_args.read(model_args, data_args.streaming, data_args.validation_split_percentage)
    tokenizer = model_args.tokenizer()
    model = with_rows_for_tokens(model_args.model(AutoModelForMaskedLM, model_args.config()), tokenizer)
    length = row_length(data_args.max_seq_length, tokenizer)
    special = {"return_special_tokens_mask": True}
    if data_args.line_by_line:
        padding = "max_length" if data_args.pad_to_max_length else False
        cut = {"truncation": True, "max_length": length, "padding": padding}
        rows = tokenized(parts, tokenizer, data_args, training_args, **special, **cut)
    else:
        rows = packed(
            tokenized(parts, tokenizer, data_args, training_args, **special), length, data_args, training_args
        )
    train_rows = data_args.first(rows, "train") if training_args.do_train else None
    eval_rows = data_args.first(rows, "validation") if training_args.do_eval else None
    is_padded = not data_args.line_by_line or data_args.pad_to_max_length
    multiple = 8 if training_args.fp16 and not is_padded else None
    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=train_rows,
        eval_dataset=eval_rows,
        processing_class=tokenizer,
        data_collator=DataCollatorForLanguageModeling(
            tokenizer, mlm_probability=data_args.mlm_probability, pad_to_multiple_of=multiple
        ),
        compute_metrics=accuracy_of_masked if training_args.do_eval else None,
        preprocess_logits_for_metrics=most_likely if training_args.do_eval else None,
    )
    if training_args.do_train:
        train(trainer, found, count(train_rows, data_args.max_train_samples))
    if training_args.do_eval:
        metrics = trainer.evaluate()
        metrics["perplexity"] = math.exp(min(metrics["eval_loss"], 700))
        keep(trainer, "eval", metrics, count(eval_rows, data_args.max_eval_samples))
    finish(trainer, "fill-mask", model_args, data_args)


def _mp_fn(index):
    main()


if __name__ == "__main__":
    main()
