"""A Trainer that judges answers to questions by their text."""

import math
import time

from transformers import Trainer
from transformers.trainer_utils import PredictionOutput, speed_metrics


class AnsweringTrainer(Trainer):
    """Evaluates without metrics first, as they need the contexts that the model does not see."""

    def __init__(self, *args, contexts=None, answer=None, **kwargs):
        super().__init__(*args, **kwargs)
        self.contexts, self.answer = contexts, answer

    def evaluate(self, eval_dataset=None, contexts=None, ignore_keys=None, metric_key_prefix="eval"):
        windows = self.eval_dataset if eval_dataset is None else eval_dataset
        output = self.looped(self.get_eval_dataloader(windows), "Evaluation", ignore_keys, metric_key_prefix)
        if self.answer is not None and self.compute_metrics is not None and self.args.should_save:
            given = self.answer(contexts or self.contexts, windows, output.predictions)
            metrics = {**self.prefixed(self.compute_metrics(given), metric_key_prefix), **output.metrics}
        else:
            metrics = output.metrics
        if self.args.should_log:
            self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def predict(self, test_dataset, contexts, ignore_keys=None, metric_key_prefix="test"):
        output = self.looped(self.get_test_dataloader(test_dataset), "Prediction", ignore_keys, metric_key_prefix)
        if self.answer is None or self.compute_metrics is None:
            return output
        given = self.answer(contexts, test_dataset, output.predictions, "predict")
        metrics = {**self.prefixed(self.compute_metrics(given), metric_key_prefix), **output.metrics}
        return PredictionOutput(predictions=given.predictions, label_ids=given.label_ids, metrics=metrics)

    def looped(self, loader, description, ignore_keys, prefix):
        compute_metrics, self.compute_metrics = self.compute_metrics, None
        begin = time.time()
        try:
            output = self.evaluation_loop(
                loader,
                description=description,
                prediction_loss_only=True if compute_metrics is None else None,
                ignore_keys=ignore_keys,
                metric_key_prefix=prefix,
            )
        finally:
            self.compute_metrics = compute_metrics
        batch = self.args.eval_batch_size * self.args.world_size
        if f"{prefix}_model_preparation_time" in output.metrics:
            begin += output.metrics[f"{prefix}_model_preparation_time"]
        num_steps = math.ceil(output.num_samples / batch)
        output.metrics.update(speed_metrics(prefix, begin, num_samples=output.num_samples, num_steps=num_steps))
        return output

    def prefixed(self, metrics, prefix):
        return {name if name.startswith(prefix) else f"{prefix}_{name}": value for name, value in metrics.items()}
