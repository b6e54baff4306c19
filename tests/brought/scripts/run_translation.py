"""Trains an encoder-decoder that translates."""

import math
from dataclasses import dataclass

from arguments import FastTokenizerArguments, described
from stages import finish, read_arguments, start
from texts import GeneratingDataArguments, sequence_to_sequence, shared_words
from transformers import Seq2SeqTrainingArguments


@dataclass
class DataTrainingArguments(GeneratingDataArguments):
    source_lang: str | None = described("Language of the sources.")
    target_lang: str | None = described("Language of the targets.")

    def __post_init__(self):
        super().__post_init__()
        if self.source_lang is None or self.target_lang is None:
            raise ValueError("name both languages: --source_lang, --target_lang")


def precision_of_runs(pairs):
    """The geometric mean of the precisions of runs of one and two words, in percent, as BLEU has them."""
    logs = []
    for length in (1, 2):
        counts = [shared_words(given, true, length) for given, true in pairs]
        shared, total = (sum(column) for column in zip(*counts, strict=True))
        logs.append(math.log((shared + 1) / (total + 1)))
    return {"bleu": round(100 * math.exp(sum(logs) / len(logs)), 4)}


def main():
    model_args, data_args, training_args = read_arguments(
        FastTokenizerArguments, DataTrainingArguments, Seq2SeqTrainingArguments
    )
    found = start(training_args)
    parts = data_args.read(model_args)
    tokenizer = model_args.tokenizer()
    if hasattr(tokenizer, "lang_code_to_id"):
        tokenizer.src_lang, tokenizer.tgt_lang = data_args.source_lang, data_args.target_lang
    languages = [name.split("_")[0] for name in (data_args.source_lang, data_args.target_lang)]

    def separate(rows):
        return ([row[language] for row in rows["translation"]] for language in languages)

    trainer = sequence_to_sequence(
        model_args, data_args, training_args, found, parts, tokenizer, separate, precision_of_runs
    )
    finish(trainer, "translation", model_args, data_args, language=languages)


def _mp_fn(index):
    main()


if __name__ == "__main__":
    main()
