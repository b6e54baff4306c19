"""Trains extractive question answering, evaluated on the texts of the answers by a Trainer of its own."""

import logging
import os
import sys
import time
from dataclasses import dataclass, field

import numpy as np
from datasets import load_dataset
from transformers import (
    AutoModelForQuestionAnswering,
    AutoTokenizer,
    DataCollatorWithPadding,
    EvalPrediction,
    HfArgumentParser,
    set_seed,
)
from transformers.trainer_utils import PredictionOutput, get_last_checkpoint, speed_metrics

# isort: split
# The import line that changes:
from transformers import Trainer, TrainingArguments

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
    max_seq_length: int = 24
    doc_stride: int = field(default=4, metadata={"help": "Tokens that two pieces of a long context share."})
    n_best_size: int = 4


class QuestionAnsweringTrainer(Trainer):
    """Its metrics are those of the answers' texts, which need the examples as well as the features."""

    def __init__(self, *args, eval_examples=None, post_process_function=None, **kwargs):
        super().__init__(*args, **kwargs)
        self.eval_examples = eval_examples
        self.post_process_function = post_process_function

    def evaluate(self, eval_dataset=None, eval_examples=None, ignore_keys=None, metric_key_prefix="eval"):
        eval_dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        eval_dataloader = self.get_eval_dataloader(eval_dataset)
        eval_examples = self.eval_examples if eval_examples is None else eval_examples

        output, metrics = self._loop(eval_dataloader, len(eval_dataset), "Evaluation", ignore_keys, metric_key_prefix)
        if self.post_process_function is not None and self.compute_metrics is not None and self.args.should_save:
            answers = self.post_process_function(eval_examples, eval_dataset, output.predictions)
            found = self.compute_metrics(answers)
            metrics |= {f"{metric_key_prefix}_{key}": value for key, value in found.items()}
        if self.args.should_log:
            self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def predict(self, predict_dataset, predict_examples, ignore_keys=None, metric_key_prefix="test"):
        dataloader = self.get_test_dataloader(predict_dataset)
        output, metrics = self._loop(dataloader, len(predict_dataset), "Prediction", ignore_keys, metric_key_prefix)
        answers = self.post_process_function(predict_examples, predict_dataset, output.predictions)
        found = self.compute_metrics(answers)
        metrics |= {f"{metric_key_prefix}_{key}": value for key, value in found.items()}
        return PredictionOutput(predictions=answers.predictions, label_ids=answers.label_ids, metrics=metrics)

    def _loop(self, dataloader, num_samples, description, ignore_keys, metric_key_prefix):
        # the metrics are computed afterwards, from the texts
        compute_metrics, self.compute_metrics = self.compute_metrics, None
        start_time = time.time()
        try:
            output = self.evaluation_loop(
                dataloader,
                description=description,
                prediction_loss_only=True if compute_metrics is None else None,
                ignore_keys=ignore_keys,
                metric_key_prefix=metric_key_prefix,
            )
        finally:
            self.compute_metrics = compute_metrics
        total_batch_size = self.args.eval_batch_size * self.args.world_size
        num_steps = -(-output.num_samples // total_batch_size)
        output.metrics.update(speed_metrics(metric_key_prefix, start_time, num_samples, num_steps))
        return output, output.metrics


def main():
    parser = HfArgumentParser((ModelArguments, DataTrainingArguments, TrainingArguments))
    model_args, data_args, training_args = parser.parse_args_into_dataclasses()
    logging.basicConfig(handlers=[logging.StreamHandler(sys.stdout)], level=training_args.get_process_log_level())
    last_checkpoint = get_last_checkpoint(training_args.output_dir) if os.path.isdir(training_args.output_dir) else None
    set_seed(training_args.seed)

    files = {"train": data_args.train_file, "validation": data_args.validation_file, "test": data_args.test_file}
    raw_datasets = load_dataset("json", data_files=files, cache_dir=model_args.cache_dir)
    tokenizer = AutoTokenizer.from_pretrained(model_args.model_name_or_path)
    model = AutoModelForQuestionAnswering.from_pretrained(model_args.model_name_or_path)

    def tokenize(examples):
        return tokenizer(
            examples["question"],
            examples["context"],
            truncation="only_second",
            max_length=data_args.max_seq_length,
            stride=data_args.doc_stride,
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
            padding="max_length",
        )

    def prepare_train_features(examples):
        features = tokenize(examples)
        samples = features.pop("overflow_to_sample_mapping")
        offsets = features.pop("offset_mapping")
        features["start_positions"], features["end_positions"] = [], []
        for number, sample in enumerate(samples):
            answer = examples["answers"][sample]
            first, last = answer["answer_start"][0], answer["answer_start"][0] + len(answer["text"][0])
            of_context = [part == 1 for part in features.sequence_ids(number)]
            spans = list(enumerate(zip(offsets[number], of_context, strict=True)))
            starts = [token for token, ((start, _), inside) in spans if inside and start == first]
            ends = [token for token, ((_, end), inside) in spans if inside and end == last]
            # a piece without the whole answer points at the first token, [CLS]
            whole = bool(starts and ends)
            features["start_positions"].append(starts[0] if whole else 0)
            features["end_positions"].append(ends[0] if whole else 0)
        return features

    def prepare_validation_features(examples):
        features = tokenize(examples)
        samples = features.pop("overflow_to_sample_mapping")
        features["example_id"] = [examples["id"][sample] for sample in samples]
        features["offset_mapping"] = [
            [offset if part == 1 else None for offset, part in zip(offsets, features.sequence_ids(number), strict=True)]
            for number, offsets in enumerate(features["offset_mapping"])
        ]
        return features

    columns = raw_datasets["train"].column_names
    with training_args.main_process_first(desc="preparing features"):
        train_dataset = raw_datasets["train"].map(prepare_train_features, batched=True, remove_columns=columns)
        eval_dataset = raw_datasets["validation"].map(prepare_validation_features, batched=True, remove_columns=columns)
        predict_dataset = raw_datasets["test"].map(prepare_validation_features, batched=True, remove_columns=columns)

    def post_processing_function(examples, features, predictions):
        best = {example["id"]: (-np.inf, "") for example in examples}
        texts = {example["id"]: example["context"] for example in examples}
        starts, ends = predictions
        for number, feature in enumerate(features):
            name, offsets = feature["example_id"], feature["offset_mapping"]
            for first in np.argsort(starts[number])[-data_args.n_best_size :]:
                for last in np.argsort(ends[number])[-data_args.n_best_size :]:
                    if offsets[first] is None or offsets[last] is None or last < first:
                        continue
                    score = starts[number][first] + ends[number][last]
                    if score > best[name][0]:
                        best[name] = (score, texts[name][offsets[first][0] : offsets[last][1]])
        found = [{"id": name, "prediction_text": text} for name, (_, text) in best.items()]
        references = [{"id": example["id"], "answers": example["answers"]} for example in examples]
        return EvalPrediction(predictions=found, label_ids=references)

    def compute_metrics(p):
        pairs = [(a["prediction_text"], b["answers"]["text"][0]) for a, b in zip(*p, strict=True)]
        overlap = [len(set(a.split()) & set(b.split())) / max(len(a.split()), 1) for a, b in pairs]
        return {
            "exact_match": 100.0 * float(np.mean([a == b for a, b in pairs])),
            "f1": 100.0 * float(np.mean(overlap)),
        }

    trainer = QuestionAnsweringTrainer(
        model=model,
        args=training_args,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        eval_examples=raw_datasets["validation"],
        processing_class=tokenizer,
        data_collator=DataCollatorWithPadding(tokenizer),
        post_process_function=post_processing_function,
        compute_metrics=compute_metrics,
    )

    if training_args.do_train:
        train_result = trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint or last_checkpoint)
        trainer.save_model()
        metrics = train_result.metrics
        metrics["train_samples"] = len(train_dataset)
        trainer.log_metrics("train", metrics)
        trainer.save_metrics("train", metrics)
        trainer.save_state()

    if training_args.do_eval:
        metrics = trainer.evaluate()
        metrics["eval_samples"] = len(eval_dataset)
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)

    if training_args.do_predict:
        results = trainer.predict(predict_dataset, raw_datasets["test"])
        metrics = results.metrics
        metrics["predict_samples"] = len(predict_dataset)
        trainer.log_metrics("predict", metrics)
        trainer.save_metrics("predict", metrics)

    trainer.create_model_card(finetuned_from=model_args.model_name_or_path, tasks="question-answering")


if __name__ == "__main__":
    main()
