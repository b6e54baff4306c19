"""Trains a causal language model on texts, from pretrained or random weights."""

import math
from dataclasses import dataclass

from arguments import CorpusArguments, LanguageModelArguments, described
from corpus import most_likely, packed, row_length, share_of_hits, tokenized, with_rows_for_tokens
from stages import count, finish, keep, read_arguments, start, train
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments, default_data_collator


@dataclass
class DataTrainingArguments(CorpusArguments):
    streaming: bool = described("Whether to read the rows while training.", False)
    block_size: int | None = described("Tokens of a row.")
    keep_linebreaks: bool = described("Whether the lines of a text file keep their ends.", True)


def with_labels(columns):
    return {**columns, "labels": [list(row) for row in columns["input_ids"]]}


def accuracy_of_next_token(evaluated):
    found, labels = evaluated
    return share_of_hits(found[:, :-1], labels[:, 1:])


def main():
    model_args, data_args, training_args = read_arguments(
        LanguageModelArguments, DataTrainingArguments, TrainingArguments
    )
    found = start(training_args)
    is_text = (data_args.train_file or data_args.validation_file or "").endswith(".txt")
    parts = data_args.read(
        model_args,
        data_args.streaming,
        data_args.validation_split_percentage,
        **({"keep_linebreaks": data_args.keep_linebreaks} if is_text else {}),
    )
    tokenizer = model_args.tokenizer()
    model = with_rows_for_tokens(model_args.model(AutoModelForCausalLM, model_args.config()), tokenizer)
    length = row_length(data_args.block_size, tokenizer)
    rows = packed(tokenized(parts, tokenizer, data_args, training_args), length, data_args, training_args, with_labels)
    train_rows = data_args.first(rows, "train") if training_args.do_train else None
    eval_rows = data_args.first(rows, "validation") if training_args.do_eval else None
    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=train_rows,
        eval_dataset=eval_rows,
        processing_class=tokenizer,
        data_collator=default_data_collator,
        compute_metrics=accuracy_of_next_token if training_args.do_eval else None,
        preprocess_logits_for_metrics=most_likely if training_args.do_eval else None,
    )
    if training_args.do_train:
        train(trainer, found, count(train_rows, data_args.max_train_samples))
    if training_args.do_eval:
        metrics = trainer.evaluate()
        try:
            metrics["perplexity"] = math.exp(metrics["eval_loss"])
        except OverflowError:
            metrics["perplexity"] = math.inf
        keep(trainer, "eval", metrics, count(eval_rows, data_args.max_eval_samples))
    finish(trainer, "text-generation", model_args, data_args)


def _mp_fn(index):
    """For launchers that call this in every process."""
    main()


if __name__ == "__main__":
    main()
