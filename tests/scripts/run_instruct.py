"""Instruction tuning in the manner of Alpaca: a torch data set, a collator, a loss on the answers only."""

import copy
import json
import logging
import os
from dataclasses import dataclass, field

import torch
import transformers
from torch.utils.data import Dataset

# isort: split
# The import line that changes:
from transformers import Trainer, TrainingArguments

IGNORE_INDEX = -100
PROMPTS = {
    "with_input": "the instruction : {instruction} the input : {input} answer :",
    "without_input": "the instruction : {instruction} answer :",
}


@dataclass
class ModelArguments:
    model_name_or_path: str = field(default="causal")


@dataclass
class DataArguments:
    data_path: str = field(default=None, metadata={"help": "JSON: a list of instruction, input, output."})


@dataclass
class AlpacaArguments(TrainingArguments):
    """The Trainer's arguments, and one of our own."""

    model_max_length: int = field(default=32, metadata={"help": "Longer conversations are cut."})


def safe_save_model_for_hf_trainer(trainer, output_dir):
    """Collects the weights on the CPU and writes them."""
    state_dict = trainer.model.state_dict()
    if trainer.args.should_save:
        cpu_state_dict = {key: value.cpu() for key, value in state_dict.items()}
        del state_dict
        trainer._save(output_dir, state_dict=cpu_state_dict)


def resize_with_mean(special_tokens, tokenizer, model):
    """New rows of the embeddings start as the mean of the old ones."""
    new = tokenizer.add_special_tokens(special_tokens)
    model.resize_token_embeddings(len(tokenizer))
    if new > 0:
        for weights in (model.get_input_embeddings().weight.data, model.get_output_embeddings().weight.data):
            weights[-new:] = weights[:-new].mean(dim=0, keepdim=True)


def tokenize(texts, tokenizer):
    return [
        tokenizer(text, return_tensors="pt", max_length=tokenizer.model_max_length, truncation=True).input_ids[0]
        for text in texts
    ]


class SupervisedDataset(Dataset):
    def __init__(self, data_path, tokenizer):
        with open(data_path) as file:
            examples = json.load(file)
        sources = [PROMPTS["with_input" if row["input"] else "without_input"].format_map(row) for row in examples]
        targets = [f" {row['output']} {tokenizer.eos_token}" for row in examples]
        self.input_ids = tokenize([a + b for a, b in zip(sources, targets, strict=True)], tokenizer)
        self.labels = copy.deepcopy(self.input_ids)
        for label, source in zip(self.labels, tokenize(sources, tokenizer), strict=True):
            label[: len(source)] = IGNORE_INDEX

    def __len__(self):
        return len(self.input_ids)

    def __getitem__(self, i):
        return {"input_ids": self.input_ids[i], "labels": self.labels[i]}


@dataclass
class DataCollatorForSupervisedDataset:
    tokenizer: transformers.PreTrainedTokenizerBase

    def __call__(self, instances):
        input_ids, labels = ([instance[key] for instance in instances] for key in ("input_ids", "labels"))
        pad = torch.nn.utils.rnn.pad_sequence
        input_ids = pad(input_ids, batch_first=True, padding_value=self.tokenizer.pad_token_id)
        labels = pad(labels, batch_first=True, padding_value=IGNORE_INDEX)
        return {
            "input_ids": input_ids,
            "labels": labels,
            "attention_mask": input_ids.ne(self.tokenizer.pad_token_id),
        }


def make_supervised_data_module(tokenizer, data_args):
    return {
        "train_dataset": SupervisedDataset(data_args.data_path, tokenizer),
        "eval_dataset": None,
        "data_collator": DataCollatorForSupervisedDataset(tokenizer),
    }


def train():
    parser = transformers.HfArgumentParser((ModelArguments, DataArguments, AlpacaArguments))
    model_args, data_args, training_args = parser.parse_args_into_dataclasses()
    transformers.set_seed(training_args.seed)

    model = transformers.AutoModelForCausalLM.from_pretrained(model_args.model_name_or_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(
        model_args.model_name_or_path,
        model_max_length=training_args.model_max_length,
        padding_side="right",
        use_fast=False,
    )
    resize_with_mean({"additional_special_tokens": ["<|answer|>"]}, tokenizer, model)

    data_module = make_supervised_data_module(tokenizer, data_args)
    trainer = Trainer(model=model, processing_class=tokenizer, args=training_args, **data_module)
    trainer.train()
    trainer.save_state()
    safe_save_model_for_hf_trainer(trainer, training_args.output_dir)
    if trainer.is_world_process_zero():
        logging.getLogger(__name__).info("saved %s", os.listdir(training_args.output_dir))


if __name__ == "__main__":
    train()
