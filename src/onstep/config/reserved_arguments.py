"""The names of `TrainingArguments` that Onstep does not implement (yet): accepted at their default, else refused."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from onstep.errors import ConfigError

_SHARDING = "sharded training comes with a later version"
_HUB = "nothing is uploaded; push the folder of the final weights yourself"
_COMPILE = "pass a compiled model instead"

REASONS = {
    "ignore_data_skip": "a resumed run goes on at the very sample where it was",
    "save_on_each_node": "checkpoints are on storage that all nodes see",
    "save_safetensors": "checkpoints hold safetensors and JSON, never a pickle",
    "fsdp": _SHARDING,
    "fsdp_config": _SHARDING,
    "deepspeed": _SHARDING,
    "parallelism_config": _SHARDING,
    "push_to_hub": _HUB,
    "hub_token": _HUB,
    "torch_compile": _COMPILE,
    "torch_compile_backend": _COMPILE,
    "torch_compile_mode": _COMPILE,
    "optim_args": "what the optimizer takes is in config_overrides, such as {'optimizer.sgd_momentum': 0.9}",
    "average_tokens_across_devices": "the loss is the mean over the tokens of all ranks",
    "overwrite_output_dir": "config_overrides={'run.fresh': True} starts a new run beside the old one",
    "epoch_train_steps": "give the length of a run over data without a length as max_steps",
    "fuse_optim_with_backward": "the update follows the whole backward pass",
    "speed_metrics_start_step": "the speed of a run is measured from the end of its first step",
    "set_dataset_epoch": "a dataset with set_epoch is told the epoch",
}
"""Why, or what to do instead, where there is more to say than 'not supported yet'."""

_DEFAULT_ACCELERATOR: dict[str, Any] = {
    "split_batches": False,
    "dispatch_batches": None,
    "even_batches": True,
    "use_seedable_sampler": True,
    "non_blocking": False,
    "gradient_accumulation_kwargs": None,
}

HARMLESS: dict[str, tuple[Any, ...]] = {
    "debug": (None, []),
    "fsdp": ("", False, []),
    "fsdp_config": ({},),
    "accelerator_config": (_DEFAULT_ACCELERATOR, {}),
    "activation_checkpointing": (False,),
    "gradient_checkpointing": (False,),
    "ddp_static_graph": (False,),
    "include_num_input_tokens_seen": (False,),
    "logging_nan_inf_filter": (False,),
    "hub_token": ("<HUB_TOKEN>",),
}
"""Values that mean the same as the default, such as those that Hugging Face's own `to_dict()` writes."""


@dataclass(kw_only=True)
class ReservedArguments:
    """Hugging Face's and Forgather's names with no effect here. Hugging Face's first, in its order."""

    optim_args: Any = None
    optim_target_modules: Any = None
    average_tokens_across_devices: bool = True
    label_smoothing_factor: float = 0.0
    bf16_full_eval: bool = False
    fp16_full_eval: bool = False
    tf32: bool | None = None
    activation_checkpointing: bool | None = None
    activation_checkpointing_kwargs: Any = None
    gradient_checkpointing: bool | None = None
    gradient_checkpointing_kwargs: Any = None
    torch_compile: bool = False
    torch_compile_backend: str | None = None
    torch_compile_mode: str | None = None
    use_liger_kernel: bool = False
    liger_kernel_config: Any = None
    use_cache: bool = False
    neftune_noise_alpha: float | None = None
    torch_empty_cache_steps: int | None = None
    auto_find_batch_size: bool = False
    logging_nan_inf_filter: bool = True
    include_num_input_tokens_seen: Any = "no"
    log_level_replica: str = "warning"
    trackio_static_space_id: Any = None
    eval_do_concat_batches: bool = True
    eval_use_gather_object: bool = False
    batch_eval_metrics: bool = False
    save_on_each_node: bool = False
    push_to_hub: bool = False
    hub_token: str | None = None
    hub_private_repo: bool | None = None
    hub_model_id: str | None = None
    hub_strategy: str = "every_save"
    hub_always_push: bool = False
    hub_revision: str | None = None
    ignore_data_skip: bool = False
    full_determinism: bool = False
    accelerator_config: Any = None
    parallelism_config: Any = None
    dataloader_prefetch_factor: int | None = None
    dataloader_multiprocessing_context: str | None = None
    dataloader_in_order: bool = True
    length_column_name: str = "length"
    ddp_static_graph: bool | None = None
    fsdp: Any = None
    fsdp_config: Any = None
    deepspeed: Any = None
    debug: Any = ""
    skip_memory_metrics: bool = True

    overwrite_output_dir: bool = False
    epoch_train_steps: int = 100000
    gc_threshold: float = 0.5
    save_safetensors: bool = True
    fuse_optim_with_backward: bool = False
    speed_metrics_start_step: int = 1
    set_dataset_epoch: bool = True


def check_reserved(arguments: ReservedArguments) -> None:
    """Refuse every reserved name that has another value than its default.

    Raises:
        ConfigError: naming the first one; the value of a token is not shown.
    """
    for field in fields(ReservedArguments):
        value = getattr(arguments, field.name)
        if value == field.default or any(value == same for same in HARMLESS.get(field.name, ())):
            continue
        shown = "<hidden>" if field.name.endswith("_token") else repr(value)
        reason = f" ({REASONS[field.name]})" if field.name in REASONS else ""
        raise ConfigError(
            f"TrainingArguments.{field.name}={shown} is not supported yet{reason}; "
            f"leave it at its default {field.default!r}."
        )
