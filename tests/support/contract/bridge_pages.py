"""What Megatron Bridge's pages `training.train` and `training.utils.train_utils` document, as tables."""

from __future__ import annotations

TRAIN = {
    "train": (
        "forward_step_func, model, optimizer, scheduler, train_data_iterator, valid_data_iterator, global_state, "
        "checkpoint_manager, pg_collection, process_non_loss_data_func=None, non_loss_data_func=None, "
        "callback_manager=None"
    ),
    "train_step": "forward_step_func, data_iterator, model, optimizer, scheduler, global_state",
    "post_training_step_callbacks": (
        "model, num_floating_point_operations_since_last_log_event, straggler_timer, iteration, prof, config, "
        "should_toggle_forward_pre_hook, nsys_nvtx_context=None"
    ),
    "should_disable_forward_pre_hook": "use_megatron_fsdp, use_distributed_optimizer, overlap_param_gather",
    "enable_forward_pre_hook": "model",
    "disable_forward_pre_hook": "model, param_sync=True",
    "get_start_time_from_progress_log": "cfg",
    "compute_throughputs_and_append_to_progress_log": "state, num_floating_point_operations_so_far",
    "save_checkpoint_and_time": (
        "state, model, optimizer, opt_param_scheduler, num_floating_point_operations_so_far, checkpointing_context, "
        "non_persistent_ckpt=False, train_data_iterator=None"
    ),
    "checkpoint_and_decide_exit": (
        "state, model, optimizer, opt_param_scheduler, num_floating_point_operations_so_far, checkpointing_context, "
        "train_data_iterator"
    ),
    "_finish_train": "global_state",
    "_handle_mxfp8_param_buffer_copy": "optimizer, reuse_grad_buf_for_mxfp8_param_ag, overlap_param_gather",
}
"""The functions of the page `training.train` and their parameters; those of `train` are its newer ones, which accept a
call of the page, too."""

TRAIN_UTILS = {
    "LinearForLastLayer": "input_size, output_size, sequence_parallel",
    "LinearForLastLayer.forward": "self, input_, weight=None, runtime_gather_output=None",
    "create_value_head_hook": "hidden_size, sequence_parallel, output_size=1",
    "make_value_model": "hidden_size, sequence_parallel",
    "freeze_moe_router": "model",
    "_ensure_model_list": "model",
    "_freeze_parameter_if_present": "module, name",
    "_register_linear_for_last_layer_mapping": "",
    "start_memory_history_recording": "profiling",
    "param_is_not_shared": "param",
    "calc_params_l2_norm": "model, model_config, use_megatron_fsdp=False, force_create_fp32_copy=False",
    "calc_dtensor_params_l2_norm": "params",
    "reduce_max_stat_across_model_parallel_group": "stat, mp_group",
    "logical_and_across_model_parallel_group": "input, mp_group",
    "reduce_max_memory_across_pp_group": "memory_report, pp_group",
    "_MoeMetricFanoutWriter": "tb_writer, comet_logger, mlflow_logger",
    "_MoeMetricFanoutWriter._sanitize": "value",
    "_MoeMetricFanoutWriter.add_scalar": "self, name, value, iteration",
    "_build_moe_metric_writer": "tb_writer, comet_logger, mlflow_logger",
    "training_log": (
        "loss_dict, total_loss_dict, learning_rate, decoupled_learning_rate, loss_scale, report_memory_flag, "
        "skipped_iter, grad_norm, params_norm, num_zeros_in_grad, config, global_state, history_wct, model, "
        "pg_collection=None, log_max_attention_logit=None, loaded_iteration=0, seq_length=None"
    ),
    "report_memory": "memory_keys",
    "report_l2_norm_grad": "model",
    "report_runtime": "train_state, start_time, seq_length, train_iters, time_unit='seconds'",
    "report_throughput": "train_config, iteration, seq_length, history_wct, window_size",
    "prepare_forward_step_func": "forward_step_func, state",
    "needs_global_state_injection": "forward_step_func",
    "maybe_inject_state": "forward_step_func, state, needs_injection=None",
}
"""The functions, classes and methods of the page `training.utils.train_utils` and their parameters."""

DATA = ("MEMORY_KEYS", "ModelList", "ModelHook")
"""What the second page names beside them. Its `logger` is each module's own."""

TRAIN_STEP_RESULT = (
    "loss_dict",
    "skipped_iter",
    "should_checkpoint",
    "should_exit",
    "exit_code",
    "grad_norm",
    "num_zeros_in_grad",
)
"""What `train_step` returns, in order."""

BASES = {"LinearForLastLayer": "Linear"}
"""Documented base classes."""
