"""Trains a causal language model on texts, from pretrained or random weights."""

from arguments import BlockArguments, LanguageModelArguments
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
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments, default_data_collator


def with_labels(columns):
    return {**columns, "labels": [list(row) for row in columns["input_ids"]]}


def main():
    model_args, data_args, training_args = read_arguments(LanguageModelArguments, BlockArguments, TrainingArguments)
    found = start(training_args)
    parts = data_args.texts(model_args)
    tokenizer = model_args.tokenizer()
    model = with_rows_for_tokens(model_args.model(AutoModelForCausalLM, model_args.config()), tokenizer)
    length = row_length(data_args.block_size, tokenizer)
    rows = packed(tokenized(parts, tokenizer, data_args, training_args), length, data_args, training_args, with_labels)
    train_rows, eval_rows = wanted(rows, data_args, training_args)
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
    train_and_evaluate(trainer, found, data_args)
    finish(trainer, "text-generation", model_args, data_args)


def _mp_fn(index):
    """For launchers that call this in every process."""
    main()


if __name__ == "__main__":
    main()
