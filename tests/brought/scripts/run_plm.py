"""Trains XLNet on texts: spans of tokens are predicted in an order that is drawn for each row."""

import math
from dataclasses import dataclass

from arguments import CorpusArguments, LanguageModelArguments, described
from corpus import packed, row_length, tokenized, with_rows_for_tokens
from stages import count, finish, keep, read_arguments, start, train
from transformers import (
    DataCollatorForPermutationLanguageModeling,
    Trainer,
    TrainingArguments,
    XLNetConfig,
    XLNetLMHeadModel,
)


@dataclass
class XLNetArguments(LanguageModelArguments):
    def config(self, **more):
        if self.config_name or self.model_name_or_path:
            return super().config(**more)
        config = XLNetConfig()
        if self.config_overrides is not None:
            config.update_from_string(self.config_overrides)
        return config

    def xlnet(self, config):
        if self.model_name_or_path:
            return self.pretrained(XLNetLMHeadModel, config)
        return XLNetLMHeadModel(config)


@dataclass
class DataTrainingArguments(CorpusArguments):
    max_seq_length: int = described("Tokens of a row, an even number.", 512)
    plm_probability: float = described("Length of a span over that of its surroundings.", 1 / 6)
    max_span_length: int = described("At most so many tokens are predicted in a row.", 5)
    line_by_line: bool = described("Whether each line is a row.", False)
    pad_to_max_length: bool = described("Whether lines are padded to the same length.", False)


def main():
    model_args, data_args, training_args = read_arguments(XLNetArguments, DataTrainingArguments, TrainingArguments)
    found = start(training_args)
    parts = data_args.read(model_args, validation_percentage=data_args.validation_split_percentage)
    tokenizer = model_args.tokenizer()
    model = with_rows_for_tokens(model_args.xlnet(model_args.config()), tokenizer)
    length = row_length(data_args.max_seq_length, tokenizer)
    if data_args.line_by_line:
        padding = "max_length" if data_args.pad_to_max_length else False
        cut = {"truncation": True, "max_length": length, "padding": padding}
        rows = tokenized(parts, tokenizer, data_args, training_args, **cut)
    else:
        rows = packed(tokenized(parts, tokenizer, data_args, training_args), length, data_args, training_args)
    train_rows = data_args.first(rows, "train") if training_args.do_train else None
    eval_rows = data_args.first(rows, "validation") if training_args.do_eval else None
    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=train_rows,
        eval_dataset=eval_rows,
        processing_class=tokenizer,
        data_collator=DataCollatorForPermutationLanguageModeling(
            tokenizer, plm_probability=data_args.plm_probability, max_span_length=data_args.max_span_length
        ),
    )
    if training_args.do_train:
        train(trainer, found, count(train_rows, data_args.max_train_samples))
    if training_args.do_eval:
        metrics = trainer.evaluate()
        metrics["perplexity"] = math.exp(min(metrics["eval_loss"], 700))
        keep(trainer, "eval", metrics, count(eval_rows, data_args.max_eval_samples))
    finish(trainer, "language-modeling", model_args, data_args)


def _mp_fn(index):
    main()


if __name__ == "__main__":
    main()
