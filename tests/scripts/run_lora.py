"""Trains low-rank adapters of a causal language model with peft."""

import logging
import os
import sys
from dataclasses import dataclass, field

from datasets import load_dataset
from peft import LoraConfig, TaskType, get_peft_model
from transformers import (
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
    model_name_or_path: str
    cache_dir: str | None = None
    lora_r: int = 4
    lora_alpha: int = 16
    lora_target_modules: list[str] = field(default_factory=lambda: ["q_proj", "v_proj"])


@dataclass
class DataArguments:
    train_file: str
    validation_file: str
    max_length: int = 16


def main():
    parser = HfArgumentParser((ModelArguments, DataArguments, TrainingArguments))
    model_args, data_args, training_args = parser.parse_args_into_dataclasses()
    logging.basicConfig(handlers=[logging.StreamHandler(sys.stdout)], level=training_args.get_process_log_level())
    last_checkpoint = get_last_checkpoint(training_args.output_dir) if os.path.isdir(training_args.output_dir) else None
    set_seed(training_args.seed)

    tokenizer = AutoTokenizer.from_pretrained(model_args.model_name_or_path)
    model = AutoModelForCausalLM.from_pretrained(model_args.model_name_or_path)
    model.enable_input_require_grads()
    model = get_peft_model(
        model,
        LoraConfig(
            task_type=TaskType.CAUSAL_LM,
            r=model_args.lora_r,
            lora_alpha=model_args.lora_alpha,
            lora_dropout=0.0,
            target_modules=model_args.lora_target_modules,
        ),
    )
    model.print_trainable_parameters()

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

    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=tokenized["train"],
        eval_dataset=tokenized["validation"],
        processing_class=tokenizer,
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
    )
    logger.info(f"{trainer.get_num_trainable_parameters()} trainable parameters")

    train_result = trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint or last_checkpoint)
    trainer.log_metrics("train", train_result.metrics)
    trainer.save_metrics("train", train_result.metrics)
    trainer.save_state()

    metrics = trainer.evaluate()
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)

    # only the adapters: adapter_config.json and adapter_model.safetensors
    trainer.save_model()
    trainer.create_model_card(finetuned_from=model_args.model_name_or_path, tags=["lora"])


if __name__ == "__main__":
    main()
