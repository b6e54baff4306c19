"""Trains an encoder-decoder to summarise; evaluation and prediction generate."""

import logging
import os
import sys
from dataclasses import dataclass, field

import numpy as np
from datasets import load_dataset
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    HfArgumentParser,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint

# isort: split
# The import line that changes:
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments

logger = logging.getLogger(__name__)


@dataclass
class ModelArguments:
    model_name_or_path: str
    cache_dir: str | None = None


@dataclass
class DataTrainingArguments:
    train_file: str
    validation_file: str
    test_file: str
    source_prefix: str = field(default="", metadata={"help": "Put before each document, as T5 expects."})
    max_source_length: int = 32
    max_target_length: int = 8
    val_max_target_length: int | None = None
    ignore_pad_token_for_loss: bool = True
    num_beams: int | None = field(default=None, metadata={"help": "Beams of evaluation and prediction."})

    def __post_init__(self):
        if self.val_max_target_length is None:
            self.val_max_target_length = self.max_target_length


def main():
    parser = HfArgumentParser((ModelArguments, DataTrainingArguments, Seq2SeqTrainingArguments))
    model_args, data_args, training_args = parser.parse_args_into_dataclasses()
    logging.basicConfig(handlers=[logging.StreamHandler(sys.stdout)], level=training_args.get_process_log_level())
    last_checkpoint = get_last_checkpoint(training_args.output_dir) if os.path.isdir(training_args.output_dir) else None
    set_seed(training_args.seed)

    files = {"train": data_args.train_file, "validation": data_args.validation_file, "test": data_args.test_file}
    raw_datasets = load_dataset("json", data_files=files, cache_dir=model_args.cache_dir)
    tokenizer = AutoTokenizer.from_pretrained(model_args.model_name_or_path)
    model = AutoModelForSeq2SeqLM.from_pretrained(model_args.model_name_or_path)
    if model.config.decoder_start_token_id is None:
        raise ValueError("The model's config has no decoder_start_token_id.")

    def preprocess(examples):
        documents = [data_args.source_prefix + document for document in examples["document"]]
        model_inputs = tokenizer(documents, max_length=data_args.max_source_length, truncation=True)
        labels = tokenizer(text_target=examples["summary"], max_length=data_args.max_target_length, truncation=True)
        model_inputs["labels"] = labels["input_ids"]
        return model_inputs

    with training_args.main_process_first(desc="tokenizing"):
        tokenized = raw_datasets.map(preprocess, batched=True, remove_columns=["document", "summary"])

    data_collator = DataCollatorForSeq2Seq(
        tokenizer,
        model=model,
        label_pad_token_id=-100 if data_args.ignore_pad_token_for_loss else tokenizer.pad_token_id,
        pad_to_multiple_of=8,
    )

    def compute_metrics(eval_preds):
        predictions, labels = eval_preds
        predictions = predictions[0] if isinstance(predictions, tuple) else predictions
        # sequences of unequal length are filled with -100
        predictions = np.where(predictions != -100, predictions, tokenizer.pad_token_id)
        labels = np.where(labels != -100, labels, tokenizer.pad_token_id)
        found = [text.split() for text in tokenizer.batch_decode(predictions, skip_special_tokens=True)]
        meant = [text.split() for text in tokenizer.batch_decode(labels, skip_special_tokens=True)]
        shared = [len(set(a) & set(b)) / max(len(set(b)), 1) for a, b in zip(found, meant, strict=True)]
        lengths = [np.count_nonzero(row != tokenizer.pad_token_id) for row in predictions]
        return {"recall": round(100 * float(np.mean(shared)), 4), "gen_len": float(np.mean(lengths))}

    training_args.generation_max_length = training_args.generation_max_length or data_args.val_max_target_length
    training_args.generation_num_beams = data_args.num_beams or training_args.generation_num_beams

    trainer = Seq2SeqTrainer(
        model=model,
        args=training_args,
        train_dataset=tokenized["train"],
        eval_dataset=tokenized["validation"],
        processing_class=tokenizer,
        data_collator=data_collator,
        compute_metrics=compute_metrics if training_args.predict_with_generate else None,
    )

    if training_args.do_train:
        train_result = trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint or last_checkpoint)
        trainer.save_model()
        metrics = train_result.metrics
        metrics["train_samples"] = len(tokenized["train"])
        trainer.log_metrics("train", metrics)
        trainer.save_metrics("train", metrics)
        trainer.save_state()

    if training_args.do_eval:
        metrics = trainer.evaluate(metric_key_prefix="eval")
        metrics["eval_samples"] = len(tokenized["validation"])
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)

    if training_args.do_predict:
        results = trainer.predict(tokenized["test"], metric_key_prefix="predict", max_length=6, num_beams=1)
        metrics = results.metrics
        metrics["predict_samples"] = len(tokenized["test"])
        trainer.log_metrics("predict", metrics)
        trainer.save_metrics("predict", metrics)
        if trainer.is_world_process_zero() and training_args.predict_with_generate:
            predictions = np.where(results.predictions != -100, results.predictions, tokenizer.pad_token_id)
            texts = tokenizer.batch_decode(predictions, skip_special_tokens=True, clean_up_tokenization_spaces=True)
            with open(os.path.join(training_args.output_dir, "generated_predictions.txt"), "w") as writer:
                writer.write("\n".join(text.strip() for text in texts))

    trainer.create_model_card(finetuned_from=model_args.model_name_or_path, tasks="summarization")


if __name__ == "__main__":
    main()
