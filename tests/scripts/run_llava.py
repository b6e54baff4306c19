"""Trains a model of pictures and text in the manner of LLaVA: a Trainer with optimizer groups and a sampler of its own.

The projector has a learning rate of its own, samples of like length come together, and each checkpoint has the
projector's weights in a file of their own as well.
"""

import json
import os
import pathlib
from dataclasses import dataclass, field

import numpy as np
import torch
import transformers
from torch.utils.data import Dataset, Sampler
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

# isort: split
# The import line that changes:
from transformers import Trainer, TrainingArguments

IGNORE_INDEX = -100


@dataclass
class ModelArguments:
    model_name_or_path: str
    tokenizer_name: str
    freeze_vision_tower: bool = True


@dataclass
class DataArguments:
    data_path: str
    image_path: str


@dataclass
class LlavaArguments(TrainingArguments):
    group_by_modality_length: bool = field(default=False)
    mm_projector_lr: float | None = None
    remove_unused_columns: bool = field(default=False)


class LengthGroupedSampler(Sampler):
    """Mega-batches of random samples, the longest first in each."""

    def __init__(self, batch_size, world_size, lengths, generator):
        self.batch_size, self.world_size, self.lengths, self.generator = batch_size, world_size, lengths, generator

    def __len__(self):
        return len(self.lengths)

    def __iter__(self):
        order = torch.randperm(len(self.lengths), generator=self.generator).tolist()
        size = 4 * self.batch_size * self.world_size
        groups = [sorted(order[i : i + size], key=lambda n: -self.lengths[n]) for i in range(0, len(order), size)]
        return iter([index for group in groups for index in group])


class LlavaTrainer(Trainer):
    def _get_train_sampler(self, train_dataset=None):
        train_dataset = self.train_dataset if train_dataset is None else train_dataset
        if train_dataset is None or not self.args.group_by_modality_length:
            return super()._get_train_sampler(train_dataset)
        return LengthGroupedSampler(
            self.args.train_batch_size,
            self.args.world_size * self.args.gradient_accumulation_steps,
            train_dataset.lengths,
            torch.Generator().manual_seed(self.args.seed),
        )

    def create_optimizer(self, model=None):
        opt_model = self.model
        if self.optimizer is not None:
            return self.optimizer
        decayed = set(self.get_decay_parameter_names(opt_model))
        groups = []
        for is_projector in (False, True):
            for is_decayed in (False, True):
                group = {
                    "params": [
                        p
                        for name, p in opt_model.named_parameters()
                        if p.requires_grad
                        and ("multi_modal_projector" in name) == is_projector
                        and (name in decayed) == is_decayed
                    ],
                    "weight_decay": self.args.weight_decay if is_decayed else 0.0,
                }
                if is_projector and self.args.mm_projector_lr is not None:
                    group["lr"] = self.args.mm_projector_lr
                groups.append(group)
        optimizer_cls, optimizer_kwargs = Trainer.get_optimizer_cls_and_kwargs(self.args)
        self.optimizer = optimizer_cls(groups, **optimizer_kwargs)
        return self.optimizer

    def _save_checkpoint(self, model, trial):
        super()._save_checkpoint(model, trial)
        if self.args.should_save:
            directory = os.path.join(
                self._get_output_dir(trial=trial), f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
            )
            torch.save(projector_weights(model), os.path.join(directory, "mm_projector.bin"))

    def _save(self, output_dir=None, state_dict=None):
        super()._save(output_dir, state_dict)
        if self.args.should_save:  # Hugging Face calls it on every rank, and makes the directory on the first
            path = pathlib.Path(output_dir or self.args.output_dir, "llava.json")
            path.write_text('{"projector": "mm_projector.bin"}')


def projector_weights(model):
    return {key: value.detach().cpu() for key, value in model.named_parameters() if "multi_modal_projector" in key}


class PictureDataset(Dataset):
    def __init__(self, data_args, tokenizer, num_image_tokens):
        self.rows = json.loads(pathlib.Path(data_args.data_path).read_text())
        self.pixels = np.load(data_args.image_path)
        self.texts = [tokenizer("<image> " * num_image_tokens + row["text"]).input_ids for row in self.rows]
        self.num_image_tokens = num_image_tokens

    @property
    def lengths(self):
        return [len(text) for text in self.texts]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        input_ids = torch.tensor(self.texts[i])
        labels = input_ids.clone()
        labels[: self.num_image_tokens] = IGNORE_INDEX
        return {
            "input_ids": input_ids,
            "labels": labels,
            "pixel_values": torch.from_numpy(self.pixels[self.rows[i]["image"]]),
        }


@dataclass
class PictureCollator:
    pad_token_id: int

    def __call__(self, instances):
        pad = torch.nn.utils.rnn.pad_sequence
        input_ids = pad([row["input_ids"] for row in instances], batch_first=True, padding_value=self.pad_token_id)
        labels = pad([row["labels"] for row in instances], batch_first=True, padding_value=IGNORE_INDEX)
        return {
            "input_ids": input_ids,
            "labels": labels,
            "attention_mask": input_ids.ne(self.pad_token_id).long(),
            "pixel_values": torch.stack([row["pixel_values"] for row in instances]),
        }


def has_checkpoint(directory):
    return any(pathlib.Path(directory).glob("checkpoint-*"))


def without_gradients(module):
    for parameter in module.parameters():
        parameter.requires_grad_(False)


def run(model_args, data_args, options):
    transformers.set_seed(options.seed)
    model = transformers.LlavaForConditionalGeneration.from_pretrained(model_args.model_name_or_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_args.tokenizer_name)
    if model_args.freeze_vision_tower:
        for name, module in model.named_modules():
            if name.endswith("vision_tower"):
                without_gradients(module)
    data = PictureDataset(data_args, tokenizer, model.config.image_seq_length)
    trainer = LlavaTrainer(model, options, PictureCollator(tokenizer.pad_token_id), data, processing_class=tokenizer)
    model.config.use_cache = False  # only generation has a use for it
    trainer.train(resume_from_checkpoint=has_checkpoint(options.output_dir))
    model.config.use_cache = True
    trainer.save_state()
    trainer.save_model(options.output_dir)


if __name__ == "__main__":
    run(*transformers.HfArgumentParser((ModelArguments, DataArguments, LlavaArguments)).parse_args_into_dataclasses())
