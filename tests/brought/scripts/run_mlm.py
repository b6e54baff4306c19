"""Trains a masked language model on texts, from pretrained or random weights."""

from dataclasses import dataclass

from arguments import LanguageModelArguments, LineArguments, described
from corpus import (
    lines_or_packed,
    most_likely,
    row_length,
    share_of_hits,
    train_and_evaluate,
    with_rows_for_tokens,
)
from stages import finish, read_arguments, start, wanted
from transformers import AutoModelForMaskedLM, DataCollatorForLanguageModeling, Trainer, TrainingArguments


@dataclass
class DataTrainingArguments(LineArguments):
    streaming: bool = described("Whether to read the rows while training.", False)
    max_seq_length: int | None = described("Tokens of a row.")
    mlm_probability: float = described("Share of the tokens that are masked.", 0.15)


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
    rows = lines_or_packed(parts, tokenizer, length, data_args, training_args, return_special_tokens_mask=True)
    train_rows, eval_rows = wanted(rows, data_args, training_args)
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
    train_and_evaluate(trainer, found, data_args)
    finish(trainer, "fill-mask", model_args, data_args)


def _mp_fn(index):
    main()


if __name__ == "__main__":
    main()
