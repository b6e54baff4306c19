"""Trains a causal language model to fill in the middle: parts of the rows are reordered as prefix, suffix, middle."""

from dataclasses import dataclass

import numpy as np
from arguments import BlockArguments, LanguageModelArguments, described
from corpus import (
    accuracy_of_next_token,
    most_likely,
    packed,
    row_length,
    tokenized,
    train_and_evaluate,
    with_rows_for_tokens,
)
from stages import finish, read_arguments, start, wanted
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments, default_data_collator, is_torch_xla_available


@dataclass
class FillingModelArguments(LanguageModelArguments):
    pad_to_multiple_of: bool = described("Whether the embedding is enlarged to a multiple of eight rows.", False)
    attn_implementation: str | None = described("Which attention is computed.", "sdpa")


@dataclass
class DataTrainingArguments(BlockArguments):
    fim_rate: float | None = described("Share of the rows that are reordered.", 0.5)
    fim_spm_rate: float | None = described("Share of those whose suffix comes first.", 0.5)
    truncate_or_pad: bool | None = described("Whether reordered rows keep the length of the others.", True)
    fim_prefix_token: str | None = described("Mark before the prefix.", "<fim_prefix>")
    fim_middle_token: str | None = described("Mark before the middle.", "<fim_middle>")
    fim_suffix_token: str | None = described("Mark before the suffix.", "<fim_suffix>")
    pad_token: str | None = described("What fills rows that have become shorter.", "<fim_pad>")


class Reordering:
    """Cuts rows at two random places, and puts the middle last."""

    def __init__(self, data_args, tokenizer, seed):
        self.data_args, self.draw = data_args, np.random.RandomState(seed)
        names = (data_args.fim_prefix_token, data_args.fim_middle_token, data_args.fim_suffix_token)
        self.prefix, self.middle, self.suffix = tokenizer.convert_tokens_to_ids(names)
        self.pad = tokenizer.convert_tokens_to_ids(data_args.pad_token)

    def __call__(self, columns):
        rows = [self.reorder(row) for row in columns["input_ids"]]
        return {
            "input_ids": rows,
            "attention_mask": [[int(token != self.pad) for token in row] for row in rows],
            "labels": [[-100 if token == self.pad else token for token in row] for row in rows],
        }

    def reorder(self, row):
        if self.draw.binomial(1, self.data_args.fim_rate) == 0:
            return row
        first, last = sorted(self.draw.randint(0, len(row) + 1, size=2))
        before, between, after = row[:first], row[first:last], row[last:]
        if self.data_args.truncate_or_pad:
            after = after[: max(0, len(row) - 3 - len(before) - len(between))]
        if self.draw.binomial(1, self.data_args.fim_spm_rate):
            marked = [self.prefix, self.suffix, *after, self.middle, *before, *between]
        else:
            marked = [self.prefix, *before, self.suffix, *after, self.middle, *between]
        if self.data_args.truncate_or_pad:
            marked = (marked + [self.pad] * len(row))[: len(row)]
        return marked


def main():
    model_args, data_args, training_args = read_arguments(
        FillingModelArguments, DataTrainingArguments, TrainingArguments
    )
    found = start(training_args)
    parts = data_args.texts(model_args)
    tokenizer = model_args.tokenizer()
    marks = [data_args.fim_prefix_token, data_args.fim_middle_token, data_args.fim_suffix_token]
    if data_args.truncate_or_pad:
        marks.append(data_args.pad_token)
    tokenizer.add_special_tokens({"additional_special_tokens": marks})
    config = model_args.config()
    model = model_args.model(AutoModelForCausalLM, config, attn_implementation=model_args.attn_implementation)
    model = with_rows_for_tokens(model, tokenizer, 8 if model_args.pad_to_multiple_of else None)
    length = row_length(data_args.block_size, tokenizer)
    reordering = Reordering(data_args, tokenizer, training_args.seed)
    rows = packed(tokenized(parts, tokenizer, data_args, training_args), length, data_args, training_args, reordering)
    train_rows, eval_rows = wanted(rows, data_args, training_args)
    is_measured = training_args.do_eval and not is_torch_xla_available()
    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=train_rows,
        eval_dataset=eval_rows,
        processing_class=tokenizer,
        data_collator=default_data_collator,
        compute_metrics=accuracy_of_next_token if is_measured else None,
        preprocess_logits_for_metrics=most_likely if is_measured else None,
    )
    train_and_evaluate(trainer, found, data_args)
    finish(trainer, "text-generation", model_args, data_args)


def _mp_fn(index):
    main()


if __name__ == "__main__":
    main()
