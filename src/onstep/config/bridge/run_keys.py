"""Megatron Bridge's keys of runs that are not Onstep's, by what they are."""

from __future__ import annotations

from onstep.config.bridge.rules import Either, Rule, neutral, without_effect
from onstep.config.bridge.values import TARGET

_CONFIG = "megatron.bridge.training.config"
_FLOAT32 = Either.of("torch.float32")
_FSDP2 = "set dist.use_torch_fsdp2=true, which divides the model between the ranks by torch's FSDP2"
_OVERLAP = "communication overlaps with the backward pass in any case; the numbers are the same"

VALIDATION = {
    **neutral(
        "an evaluation reads validation.eval_iters batches of one set",
        "set validation.eval_iters=null, which reads the whole split",
        {
            "full_validation": Either.of(False, None),
            "multiple_validation_sets": Either.of(False, None),
            "validation_set_names": Either.of(None, []),
        },
    ),
    **without_effect("nothing reads it there either", {"test_mode": False}),
}

TRAIN = without_effect(
    "worker processes of a loader ignore the signals in any case", {"exit_signal_handler_for_dataloader": False}
)

RNG = {
    **neutral(
        "every rank starts from the same weights",
        "leave it out",
        {"data_parallel_random_init": False},
    ),
    **without_effect("torch's own generators are used", {"te_rng_tracker": False, "inference_rng_tracker": False}),
}

DIST = {
    **neutral(
        "Megatron-FSDP is not supported",
        _FSDP2,
        {"use_megatron_fsdp": False},
    ),
    **neutral(
        "process groups are torch's, set up at the start",
        "leave it out, and set NCCL's environment variables in env_vars",
        {
            "lazy_init": False,
            "lazy_mpu_init": Either.of(False, None),
            "nccl_communicator_config_path": None,
            "use_sharp": False,
            "high_priority_stream_groups": Either.of(None, []),
            "external_gpu_device_mapping": False,
        },
    ),
    **without_effect(
        "it acts only in Megatron's own pipelines",
        {"align_grad_reduce": True, "use_tp_pp_dp_mapping": False, "use_decentralized_pg": False},
    ),
    **without_effect(
        "it is a detail of Megatron's set-up",
        {
            "local_rank": 0,
            "use_gloo_process_groups": True,
            "sharp_enabled_group": None,
            "enable_megatron_core_experimental": False,
            "disable_jit_fuser": False,
        },
    ),
}

DDP = {
    **neutral(
        "Megatron-FSDP is not supported",
        _FSDP2,
        {"use_megatron_fsdp": False, "use_custom_fsdp": False},
    ),
    **without_effect(
        "a model is one stage, whose gathers begin together; the numbers are the same",
        {"align_param_gather": False},
    ),
    **without_effect(
        _OVERLAP,
        {
            "delay_wgrad_compute": False,
            "pad_buckets_for_high_nccl_busbw": False,
            "suggested_communication_unit_size": None,
            "nccl_ub": False,
        },
    ),
    **without_effect(
        "gradients are averaged exactly, in the type that ddp.grad_reduce_in_fp32 and grad_reduce_in_bf16 say",
        {
            "average_in_collective": False,
            "reduce_scatter_with_fp32_accumulation": False,
            "gradient_reduce_div_fusion": True,
            "preserve_fp32_weights": True,
        },
    ),
    **without_effect(
        "it acts only with use_megatron_fsdp",
        {
            "data_parallel_sharding_strategy": "no_shard",
            "outer_dp_sharding_strategy": "no_shard",
            "fsdp_double_buffer": False,
            "fsdp_manual_registration": False,
            "disable_symmetric_registration": False,
            "keep_fp8_transpose_cache": False,
        },
    ),
}

OPTIMIZER = {
    **neutral(
        "gradients have the type of the weights",
        "leave it out; set optimizer.params_dtype, and ddp.grad_reduce_in_fp32 for their sums",
        {"main_grads_dtype": _FLOAT32},
    ),
    **neutral(
        "weight decay is decoupled (AdamW)",
        "pass an optimizer of your own to `train()`",
        {"decoupled_weight_decay": True},
    ),
    **neutral(
        "vectors are not decayed",
        "name the norms in optimizer.param_groups",
        {"apply_wd_to_qk_layernorm": False},
    ),
    **neutral(
        "the state of the optimizer stays on the device",
        "leave it out",
        {"optimizer_cpu_offload": False},
    ),
    **neutral(
        "query, key and value are matrices of their own, which Muon updates one by one",
        "leave it out",
        {"muon_split_qkv": True},
    ),
    **without_effect(
        "the state of the optimizer is not offloaded",
        {
            "optimizer_offload_fraction": 0.0,
            "use_torch_optimizer_for_cpu_offload": False,
            "overlap_cpu_optimizer_d2h_h2d": False,
            "pin_cpu_grads": True,
            "pin_cpu_params": True,
        },
    ),
    **without_effect(
        "the same key of `ddp`, which it enables, decides",
        {
            "use_distributed_optimizer": False,
            "overlap_param_gather": False,
            "overlap_param_gather_with_optimizer_step": False,
            "reuse_grad_buf_for_mxfp8_param_ag": False,
        },
    ),
    **without_effect(
        "master weights are always stored as the remainders of the weights, and need no other optimizer",
        {"store_param_remainders": True, "fp8_recipe": None},
    ),
    **without_effect(
        "Muon orthogonalizes whole matrices",
        {"muon_tp_mode": "blockwise"},
    ),
    **without_effect(
        "it is a detail of measurement there", {"barrier_with_L1_time": False, "timers": None, "config_logger_dir": ""}
    ),
}

SCHEDULER = {
    **neutral(
        "vectors are not decayed",
        "name the norms in optimizer.param_groups",
        {"no_weight_decay_cond_type": None},
    ),
    **without_effect(
        "it derives from other keys",
        {"lr_warmup_steps": None, "lr_decay_steps": None, "wd_incr_steps": None, "wsd_decay_steps": None},
    ),
}

CHECKPOINT = {
    **neutral(
        "checkpoints on local disks are not supported",
        "set checkpoint.non_persistent_save_interval, and checkpoint.non_persistent_place=memory for checkpoints in "
        "the memory of each node and a partner",
        {
            "non_persistent_ckpt_type": Either.of(None, "None", "global"),
            "non_persistent_global_ckpt_dir": None,
            "non_persistent_local_ckpt_dir": None,
            "replication": False,
        },
    ),
    **neutral(
        "weights are converted by a command",
        "run onstep checkpoint export",
        {"ckpt_convert_format": None, "ckpt_convert_save": None},
    ),
    **neutral(
        "the configuration is compared with the checkpoint's",
        "set checkpoint.on_config_change=keep, which uses the stored values",
        {"use_checkpoint_args": False},
    ),
    **neutral("the weights of the optimizer are the model's", "leave it out", {"load_main_params_from_ckpt": False}),
    **without_effect(
        "a checkpoint is safetensors and JSON, whole on any number of ranks",
        {
            "ckpt_format": "torch_dist",
            "fully_parallel_save": True,
            "fully_parallel_load": False,
            "async_strategy": "nvrx",
            "use_persistent_ckpt_worker": True,
            "ckpt_assume_constant_structure": False,
            "strict_fsdp_dtensor_load": False,
            "dist_ckpt_strictness": "assume_ok_unexpected",
            "dist_ckpt_optim_fully_reshardable": False,
            "distrib_optim_fully_reshardable_mem_efficient": False,
        },
    ),
    **neutral(
        "a manager of checkpoints of your own is not supported",
        "write files of your own in a callback's on_checkpoint_save",
        {"custom_manager_class": None},
    ),
    **neutral(
        "weights for transformers are written at the end of a run",
        "run onstep checkpoint export for those of a checkpoint",
        {"also_save_hf_checkpoint": False},
    ),
    **without_effect("a run keeps its tokenizer in its directory", {"save_tokenizer_assets": True}),
    **without_effect(
        "it acts only with checkpoints on local disks",
        {"non_persistent_local_ckpt_algo": "fully_parallel", "replication_jump": None, "replication_factor": 2},
    ),
}

LOGGER = {
    **neutral(
        "the levels of other loggers are the script's",
        "use Python's logging in the script",
        {"modules_to_filter": Either.of(None, []), "set_level_for_all_loggers": False},
    ),
    **neutral(
        "a run keeps its configuration in its directory",
        "set run.name, or call config.to_yaml(path)",
        {"save_config_filepath": None},
    ),
    **neutral(
        "gradients are counted by the section `optimizer`, logits by `model`",
        "set optimizer.log_num_zeros_in_grad or model.log_max_attention_logit",
        {"log_num_zeros_in_grad": False, "log_max_attention_logit": False},
    ),
    **neutral("a secret does not belong in a configuration", "set the variable COMET_API_KEY", {"comet_api_key": None}),
    **without_effect(
        "it is a detail of logging there",
        {
            "filter_warnings": True,
            "mlflow_log_artifacts": True,
            "log_memory_interval": None,
            "log_device_memory_used": False,
            "barrier_with_L1_time": True,
        },
    ),
}

NVRX_STRAGGLER = without_effect(
    "messages come from the logger `onstep`", {"logger_name": "megatron.bridge.NVRxStragglerDetection"}
)

PEFT = {
    **neutral(
        "LoRA is that of the `peft` library",
        "leave it out",
        {"dropout_position": "pre", "lora_B_init_method": "zero", "normalize_moe_lora": False},
    ),
    **without_effect(
        "LoRA is that of the `peft` library, in float32",
        {
            "lora_A_init_method": "xavier",
            "lora_dtype": None,
            "a2a_experimental": False,
            "network_alpha": None,
            "share_expert_adapters": True,
        },
    ),
}

BESIDE_SECTIONS: dict[str, Rule] = {
    **without_effect(_OVERLAP, {"comm_overlap": None}),
    **neutral(
        "a provider of the optimizer's settings is code",
        "write them to optimizer.param_groups",
        {"optimizer_config_override_provider": Either.of(None, {TARGET: f"{_CONFIG}.OptimizerConfigOverrideProvider"})},
    ),
    **neutral(
        "tensors are watched by callbacks",
        "add ParameterNormLogger, GradNormLogger or one of your own",
        {"tensor_inspect": None},
    ),
    **neutral(
        "a run is started again by its command",
        "use a launcher that restarts it, such as torchrun --max-restarts",
        {"inprocess_restart": None},
    ),
}
"""Keys beside the sections."""
