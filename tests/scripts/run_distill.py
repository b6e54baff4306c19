"""Distils a causal language model into a smaller one: its loss is partly the distance to the teacher's logits."""

import logging
import os
import sys
from dataclasses import dataclass, field

import torch
from datasets import load_dataset
from torch.nn import functional as F
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    HfArgumentParser,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint

# isort: split
# The import line that changes:
from transformers import Trainer, TrainingArguments

logger = logging.getLogger(__name__)


@dataclass
class ModelArguments:
    teacher_name_or_path: str
    student_layers: int = 1
    cache_dir: str | None = None


@dataclass
class DataArguments:
    train_file: str
    validation_file: str
    max_length: int = 16


@dataclass
class DistillationArguments(TrainingArguments):
    alpha: float = field(default=0.5, metadata={"help": "Weight of the loss on the labels."})
    temperature: float = field(default=2.0)


class DistillationTrainer(Trainer):
    def __init__(self, *args, teacher_model=None, **kwargs):
        super().__init__(*args, **kwargs)
        self.teacher = teacher_model.to(self.args.device).eval()
        for parameter in self.teacher.parameters():
            parameter.requires_grad = False

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        with torch.no_grad():
            teacher_logits = self.teacher(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
        heat = self.args.temperature
        mask = inputs["labels"].ne(-100).unsqueeze(-1)
        distance = F.kl_div(
            F.log_softmax(outputs.logits / heat, dim=-1), F.softmax(teacher_logits / heat, dim=-1), reduction="none"
        )
        distance = (distance * mask).sum() / mask.sum() * heat**2
        loss = self.args.alpha * outputs.loss + (1 - self.args.alpha) * distance
        return (loss, outputs) if return_outputs else loss


def main():
    parser = HfArgumentParser((ModelArguments, DataArguments, DistillationArguments))
    model_args, data_args, training_args = parser.parse_args_into_dataclasses()
    logging.basicConfig(handlers=[logging.StreamHandler(sys.stdout)], level=training_args.get_process_log_level())
    last_checkpoint = get_last_checkpoint(training_args.output_dir) if os.path.isdir(training_args.output_dir) else None
    set_seed(training_args.seed)

    tokenizer = AutoTokenizer.from_pretrained(model_args.teacher_name_or_path)
    teacher = AutoModelForCausalLM.from_pretrained(model_args.teacher_name_or_path)
    config = AutoConfig.from_pretrained(model_args.teacher_name_or_path, num_hidden_layers=model_args.student_layers)
    student = AutoModelForCausalLM.from_config(config)

    raw_datasets = load_dataset(
        "text",
        data_files={"train": data_args.train_file, "validation": data_args.validation_file},
        cache_dir=model_args.cache_dir,
    )
    with training_args.main_process_first(desc="tokenizing"):
        tokenized = raw_datasets.map(
            lambda rows: tokenizer(rows["text"], truncation=True, max_length=data_args.max_length),
            batched=True,
            remove_columns=["text"],
        )

    trainer = DistillationTrainer(
        model=student,
        teacher_model=teacher,
        args=training_args,
        train_dataset=tokenized["train"],
        eval_dataset=tokenized["validation"],
        processing_class=tokenizer,
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
    )
    train_result = trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint or last_checkpoint)
    trainer.save_model()
    trainer.log_metrics("train", train_result.metrics)
    trainer.save_metrics("train", train_result.metrics)
    trainer.save_state()

    metrics = trainer.evaluate()
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)


if __name__ == "__main__":
    main()
