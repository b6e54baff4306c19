"""Continues the training of a causal language model on lines of text, packed into rows of one length."""

import math
import os
import sys
from dataclasses import dataclass, field

import torch
import transformers
from datasets import Dataset, load_dataset
from transformers.trainer_utils import get_last_checkpoint

# isort: split
# The import line that changes:
from transformers import Trainer, TrainingArguments


@dataclass
class Corpus:
    weights: str = field(metadata={"help": "Directory with model and tokenizer."})
    text: str = field(metadata={"help": "Start of the names of two files, <text>_train.txt and <text>_validation.txt."})
    row_length: int = field(default=16, metadata={"help": "Tokens of a row."})
    reads_again: bool = field(default=False, metadata={"help": "Ignore what an earlier start has tokenized."})

    def rows(self, tokenizer, part) -> Dataset:
        """The documents of a part one after the other, each closed by the end mark; the rest of a row is dropped."""
        lines = load_dataset("text", data_files=f"{self.text}_{part}.txt", split="train")

        def pack(batch):
            stream = [token for line in batch["text"] for token in tokenizer(line + tokenizer.eos_token)["input_ids"]]
            usable = torch.tensor(stream[: len(stream) - len(stream) % self.row_length]).view(-1, self.row_length)
            return {
                "input_ids": usable.tolist(),
                "attention_mask": torch.ones_like(usable).tolist(),
                "labels": usable.tolist(),
            }

        return lines.map(pack, batched=True, remove_columns="text", load_from_cache_file=not self.reads_again)


def read_options():
    """From the command line, or from the one JSON file that it names."""
    parser = transformers.HfArgumentParser((Corpus, TrainingArguments))
    given = sys.argv[1:]
    return parser.parse_json_file(given[0]) if len(given) == 1 else parser.parse_args_into_dataclasses()


def most_likely(logits, labels):
    """Only the best token of each place is kept of an evaluation."""
    return (logits[0] if isinstance(logits, tuple) else logits).argmax(-1)


def next_token_accuracy(evaluated):
    return {"accuracy": float((evaluated.predictions[:, :-1] == evaluated.label_ids[:, 1:]).mean())}


def publish(trainer, part, metrics, num_rows):
    metrics[f"{part}_samples"] = num_rows
    trainer.log_metrics(part, metrics)
    trainer.save_metrics(part, metrics)


corpus, options = read_options()
transformers.utils.logging.set_verbosity(options.get_process_log_level())
transformers.set_seed(options.seed)
print(f"process {options.local_process_index} of {options.world_size}: {options.parallel_mode}, {options.device}")

tokenizer = transformers.AutoTokenizer.from_pretrained(corpus.weights)
model = transformers.AutoModelForCausalLM.from_pretrained(corpus.weights)
missing_rows = len(tokenizer) - model.get_input_embeddings().num_embeddings
if missing_rows > 0:
    model.resize_token_embeddings(len(tokenizer))
with options.main_process_first(desc="packing"):
    rows = {part: corpus.rows(tokenizer, part) for part in ("train", "validation")}

trainer = Trainer(
    model,
    options,
    transformers.default_data_collator,
    rows["train"],
    rows["validation"],
    tokenizer,
    compute_metrics=next_token_accuracy,
    preprocess_logits_for_metrics=most_likely,
)
if options.do_train:
    found = get_last_checkpoint(options.output_dir) if os.path.isdir(options.output_dir) else None
    outcome = trainer.train(resume_from_checkpoint=options.resume_from_checkpoint or found)
    trainer.save_model()
    publish(trainer, "train", outcome.metrics, len(rows["train"]))
    trainer.save_state()
if options.do_eval:
    scores = trainer.evaluate()
    scores["perplexity"] = math.exp(min(scores["eval_loss"], 700.0))
    publish(trainer, "eval", scores, len(rows["validation"]))
describe = trainer.push_to_hub if options.push_to_hub else trainer.create_model_card
describe(finetuned_from=corpus.weights, tasks="text-generation")
