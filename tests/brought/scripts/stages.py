"""What each of the examples does before, during and after its training."""

import logging
import os
import sys

import datasets
import transformers
from transformers.trainer_utils import get_last_checkpoint

logger = logging.getLogger("examples")


def read_arguments(*classes):
    """One object of each class, from the command line or the one JSON or YAML file that it names."""
    parser = transformers.HfArgumentParser(classes)
    if len(sys.argv) == 2 and sys.argv[1].endswith(".json"):
        return parser.parse_json_file(json_file=os.path.abspath(sys.argv[1]))
    if len(sys.argv) == 2 and sys.argv[1].endswith((".yaml", ".yml")):
        return parser.parse_yaml_file(yaml_file=os.path.abspath(sys.argv[1]))
    return parser.parse_args_into_dataclasses()


def start(args):
    """Logging and seed; the checkpoint of an earlier start, or None."""
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", handlers=[logging.StreamHandler(sys.stdout)])
    if args.should_log:
        transformers.utils.logging.set_verbosity_info()
    level = args.get_process_log_level()
    logger.setLevel(level)
    datasets.utils.logging.set_verbosity(level)
    transformers.utils.logging.set_verbosity(level)
    transformers.utils.logging.enable_default_handler()
    transformers.utils.logging.enable_explicit_format()
    is_distributed = args.parallel_mode.value == "distributed"
    logger.warning(
        f"process {args.local_process_index} on {args.device} with {args.n_gpu} GPUs; "
        f"one of several: {is_distributed}; half precision: {args.fp16}"
    )
    logger.info(f"arguments of the training: {args}")
    found = None
    if args.do_train and os.path.isdir(args.output_dir):
        found = get_last_checkpoint(args.output_dir)
        if found is not None and args.resume_from_checkpoint is None:
            logger.info(f"an earlier start has left {found}: this one goes on from there")
    transformers.set_seed(args.seed)
    return found


def wanted(parts, data_args, training_args):
    """The rows to train on and those to evaluate on; None for what the user does not want."""
    train_rows = data_args.first(parts, "train") if training_args.do_train else None
    eval_rows = data_args.first(parts, "validation") if training_args.do_eval else None
    return train_rows, eval_rows


def train(trainer, found, num_samples):
    """Train, from a checkpoint if there is one, and leave model, metrics and state in `output_dir`."""
    checkpoint = trainer.args.resume_from_checkpoint
    result = trainer.train(resume_from_checkpoint=checkpoint if checkpoint is not None else found)
    trainer.save_model()
    keep(trainer, "train", result.metrics, num_samples)
    trainer.save_state()


def keep(trainer, part, metrics, num_samples=None):
    if num_samples is not None:
        metrics[f"{part}_samples"] = num_samples
    trainer.log_metrics(part, metrics)
    trainer.save_metrics(part, metrics)


def count(rows, limit):
    """The number of rows that the limit leaves; the limit itself for a stream."""
    if not hasattr(rows, "__len__"):
        return limit
    return len(rows) if limit is None else min(limit, len(rows))


def finish(trainer, task, model_args, data_args, **more):
    """Write the model card, or publish the model with it."""
    card = {"finetuned_from": model_args.model_name_or_path, "tasks": task, **more}
    if data_args.dataset_name is not None:
        card["dataset_tags"] = data_args.dataset_name
        card["dataset"] = data_args.dataset_name
        if data_args.dataset_config_name is not None:
            card["dataset_args"] = data_args.dataset_config_name
            card["dataset"] = f"{data_args.dataset_name} {data_args.dataset_config_name}"
    if trainer.args.push_to_hub:
        trainer.push_to_hub(**card)
    else:
        trainer.create_model_card(**card)
