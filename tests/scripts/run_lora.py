"""Freezes a causal language model and trains low-rank adapters beside it with peft."""

import os
from dataclasses import dataclass

import peft
import transformers
from datasets import load_dataset
from transformers.trainer_utils import get_last_checkpoint

# isort: split
# The import line that changes:
from transformers import Trainer, TrainingArguments


@dataclass
class Adapters:
    weights: str
    text: str
    rank: int = 4
    scale: int = 16
    layers: str = "q_proj,v_proj"
    longest: int = 16


def adapted(chosen):
    """The model with its adapters; its inputs need gradients for gradient checkpointing."""
    model = transformers.AutoModelForCausalLM.from_pretrained(chosen.weights)
    model.enable_input_require_grads()
    layers = chosen.layers.split(",")
    config = peft.LoraConfig(r=chosen.rank, lora_alpha=chosen.scale, target_modules=layers, task_type="CAUSAL_LM")
    return peft.get_peft_model(model, config)


def lines_of(chosen, tokenizer, part):
    read = load_dataset("text", data_files=f"{chosen.text}_{part}.txt")["train"]

    def encode(row):
        return tokenizer(row["text"], max_length=chosen.longest, truncation=True)

    return read.map(encode, remove_columns=read.column_names)


if __name__ == "__main__":
    chosen, options = transformers.HfArgumentParser([Adapters, TrainingArguments]).parse_args_into_dataclasses()
    transformers.set_seed(options.seed)
    tokenizer = transformers.AutoTokenizer.from_pretrained(chosen.weights)
    model = adapted(chosen)
    model.print_trainable_parameters()
    with options.main_process_first():
        train_lines, other_lines = (lines_of(chosen, tokenizer, part) for part in ("train", "validation"))
    trainer = Trainer(
        model,
        options,
        data_collator=transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False),
        train_dataset=train_lines,
        eval_dataset=other_lines,
        processing_class=tokenizer,
    )
    print(f"{trainer.get_num_trainable_parameters()} parameters are trained")
    before = get_last_checkpoint(options.output_dir) if os.path.isdir(options.output_dir) else None
    results = {"train": trainer.train(resume_from_checkpoint=before).metrics, "eval": trainer.evaluate()}
    for part, metrics in results.items():
        trainer.log_metrics(part, metrics)
        trainer.save_metrics(part, metrics)
    trainer.save_state()
    trainer.save_model()  # the adapters alone: adapter_config.json, adapter_model.safetensors
    trainer.create_model_card(tags=["lora"], finetuned_from=chosen.weights)
