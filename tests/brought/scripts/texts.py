"""What summarization and translation share: arguments, and a judge of generated texts."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from arguments import PredictingDataArguments, described
from corpus import with_rows_for_tokens
from stages import count, keep, train
from transformers import AutoModelForSeq2SeqLM, DataCollatorForSeq2Seq, Seq2SeqTrainer


@dataclass
class GeneratingDataArguments(PredictingDataArguments):
    max_source_length: int | None = described("Tokens of a source at most.", 1024)
    max_target_length: int | None = described("Tokens of a target at most.", 128)
    val_max_target_length: int | None = described("Tokens that evaluation and prediction generate at most.")
    pad_to_max_length: bool = described("Whether all rows are padded to the same length.", False)
    num_beams: int | None = described("Beams of evaluation and prediction.", 1)
    ignore_pad_token_for_loss: bool = described("Whether the loss leaves padding out.", True)
    source_prefix: str | None = described("What comes before each source.", "")
    forced_bos_token: str | None = described("The first token of each generated text.")

    def __post_init__(self):
        if self.val_max_target_length is None:
            self.val_max_target_length = self.max_target_length


class Pairs:
    """Sources and targets as tokens."""

    def __init__(self, data_args, training_args, tokenizer, separate):
        self.data_args, self.training_args, self.tokenizer = data_args, training_args, tokenizer
        self.separate = separate

    def prepare(self, parts, part):
        most = self.data_args.max_target_length if part == "train" else self.data_args.val_max_target_length
        rows = self.data_args.first(parts, part)
        with self.training_args.main_process_first(desc=f"tokenizing {part}"):
            return rows.map(
                self.encode,
                fn_kwargs={"longest_target": most},
                remove_columns=rows.column_names,
                **self.data_args.preparing("tokens"),
            )

    def encode(self, rows, longest_target):
        sources, targets = self.separate(rows)
        padding = "max_length" if self.data_args.pad_to_max_length else False
        prefix = self.data_args.source_prefix or ""
        source = [prefix + text for text in sources]
        tokens = self.tokenizer(source, max_length=self.data_args.max_source_length, padding=padding, truncation=True)
        labels = self.tokenizer(text_target=targets, max_length=longest_target, padding=padding, truncation=True)
        pad = self.tokenizer.pad_token_id
        if padding == "max_length" and self.data_args.ignore_pad_token_for_loss:
            labels["input_ids"] = [[-100 if token == pad else token for token in row] for row in labels["input_ids"]]
        tokens["labels"] = labels["input_ids"]
        return tokens


class Judge:
    """Compares generated texts with the targets."""

    def __init__(self, tokenizer, scores):
        self.tokenizer, self.scores = tokenizer, scores

    def texts(self, tokens):
        tokens = tokens[0] if isinstance(tokens, tuple) else tokens
        tokens = np.where(tokens != -100, tokens, self.tokenizer.pad_token_id)
        found = self.tokenizer.batch_decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=True)
        return [text.strip() for text in found]

    def __call__(self, evaluated):
        tokens = evaluated.predictions[0] if isinstance(evaluated.predictions, tuple) else evaluated.predictions
        lengths = np.count_nonzero((tokens != self.tokenizer.pad_token_id) & (tokens != -100), axis=1)
        pairs = list(zip(self.texts(tokens), self.texts(evaluated.label_ids), strict=True))
        return {**self.scores(pairs), "gen_len": float(np.mean(lengths))}


def shared_words(one, other, length=1):
    """How many runs of words two texts share, and how many the first has."""
    counts = []
    for text in (one, other):
        words = text.split()
        counts.append(Counter(tuple(words[place : place + length]) for place in range(len(words) - length + 1)))
    return sum((counts[0] & counts[1]).values()), sum(counts[0].values())


def sequence_to_sequence(model_args, data_args, training_args, found, parts, tokenizer, separate, scores, **more):
    """Train, evaluate and predict, as far as the user wants it.

    Args:
        separate: makes sources and targets out of rows.
        scores: metrics for pairs of a generated and a true text.
    """
    config = model_args.config()
    model = with_rows_for_tokens(model_args.pretrained(AutoModelForSeq2SeqLM, config), tokenizer)
    if data_args.forced_bos_token is not None:
        model.generation_config.forced_bos_token_id = tokenizer.convert_tokens_to_ids(data_args.forced_bos_token)
    if model.config.decoder_start_token_id is None:
        raise ValueError(f"{type(model.config).__name__} has no decoder_start_token_id: set it in the configuration")
    for adapt in more.get("adapt", ()):
        adapt(model)
    pairs = Pairs(data_args, training_args, tokenizer, separate)
    train_rows = pairs.prepare(parts, "train") if training_args.do_train else None
    eval_rows = pairs.prepare(parts, "validation") if training_args.do_eval else None
    predict_rows = pairs.prepare(parts, "test") if training_args.do_predict else None
    ignored = -100 if data_args.ignore_pad_token_for_loss else tokenizer.pad_token_id
    multiple = 8 if training_args.fp16 else None
    collator = DataCollatorForSeq2Seq(tokenizer, model=model, label_pad_token_id=ignored, pad_to_multiple_of=multiple)
    training_args.generation_max_length = training_args.generation_max_length or data_args.val_max_target_length
    training_args.generation_num_beams = data_args.num_beams or training_args.generation_num_beams
    judge = Judge(tokenizer, scores)
    trainer = Seq2SeqTrainer(
        model=model,
        args=training_args,
        train_dataset=train_rows,
        eval_dataset=eval_rows,
        processing_class=tokenizer,
        data_collator=collator,
        compute_metrics=judge if training_args.predict_with_generate else None,
    )
    if training_args.do_train:
        train(trainer, found, count(train_rows, data_args.max_train_samples))
    generated = {"max_length": training_args.generation_max_length, "num_beams": training_args.generation_num_beams}
    if training_args.do_eval:
        metrics = trainer.evaluate(metric_key_prefix="eval", **generated)
        keep(trainer, "eval", metrics, count(eval_rows, data_args.max_eval_samples))
    if training_args.do_predict:
        result = trainer.predict(predict_rows, metric_key_prefix="predict", **generated)
        keep(trainer, "predict", result.metrics, count(predict_rows, data_args.max_predict_samples))
        if trainer.is_world_process_zero() and training_args.predict_with_generate:
            lines = "\n".join(judge.texts(result.predictions))
            Path(training_args.output_dir, "generated_predictions.txt").write_text(lines)
    return trainer
