"""Declares the arguments for devices, precision, data parallelism and how the model computes."""

from __future__ import annotations

from dataclasses import dataclass

from onstep.config.hf.argument import Anything, Texts, Values, argument, declares_arguments


@declares_arguments
@dataclass(kw_only=True)
class ComputeArguments:
    """Devices, precision, data parallelism, and how the model computes."""

    bf16: bool = False
    """bfloat16 autocast over float32 weights."""
    fp16: bool = False
    """float16 autocast over float32 weights, with a dynamic loss scale (`optimizer.loss_scale`, ... in
    `config_overrides`)."""
    mixed_precision: str | None = argument(None, choices=(None, "no", "bf16", "fp16"))
    """Forgather's spelling of `bf16` and `fp16`: None | no | bf16 | fp16."""
    use_cpu: bool = False
    """Whether the CPU is used, even where there is an accelerator."""
    local_rank: int = -1
    """Accepted for old launchers; the rank is `local_process_index`."""
    ddp_find_unused_parameters: bool | None = None
    """None is False, for any model."""
    ddp_bucket_cap_mb: int | None = None
    """Size of a bucket of gradients that ranks exchange at once, in MiB; None for the default."""
    ddp_broadcast_buffers: bool | None = None
    """None is False."""
    ddp_backend: str | None = None
    ddp_timeout: int = argument(1800, bound="> 0")
    """Seconds."""
    ddp_static_graph: bool | None = None
    """None is False."""
    fsdp: Anything = None
    """Divide the model between the ranks by torch's `fully_shard` (FSDP2): True, or options in a text or a list, such
    as "full_shard auto_wrap", `shard_grad_op`, `hybrid_shard` and `offload`. Becomes True."""
    fsdp_config: Anything = None
    """How, as a dictionary or a JSON file, with or without the prefix `fsdp_`: reshard_after_forward, cpu_offload,
    transformer_layer_cls_to_wrap, activation_checkpointing, forward_prefetch, ... What has no effect is refused."""
    parallelism_config: Anything = None
    """accelerate's `ParallelismConfig`, or a dictionary: the number of ranks along each axis, as dp_replicate_size and
    dp_shard_size."""
    tf32: bool | None = None
    """TensorFloat-32 for float32 products on a GPU during a run, as `train.tf32`; None leaves torch's setting."""
    full_determinism: bool = False
    """Only deterministic algorithms of torch during a run, as `train.deterministic`."""
    torch_compile: bool = False
    """Compile the model; its weights keep their names."""
    torch_compile_backend: str | None = None
    """Backend of `torch.compile`; None is inductor. Sets `torch_compile`, and so does the mode."""
    torch_compile_mode: str | None = None
    activation_checkpointing: bool | None = None
    """Recompute activations in the backward pass, by the model's own `activation_checkpointing_enable` or
    `gradient_checkpointing_enable`. None is False."""
    activation_checkpointing_kwargs: Values | None = None
    """Passed on; also `every_n_layers` and `offload`, for models of `transformers`."""
    gradient_checkpointing: bool | None = None
    """The earlier name of `activation_checkpointing`."""
    gradient_checkpointing_kwargs: Values | None = None
    """Keywords of `torch.utils.checkpoint.checkpoint`, such as `use_reentrant`."""
    use_cache: bool = False
    """The model's `config.use_cache`."""
    use_liger_kernel: bool = False
    """Replace layers of a `transformers` model by those of the package liger-kernel."""
    liger_kernel_config: Values | None = None
    """Which of them, as keywords of liger-kernel."""
    label_smoothing_factor: float = argument(0.0, bound="from 0 to 1")
    """Share of the loss that is spread evenly over all classes; 0 uses the model's own loss."""
    neftune_noise_alpha: float | None = None
    """Size of the noise that is added to embeddings in training (NEFTune); None adds none."""
    torch_empty_cache_steps: int | None = None
    """Steps between releases of a GPU's unused memory, before a backward pass; None never releases it."""
    auto_find_batch_size: bool = False
    """On running out of memory, start again with nine tenths of `per_device_train_batch_size`. One process only."""
    debug: Texts = ""
    """underflow_overflow: end the run at the first infinite or NaN value in a layer. Becomes a list."""
