"""Trains XLNet on texts: spans of tokens are predicted in an order that is drawn for each row."""

from dataclasses import dataclass

from arguments import LanguageModelArguments, LineArguments, described
from corpus import lines_or_packed, row_length, train_and_evaluate, with_rows_for_tokens
from stages import finish, read_arguments, start, wanted
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
class DataTrainingArguments(LineArguments):
    max_seq_length: int = described("Tokens of a row, an even number.", 512)
    plm_probability: float = described("Length of a span over that of its surroundings.", 1 / 6)
    max_span_length: int = described("At most so many tokens are predicted in a row.", 5)


def main():
    model_args, data_args, training_args = read_arguments(XLNetArguments, DataTrainingArguments, TrainingArguments)
    found = start(training_args)
    parts = data_args.read(model_args, validation_percentage=data_args.validation_split_percentage)
    tokenizer = model_args.tokenizer()
    model = with_rows_for_tokens(model_args.xlnet(model_args.config()), tokenizer)
    length = row_length(data_args.max_seq_length, tokenizer)
    rows = lines_or_packed(parts, tokenizer, length, data_args, training_args)
    train_rows, eval_rows = wanted(rows, data_args, training_args)
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
    train_and_evaluate(trainer, found, data_args)
    finish(trainer, "language-modeling", model_args, data_args)


def _mp_fn(index):
    main()


if __name__ == "__main__":
    main()
