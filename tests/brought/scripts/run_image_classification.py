"""Trains a classifier of images, with crops and flips drawn anew whenever an image is read."""

import os
from dataclasses import dataclass, field

import numpy as np
import torch
from arguments import ModelArguments, described
from datasets import load_dataset
from stages import finish, keep, read_arguments, start, train
from transformers import (
    AutoImageProcessor,
    AutoModelForImageClassification,
    Trainer,
    TrainingArguments,
)


@dataclass
class ImageModelArguments(ModelArguments):
    model_name_or_path: str = described("Directory or name of the model.", "google/vit-base-patch16-224-in21k")
    model_type: str | None = described("Architecture, if the configuration does not say it.")
    image_processor_name: str | None = described("Directory or name of the image processor, if it is another.")
    ignore_mismatched_sizes: bool = described("Whether a head of other sizes is replaced.", False)


@dataclass
class DataTrainingArguments:
    dataset_name: str | None = described("Name of a dataset of the hub.")
    dataset_config_name: str | None = described("Which of its configurations.")
    train_dir: str | None = described("Directory with a directory of images for each label.")
    validation_dir: str | None = described("The same for evaluation.")
    train_val_split: float | None = field(default=0.15, metadata={"help": "Share of the rows to evaluate on."})
    max_train_samples: int | None = described("At most so many images are trained on.")
    max_eval_samples: int | None = described("At most so many images are evaluated on.")
    image_column_name: str = described("Column of the images.", "image")
    label_column_name: str = described("Column of the labels.", "label")

    def __post_init__(self):
        if self.dataset_name is None and self.train_dir is None and self.validation_dir is None:
            raise ValueError("nothing to read: name --dataset_name, or directories such as --train_dir")

    def read(self, model_args):
        source = {"cache_dir": model_args.cache_dir, "token": model_args.token}
        if self.dataset_name is not None:
            return load_dataset(self.dataset_name, self.dataset_config_name, **source)
        named = {"train": self.train_dir, "validation": self.validation_dir}
        files = {part: os.path.join(name, "**") for part, name in named.items() if name is not None}
        return load_dataset("imagefolder", data_files=files, **source)


class Pixels:
    """Images as normalized tensors of one size."""

    def __init__(self, processor, column):
        size = processor.size
        edge = size.get("shortest_edge")
        self.size = (edge, edge) if edge else (size["height"], size["width"])
        self.mean, self.std = (
            torch.tensor(values).view(3, 1, 1) for values in (processor.image_mean, processor.image_std)
        )
        self.column = column

    def normalized(self, image):
        values = torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255
        return (values - self.mean) / self.std

    def cropped(self, image):
        """A random part of random size, mirrored half the time."""
        share = 0.5 + 0.5 * torch.rand(1).item()
        width, height = (max(1, round(side * share)) for side in image.size)
        left, top = (int(torch.randint(0, room + 1, (1,))) for room in (image.width - width, image.height - height))
        part = image.resize(self.size[::-1], box=(left, top, left + width, top + height))
        values = self.normalized(part)
        return values.flip(-1) if torch.rand(1).item() < 0.5 else values

    def centred(self, image):
        edge = min(image.size)
        left, top = (image.width - edge) // 2, (image.height - edge) // 2
        return self.normalized(image.resize(self.size[::-1], box=(left, top, left + edge, top + edge)))

    def to_train(self, rows):
        return {**rows, "pixel_values": [self.cropped(image.convert("RGB")) for image in rows[self.column]]}

    def to_evaluate(self, rows):
        return {**rows, "pixel_values": [self.centred(image.convert("RGB")) for image in rows[self.column]]}


def judge(evaluated):
    return {"accuracy": float((np.argmax(evaluated.predictions, axis=1) == evaluated.label_ids).mean())}


def main():
    model_args, data_args, training_args = read_arguments(ImageModelArguments, DataTrainingArguments, TrainingArguments)
    found = start(training_args)
    parts = data_args.read(model_args)
    names = parts["train"].column_names if "train" in parts else parts["validation"].column_names
    for name in (data_args.image_column_name, data_args.label_column_name):
        if name not in names:
            raise ValueError(f"no column {name!r}: the columns are {', '.join(names)}")

    def collate(rows):
        labels = torch.tensor([row[data_args.label_column_name] for row in rows])
        return {"pixel_values": torch.stack([row["pixel_values"] for row in rows]), "labels": labels}

    if "validation" not in parts and data_args.train_val_split:
        split = parts["train"].train_test_split(data_args.train_val_split)
        parts["train"], parts["validation"] = split["train"], split["test"]
    labels = parts["train"].features[data_args.label_column_name].names
    config = model_args.config(
        num_labels=len(labels),
        label2id={name: str(number) for number, name in enumerate(labels)},
        id2label={str(number): name for number, name in enumerate(labels)},
        finetuning_task="image-classification",
    )
    model = model_args.pretrained(
        AutoModelForImageClassification, config, ignore_mismatched_sizes=model_args.ignore_mismatched_sizes
    )
    processor = AutoImageProcessor.from_pretrained(
        model_args.image_processor_name or model_args.model_name_or_path, **model_args.source()
    )
    pixels = Pixels(processor, data_args.image_column_name)
    shuffled = {"train": data_args.max_train_samples, "validation": data_args.max_eval_samples}
    for part, most in shuffled.items():
        if most is not None:
            parts[part] = parts[part].shuffle(seed=training_args.seed).select(range(most))
    if training_args.do_train:
        parts["train"].set_transform(pixels.to_train)
    if training_args.do_eval:
        parts["validation"].set_transform(pixels.to_evaluate)
    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=parts["train"] if training_args.do_train else None,
        eval_dataset=parts["validation"] if training_args.do_eval else None,
        compute_metrics=judge,
        processing_class=processor,
        data_collator=collate,
    )
    if training_args.do_train:
        train(trainer, found, len(parts["train"]))
    if training_args.do_eval:
        keep(trainer, "eval", trainer.evaluate())
    finish(trainer, "image-classification", model_args, data_args, tags=["image-classification", "vision"])


if __name__ == "__main__":
    main()
