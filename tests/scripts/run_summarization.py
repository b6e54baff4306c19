"""Shortens documents with an encoder-decoder, and judges it by the summaries that it generates."""

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import transformers
from datasets import load_dataset
from transformers.trainer_utils import get_last_checkpoint

# isort: split
# The import line that changes:
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments


@dataclass
class Summaries:
    weights: str
    rows: str
    """Start of the names of the three files of JSON."""
    task: str = ""
    """Put before each document, for a model that expects one."""
    longest_document: int = 32
    longest_summary: int = 8
    beams: int = 1


class Words:
    """Tokens of documents and summaries, and back."""

    def __init__(self, chosen):
        self.chosen = chosen
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(chosen.weights)

    def encode(self, rows):
        chosen = self.chosen
        texts = [f"{chosen.task}{document}" for document in rows["document"]]
        tokens = self.tokenizer(texts, truncation=True, max_length=chosen.longest_document)
        short = self.tokenizer(text_target=rows["summary"], truncation=True, max_length=chosen.longest_summary)
        return {**tokens, "labels": short["input_ids"]}

    def filled(self, ids):
        """Generated rows have -100 where the longest one is longer."""
        ids = ids[0] if isinstance(ids, tuple) else ids
        return np.where(ids == -100, self.tokenizer.pad_token_id, ids)

    def decode(self, ids):
        return self.tokenizer.batch_decode(self.filled(ids), skip_special_tokens=True)

    def judge(self, evaluated):
        """The share of the words of the summary that were generated, and the length of what was."""
        recalled = []
        for ours, theirs in zip(self.decode(evaluated.predictions), self.decode(evaluated.label_ids), strict=True):
            wanted = set(theirs.split())
            recalled.append(len(wanted.intersection(ours.split())) / max(1, len(wanted)))
        lengths = (self.filled(evaluated.predictions) != self.tokenizer.pad_token_id).sum(axis=1)
        return {"recall": round(100 * float(np.mean(recalled)), 4), "gen_len": float(lengths.mean())}


def main(chosen, options):
    transformers.set_seed(options.seed)
    words = Words(chosen)
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(chosen.weights)
    options.generation_num_beams = chosen.beams
    if options.generation_max_length is None:
        options.generation_max_length = chosen.longest_summary
    data = load_dataset("json", data_files={p: f"{chosen.rows}_{p}.json" for p in ("train", "validation", "test")})
    with options.main_process_first(desc="tokens"):
        data = data.map(words.encode, batched=True, remove_columns=data["train"].column_names)
    trainer = Seq2SeqTrainer(
        model=model,
        args=options,
        data_collator=transformers.DataCollatorForSeq2Seq(words.tokenizer, model=model, pad_to_multiple_of=8),
        train_dataset=data["train"],
        eval_dataset=data["validation"],
        processing_class=words.tokenizer,
        compute_metrics=words.judge if options.predict_with_generate else None,
    )

    def note(part, rows, metrics):
        metrics[f"{part}_samples"] = len(rows)
        trainer.log_metrics(part, metrics)
        trainer.save_metrics(part, metrics)

    if options.do_train:
        found = get_last_checkpoint(options.output_dir) if os.path.isdir(options.output_dir) else None
        note("train", data["train"], trainer.train(resume_from_checkpoint=found).metrics)
        trainer.save_model()
        trainer.save_state()
    if options.do_eval:
        note("eval", data["validation"], trainer.evaluate(metric_key_prefix="eval"))
    if options.do_predict:
        generated = trainer.predict(data["test"], metric_key_prefix="predict", max_length=6, num_beams=1)
        note("predict", data["test"], generated.metrics)
        if trainer.is_world_process_zero():
            path = Path(options.output_dir, "generated_predictions.txt")
            path.write_text("\n".join(map(str.strip, words.decode(generated.predictions))))
    trainer.create_model_card(tasks="summarization", finetuned_from=chosen.weights)


main(*transformers.HfArgumentParser((Summaries, Seq2SeqTrainingArguments)).parse_args_into_dataclasses())
