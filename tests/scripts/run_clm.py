"""Trains a causal language model on a text file, cut into blocks of one length."""

import itertools
import logging
import math
import os
import sys
from dataclasses import dataclass, field

import transformers
from datasets import load_dataset
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    default_data_collator,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint

# isort: split
# The import line that changes:
from transformers import Trainer, TrainingArguments

logger = logging.getLogger(__name__)


@dataclass
class ModelArguments:
    model_name_or_path: str = field(metadata={"help": "Directory of the weights, or of a config to start from."})
    tokenizer_name: str | None = field(default=None, metadata={"help": "If the tokenizer is not with the model."})
    cache_dir: str | None = field(default=None, metadata={"help": "Where data sets are cached."})


@dataclass
class DataTrainingArguments:
    train_file: str = field(metadata={"help": "Text, one document per line."})
    validation_file: str = field(metadata={"help": "Text, one document per line."})
    block_size: int = field(default=16, metadata={"help": "Tokens of a training sample."})
    preprocessing_num_workers: int | None = field(default=None)
    overwrite_cache: bool = field(default=False)


def main():
    parser = HfArgumentParser((ModelArguments, DataTrainingArguments, TrainingArguments))
    if len(sys.argv) == 2 and sys.argv[1].endswith(".json"):
        model_args, data_args, training_args = parser.parse_json_file(json_file=os.path.abspath(sys.argv[1]))
    else:
        model_args, data_args, training_args = parser.parse_args_into_dataclasses()

    logging.basicConfig(format="%(asctime)s - %(name)s - %(message)s", handlers=[logging.StreamHandler(sys.stdout)])
    if training_args.should_log:
        transformers.utils.logging.set_verbosity_info()
    log_level = training_args.get_process_log_level()
    logger.setLevel(log_level)
    transformers.utils.logging.set_verbosity(log_level)
    logger.warning(
        f"rank {training_args.local_process_index} on {training_args.device} ({training_args.n_gpu} GPUs), "
        f"distributed: {training_args.parallel_mode.value == 'distributed'}, 16 bits: {training_args.fp16}"
    )
    logger.info(f"arguments: {training_args}")

    last_checkpoint = None
    if os.path.isdir(training_args.output_dir) and training_args.do_train:
        last_checkpoint = get_last_checkpoint(training_args.output_dir)
        if last_checkpoint is not None and training_args.resume_from_checkpoint is None:
            logger.info(f"continuing from {last_checkpoint}")

    set_seed(training_args.seed)

    raw_datasets = load_dataset(
        "text",
        data_files={"train": data_args.train_file, "validation": data_args.validation_file},
        cache_dir=model_args.cache_dir,
    )
    config = AutoConfig.from_pretrained(model_args.model_name_or_path)
    tokenizer = AutoTokenizer.from_pretrained(model_args.tokenizer_name or model_args.model_name_or_path)
    model = AutoModelForCausalLM.from_pretrained(model_args.model_name_or_path, config=config)
    if len(tokenizer) > model.get_input_embeddings().weight.shape[0]:
        model.resize_token_embeddings(len(tokenizer))

    column_names = list(raw_datasets["train"].features)

    def tokenize(examples):
        return tokenizer([text + tokenizer.eos_token for text in examples["text"]])

    def group_texts(examples):
        joined = {key: list(itertools.chain(*rows)) for key, rows in examples.items()}
        length = len(joined["input_ids"]) // data_args.block_size * data_args.block_size
        blocks = {
            key: [row[start : start + data_args.block_size] for start in range(0, length, data_args.block_size)]
            for key, row in joined.items()
        }
        blocks["labels"] = blocks["input_ids"].copy()
        return blocks

    with training_args.main_process_first(desc="tokenizing and grouping the texts"):
        tokenized = raw_datasets.map(
            tokenize,
            batched=True,
            num_proc=data_args.preprocessing_num_workers,
            remove_columns=column_names,
            load_from_cache_file=not data_args.overwrite_cache,
        )
        blocks = tokenized.map(group_texts, batched=True, load_from_cache_file=not data_args.overwrite_cache)

    def preprocess_logits_for_metrics(logits, labels):
        if isinstance(logits, tuple):
            logits = logits[0]
        return logits.argmax(dim=-1)

    def compute_metrics(eval_preds):
        predictions, labels = eval_preds
        return {"accuracy": float((predictions[:, :-1] == labels[:, 1:]).mean())}

    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=blocks["train"] if training_args.do_train else None,
        eval_dataset=blocks["validation"] if training_args.do_eval else None,
        processing_class=tokenizer,
        data_collator=default_data_collator,
        compute_metrics=compute_metrics if training_args.do_eval else None,
        preprocess_logits_for_metrics=preprocess_logits_for_metrics if training_args.do_eval else None,
    )

    if training_args.do_train:
        checkpoint = training_args.resume_from_checkpoint or last_checkpoint
        train_result = trainer.train(resume_from_checkpoint=checkpoint)
        trainer.save_model()

        metrics = train_result.metrics
        metrics["train_samples"] = len(blocks["train"])
        trainer.log_metrics("train", metrics)
        trainer.save_metrics("train", metrics)
        trainer.save_state()

    if training_args.do_eval:
        metrics = trainer.evaluate()
        metrics["eval_samples"] = len(blocks["validation"])
        try:
            metrics["perplexity"] = math.exp(metrics["eval_loss"])
        except OverflowError:
            metrics["perplexity"] = float("inf")
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)

    kwargs = {"finetuned_from": model_args.model_name_or_path, "tasks": "text-generation"}
    if training_args.push_to_hub:
        trainer.push_to_hub(**kwargs)
    else:
        trainer.create_model_card(**kwargs)


if __name__ == "__main__":
    main()
