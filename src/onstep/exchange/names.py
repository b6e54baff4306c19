"""The table of exchanged names: which of `transformers` are Onstep's after the exchange, and which remain its own."""

from __future__ import annotations

NAMES: dict[str, dict[str, str]] = {
    "transformers.trainer": {"Trainer": "onstep.trainer:Trainer"},
    "transformers.trainer_seq2seq": {"Seq2SeqTrainer": "onstep.trainer:Seq2SeqTrainer"},
    "transformers.training_args": {
        "ParallelMode": "onstep.config.hf.process:ParallelMode",
        "TrainingArguments": "onstep.config:TrainingArguments",
    },
    "transformers.training_args_seq2seq": {"Seq2SeqTrainingArguments": "onstep.config:Seq2SeqTrainingArguments"},
    "transformers.trainer_callback": {
        "TrainerCallback": "onstep.events:TrainerCallback",
        "TrainerControl": "onstep.events:TrainerControl",
        "TrainerState": "onstep.events:TrainerState",
        "ExportableState": "onstep.events:ExportableState",
        "CallbackHandler": "onstep.trainer.callback_handler:CallbackHandler",
        "DefaultFlowCallback": "onstep.events:DefaultFlowCallback",
        "EarlyStoppingCallback": "onstep.callbacks:EarlyStoppingCallback",
        "PrinterCallback": "onstep.callbacks:PrinterCallback",
        "ProgressCallback": "onstep.callbacks:ProgressCallback",
    },
    "transformers.trainer_utils": {
        "EvalLoopOutput": "onstep.trainer:EvalLoopOutput",
        "EvalPrediction": "onstep.trainer:EvalPrediction",
        "PredictionOutput": "onstep.trainer:PredictionOutput",
        "TrainOutput": "onstep.trainer:TrainOutput",
    },
    "transformers.trainer_pt_utils": {
        "AcceleratorConfig": "onstep.config.hf.accelerator:AcceleratorConfig",
        "LabelSmoother": "onstep.trainer.computing.label_smoothing:LabelSmoother",
    },
}
"""Module that defines a name -> name -> its replacement, as `module:name`.

What imports a name from another place, such as `transformers` itself, gets the same object.
"""

KEPT: dict[str, str] = {
    "transformers.trainer": "DEFAULT_CALLBACKS DEFAULT_PROGRESS_CALLBACK FSDP_MODEL_NAME OPTIMIZER_NAME "
    "OPTIMIZER_NAME_BIN SCALER_NAME SCHEDULER_NAME TRAINER_STATE_NAME TRAINING_ARGS_NAME",
    "transformers.trainer_utils": "BestRun FSDPOption HPSearchBackend HubStrategy IntervalStrategy "
    "PREFIX_CHECKPOINT_DIR RemoveColumnsCollator SaveStrategy SchedulerType TrainerMemoryTracker align_special_tokens "
    "check_target_module_exists compare_trainer_and_checkpoint_args default_compute_objective default_hp_space_optuna "
    "default_hp_space_ray default_hp_space_wandb denumpify_detensorize enable_full_determinism "
    "find_executable_batch_size get_last_checkpoint has_length is_main_process load_sharded_checkpoint "
    "number_of_arguments rotate_checkpoints seed_worker set_seed sort_checkpoints speed_metrics suppress_progress_bars "
    "total_processes_number unwrap_peft_model validate_quantization_for_training",
    "transformers.trainer_pt_utils": "BatchRebalanceSampler DistributedLengthGroupedSampler "
    "DistributedSamplerWithLoop EvalLoopContainer IterableDatasetShard LayerWiseDummyOptimizer LayerWiseDummyScheduler "
    "LengthGroupedSampler ShardSampler atleast_1d distributed_broadcast_scalars distributed_concat expand_like "
    "find_batch_size get_dataloader_sampler get_learning_rates get_length_grouped_indices get_model_param_count "
    "get_module_class_from_name get_num_trainable_parameters get_optimizer_group get_parameter_names get_tpu_sampler "
    "is_attention_mask_causal log_metrics metrics_format nested_concat nested_detach nested_gather nested_new_like "
    "nested_numpify nested_truncate nested_xla_mesh_reduce numpy_pad_and_concatenate reissue_pt_warnings "
    "remove_dummy_checkpoint safe_globals save_metrics save_state set_rng_state_for_device "
    "torch_distributed_zero_first torch_pad_and_concatenate",
    "transformers.training_args": "OptimizerNames log_levels str_to_bool trainer_log_levels",
}
"""The other public names of these modules, which remain those of transformers 5.23."""


def number_of_names() -> int:
    """How many names are exchanged."""
    return sum(map(len, NAMES.values()))
