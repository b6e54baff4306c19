"""Megatron Bridge's keys of the section `model` that are not Onstep's, by what they are."""

from __future__ import annotations

from onstep.config.bridge.rules import Either, Rule, neutral, without_effect
from onstep.config.later_parts import LATER_PARTS

_SHARD = LATER_PARTS["expert_model_parallel_size"].remedy
OTHER_MODEL = "choose a model of the Llama, Qwen2, Qwen3 or GPT-2 family, or pass a module of your own to `train()`"

PARALLELISM: dict[str, Rule] = {
    **neutral(
        "experts are divided as the rest of a layer is, and no further",
        _SHARD,
        {"moe_extended_tp": False},
    ),
    **without_effect(
        "it chooses kernels of tensor parallelism, which torch chooses here",
        {
            "async_tensor_model_parallel_allreduce": True,
            "tp_comm_overlap": False,
            "tp_comm_overlap_cfg": None,
            "tp_comm_bulk_wgrad": True,
            "tp_comm_bulk_dgrad": True,
            "tp_comm_overlap_ag": True,
            "tp_comm_overlap_rs": True,
            "tp_comm_overlap_rs_dgrad": False,
            "tp_comm_split_ag": True,
            "tp_comm_atomic_ag": False,
            "tp_comm_split_rs": True,
            "tp_comm_atomic_rs": False,
            "tp_comm_overlap_disable_qkv": False,
            "tp_comm_overlap_disable_fc1": False,
            "tp_comm_bootstrap_backend": "nccl",
            "tp_only_amax_red": False,
            "parallel_output": True,
            "scatter_embedding_sequence_parallel": True,
            "clone_scatter_output_in_embedding": True,
            "distribute_saved_activations": False,
            "symmetric_ar_type": None,
            "inference_fuse_tp_communication": False,
        },
    ),
    **neutral(
        "stages of a pipeline have as many layers each, or those of a list",
        "set parallel.pipeline_model_parallel_layout",
        {
            "num_layers_in_first_pipeline_stage": None,
            "num_layers_in_last_pipeline_stage": None,
            "num_microbatches_with_partial_activation_checkpoints": None,
            "mtp_standalone": False,
        },
    ),
    **without_effect(
        "it acts only with pipeline parallelism",
        {
            "pipeline_dtype": None,
            "pipeline_model_parallel_comm_backend": None,
            "variable_seq_lengths": False,
            "overlap_p2p_comm": False,
            "batch_p2p_comm": True,
            "batch_p2p_sync": True,
            "use_ring_exchange_p2p": False,
            "deallocate_pipeline_outputs": True,
            "defer_embedding_wgrad_compute": False,
            "wgrad_deferral_limit": 0,
            "overlap_p2p_comm_warmup_flush": False,
            "microbatch_group_size_per_vp_stage": None,
        },
    ),
    **neutral(
        "context parallelism is not supported",
        "shorten model.seq_length, or save memory with model.recompute_granularity=full",
        {"hybrid_context_parallel": False},
    ),
    **without_effect(
        "it acts only with context parallelism",
        {"cp_comm_type": None, "hierarchical_context_parallel_sizes": None, "max_seqlen_per_dp_cp_rank": None},
    ),
    **without_effect(
        "it acts only with expert parallelism",
        {
            "moe_token_dispatcher_type": "allgather",
            "moe_enable_deepep": False,
            "moe_flex_dispatcher_backend": "deepep",
            "moe_deepep_num_sms": 20,
            "moe_hybridep_num_sms": 16,
            "moe_shared_expert_overlap": False,
            "overlap_moe_expert_parallel_comm": False,
            "ep_overlap_early_attn_memory_release": False,
            "delay_wgrad_compute": False,
        },
    ),
}
"""How a model is split over ranks."""

PRECISION: dict[str, Rule] = {
    **neutral(
        "8-bit and 4-bit floating point are not supported",
        "set mixed_precision=bf16_mixed",
        {
            "fp8": None,
            "fp8_param": False,
            "fp8_quantizer_factory": None,
            "fp4": None,
            "fp4_param": False,
            "fp4_quantizer_factory": None,
            "quant_recipe": None,
            "use_kitchen": False,
            "use_kitchen_attention": False,
            "restore_modelopt_state": False,
        },
    ),
    **without_effect(
        "it acts only with fp8, fp4 or a quantized model",
        {
            "fp8_recipe": "delayed",
            "fp8_margin": 0,
            "fp8_interval": 1,
            "fp8_amax_history_len": 1,
            "fp8_amax_compute_algo": "most_recent",
            "fp8_wgrad": True,
            "fp8_dot_product_attention": False,
            "fp8_multi_head_attention": False,
            "fp4_recipe": "nvfp4",
            "activation_func_fp8_input_store": False,
            "first_last_layers_bf16": False,
            "num_layers_at_start_in_bf16": 1,
            "num_layers_at_end_in_bf16": 1,
            "kitchen_attention_backend": "sdpa",
            "moe_router_padding_for_fp8": False,
            "moe_router_padding_for_quantization": False,
        },
    ),
    **without_effect(
        "mixed_precision is the precision of a step (autocast)",
        {"autocast_dtype": None, "enable_autocast": False},
    ),
    **without_effect(
        "softmax, loss, router and residual stream are float32 already",
        {"attention_softmax_in_fp32": False, "fp32_residual_connection": False, "moe_router_dtype": None},
    ),
    **neutral(
        "the loss is always computed in float32",
        "leave it out",
        {"fp16_lm_cross_entropy": False},
    ),
    **neutral(
        "it is a switch of torch for the whole process",
        "set torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction=False in the script",
        {"disable_bf16_reduced_precision_matmul": False},
    ),
}
"""Numbers of fewer bits."""

MEMORY_AND_SPEED: dict[str, Rule] = {
    **neutral(
        "recomputing the first layers, groups of layers or chosen modules is not supported",
        "set model.recompute_granularity=full, with model.recompute_interval for every n-th layer, or selective",
        {
            "recompute_method": Either.of(None, "uniform"),
            "recompute_num_layers": Either.of(None, 1),
            "recompute_modules": Either.of(None, [], ["core_attn"]),
            "moe_layer_recompute": False,
        },
    ),
    **neutral(
        "Megatron's offloading of layers is not supported",
        "set model.offload_activations=true, which offloads the activations of all layers",
        {"cpu_offloading": False, "fine_grained_activation_offloading": False},
    ),
    **without_effect(
        "it acts only with offloading",
        {
            "cpu_offloading_num_layers": 0,
            "cpu_offloading_activations": True,
            "cpu_offloading_weights": False,
            "cpu_offloading_double_buffering": False,
            "offload_modules": None,
            "min_offloaded_tensor_size": 1_048_576,
        },
    ),
    **neutral(
        "Megatron's CUDA graphs are not supported",
        "set train.torch_compile=true and train.torch_compile_mode=reduce-overhead, by which torch captures them",
        {"cuda_graph_impl": Either.of("none", None), "enable_cuda_graph": False, "external_cuda_graph": False},
    ),
    **without_effect(
        "it acts only with CUDA graphs",
        {
            "cuda_graph_scope": "full",
            "cuda_graph_warmup_steps": 3,
            "cuda_graph_use_single_mempool": False,
            "cuda_graph_retain_backward_graph": False,
            "use_te_rng_tracker": False,
        },
    ),
    **without_effect(
        "it chooses kernels that compute the same; torch's are used",
        {
            "transformer_impl": "transformer_engine",
            "attention_backend": None,
            "cross_entropy_loss_fusion": True,
            "cross_entropy_fusion_impl": "native",
            "gradient_accumulation_fusion": False,
            "bias_activation_fusion": False,
            "bias_dropout_fusion": False,
            "masked_softmax_fusion": True,
            "apply_rope_fusion": False,
            "fused_single_qkv_rope": False,
            "persist_layer_norm": False,
            "memory_efficient_layer_norm": False,
            "use_fused_weighted_squared_relu": False,
            "use_te_activation_func": False,
            "use_transformer_engine_full_layer_spec": False,
            "use_transformer_engine_op_fuser": False,
            "disable_parameter_transpose_cache": False,
            "moe_permute_fusion": False,
            "moe_router_fusion": False,
            "moe_use_legacy_grouped_gemm": False,
        },
    ),
}
"""How a model is computed, with the same result."""
