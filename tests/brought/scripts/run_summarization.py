"""Trains an encoder-decoder that shortens documents."""

from dataclasses import dataclass

import numpy as np
from arguments import FastTokenizerArguments, described
from stages import finish, logger, read_arguments, start
from texts import GeneratingDataArguments, sequence_to_sequence, shared_words
from transformers import MBartTokenizer, MBartTokenizerFast, Seq2SeqTrainingArguments


@dataclass
class ShorteningArguments(FastTokenizerArguments):
    resize_position_embeddings: bool | None = described("Whether positions are added for longer documents.")


@dataclass
class DataTrainingArguments(GeneratingDataArguments):
    lang: str | None = described("Language of a model of several.")
    text_column: str | None = described("Column of the documents.")
    summary_column: str | None = described("Column of their summaries.")


def recalled_words(pairs):
    """The overlap of words and of pairs of words with the true summaries, in percent."""
    scores = {}
    for length in (1, 2):
        rates = []
        for given, true in pairs:
            shared, total = shared_words(given, true, length)
            rates.append(2 * shared / max(1, total + shared_words(true, given, length)[1]))
        scores[f"rouge{length}"] = round(100 * float(np.mean(rates)), 4)
    return scores


def main():
    model_args, data_args, training_args = read_arguments(
        ShorteningArguments, DataTrainingArguments, Seq2SeqTrainingArguments
    )
    found = start(training_args)
    parts = data_args.read(model_args)
    tokenizer = model_args.tokenizer()
    if isinstance(tokenizer, (MBartTokenizer, MBartTokenizerFast)):
        if data_args.lang is None:
            raise ValueError(f"{type(tokenizer).__name__} is a tokenizer of several languages: name one with --lang")
        tokenizer.src_lang = tokenizer.tgt_lang = data_args.lang
    names = next(iter(parts.values())).column_names
    document = data_args.text_column or names[0]
    summary = data_args.summary_column or names[1]

    def separate(rows):
        return zip(*[pair for pair in zip(rows[document], rows[summary], strict=True) if all(pair)], strict=True)

    def enlarge(model):
        longest = getattr(model.config, "max_position_embeddings", None)
        if longest is not None and longest < data_args.max_source_length:
            if not model_args.resize_position_embeddings:
                raise ValueError(
                    f"{longest} positions are fewer than --max_source_length {data_args.max_source_length}"
                )
            model.resize_position_embeddings(data_args.max_source_length)

    if training_args.label_smoothing_factor > 0:
        logger.info("the loss is smoothed over all labels")
    trainer = sequence_to_sequence(
        model_args,
        data_args,
        training_args,
        found,
        parts,
        tokenizer,
        separate,
        recalled_words,
        adapt=[enlarge],
    )
    language = {} if data_args.lang is None else {"language": data_args.lang}
    finish(trainer, "summarization", model_args, data_args, **language)


def _mp_fn(index):
    main()


if __name__ == "__main__":
    main()
