"""Texts as rows of tokens of one length."""

import logging
import math

from datasets import IterableDataset
from stages import count, keep, train

logger = logging.getLogger("examples")


def text_column(rows):
    """The column "text", or the first."""
    names = rows.column_names or list(next(iter(rows)))
    return "text" if "text" in names else names[0], names


def tokenized(parts, tokenizer, data_args, training_args, **options):
    """All parts as tokens, one row for each text."""
    name, names = text_column(next(iter(parts.values())))
    with training_args.main_process_first(desc="tokenizing"):
        return prepared(parts, lambda rows: tokenizer(rows[name], **options), data_args, "tokens", names)


def packed(parts, length, data_args, training_args, complete=None):
    """The texts of each part one after the other, cut at every `length` tokens; what is left over is dropped.

    Args:
        complete: receives the columns of the rows, and returns those that the model gets.
    """

    def cut(rows):
        streams = {name: [token for row in values for token in row] for name, values in rows.items()}
        usable = len(next(iter(streams.values()))) // length * length
        columns = {
            name: [stream[place : place + length] for place in range(0, usable, length)]
            for name, stream in streams.items()
        }
        return columns if complete is None else complete(columns)

    with training_args.main_process_first(desc="packing"):
        return prepared(parts, cut, data_args, f"rows of {length} tokens", None)


def lines_or_packed(parts, tokenizer, length, data_args, training_args, **options):
    """Each line as a row, or all of the text in rows of the same length, as the user wants it."""
    if not data_args.line_by_line:
        return packed(
            tokenized(parts, tokenizer, data_args, training_args, **options), length, data_args, training_args
        )
    padding = "max_length" if data_args.pad_to_max_length else False
    options = {**options, "truncation": True, "max_length": length, "padding": padding}
    return tokenized(parts, tokenizer, data_args, training_args, **options)


def prepared(parts, change, data_args, description, drops):
    if any(isinstance(rows, IterableDataset) for rows in parts.values()):
        return parts.map(change, batched=True, remove_columns=drops)
    return parts.map(change, remove_columns=drops, **data_args.preparing(description))


def row_length(wanted, tokenizer, usual=1024):
    """What the user wants, as far as the model can read it."""
    longest = tokenizer.model_max_length
    if wanted is None:
        if longest > usual:
            logger.warning(f"rows of {usual} tokens, although the tokenizer allows {longest}")
        return min(longest, usual)
    if wanted > longest:
        logger.warning(f"rows of {longest} tokens, as the tokenizer allows no {wanted}")
    return min(wanted, longest)


def most_likely(logits, labels):
    """Keep one token of each place instead of the scores of all."""
    return (logits[0] if isinstance(logits, tuple) else logits).argmax(dim=-1)


def share_of_hits(found, labels):
    known = labels != -100
    return {"accuracy": float((found == labels)[known].mean())}


def accuracy_of_next_token(evaluated):
    found, labels = evaluated
    return share_of_hits(found[:, :-1], labels[:, 1:])


def train_and_evaluate(trainer, found, data_args):
    """Train, and measure the perplexity, as far as the user wants it."""
    if trainer.args.do_train:
        train(trainer, found, count(trainer.train_dataset, data_args.max_train_samples))
    if trainer.args.do_eval:
        metrics = trainer.evaluate()
        try:
            metrics["perplexity"] = math.exp(metrics["eval_loss"])
        except OverflowError:
            metrics["perplexity"] = math.inf
        keep(trainer, "eval", metrics, count(trainer.eval_dataset, data_args.max_eval_samples))


def with_rows_for_tokens(model, tokenizer, multiple_of=None):
    """An embedding with at least as many rows as there are tokens."""
    if len(tokenizer) > model.get_input_embeddings().weight.shape[0]:
        model.resize_token_embeddings(len(tokenizer), pad_to_multiple_of=multiple_of)
    return model
