"""The names of Hugging Face and Forgather that have no effect here: only their defaults are accepted."""

from __future__ import annotations

from dataclasses import Field, dataclass, field, fields
from typing import Any, TypeVar

from onstep.config.hf.argument import DECLARED, KEY_OF, Choice, declares_arguments
from onstep.errors import ConfigError

T = TypeVar("T")

_SHARDING = "sharded training comes with a later version"
_HUB = "nothing is uploaded; push the directory of the final weights yourself"
_COMPILE = "pass a compiled model instead"

_DEFAULT_ACCELERATOR: dict[str, Any] = {
    "split_batches": False,
    "dispatch_batches": None,
    "even_batches": True,
    "use_seedable_sampler": True,
    "non_blocking": False,
    "gradient_accumulation_kwargs": None,
}


def reserved(default: T, reason: str = "", *, same: tuple[Any, ...] = ()) -> T:
    """A field that has no effect: only its default is accepted, and the `same` in Hugging Face's `to_dict()`.

    `reason` is an explanation or an alternative, where 'not supported yet' is not enough.
    """
    return field(default=default, metadata={"reason": reason, "same": same})


@declares_arguments
@dataclass(kw_only=True)
class ReservedArguments:
    """Hugging Face's and Forgather's names that have no effect here; Hugging Face's first, in its order."""

    optim_args: Any = reserved(
        None, "set options of the optimizer in config_overrides, such as {'optimizer.sgd_momentum': 0.9}"
    )
    optim_target_modules: Any = None
    average_tokens_across_devices: bool = reserved(True, "the loss is the mean over the tokens of all ranks")
    label_smoothing_factor: float = 0.0
    bf16_full_eval: bool = False
    fp16_full_eval: bool = False
    tf32: bool | None = None
    activation_checkpointing: bool | None = reserved(None, same=(False,))
    activation_checkpointing_kwargs: Any = None
    gradient_checkpointing: bool | None = reserved(None, same=(False,))
    gradient_checkpointing_kwargs: Any = None
    torch_compile: bool = reserved(False, _COMPILE)
    torch_compile_backend: str | None = reserved(None, _COMPILE)
    torch_compile_mode: str | None = reserved(None, _COMPILE)
    use_liger_kernel: bool = False
    liger_kernel_config: Any = None
    use_cache: bool = False
    neftune_noise_alpha: float | None = None
    torch_empty_cache_steps: int | None = None
    auto_find_batch_size: bool = False
    logging_nan_inf_filter: bool = reserved(True, same=(False,))
    include_num_input_tokens_seen: Choice = reserved("no", same=(False, "False", "false"))
    log_level_replica: str = "warning"
    trackio_static_space_id: Any = None
    eval_do_concat_batches: bool = True
    eval_use_gather_object: bool = False
    batch_eval_metrics: bool = False
    save_on_each_node: bool = reserved(False, "checkpoints are on storage that all nodes see")
    push_to_hub: bool = reserved(False, _HUB)
    hub_token: str | None = reserved(None, _HUB, same=("<HUB_TOKEN>",))
    hub_private_repo: bool | None = None
    hub_model_id: str | None = None
    hub_strategy: str = "every_save"
    hub_always_push: bool = False
    hub_revision: str | None = None
    ignore_data_skip: bool = reserved(False, "a resumed run continues at the very sample where it stopped")
    full_determinism: bool = False
    accelerator_config: Any = reserved(None, same=(_DEFAULT_ACCELERATOR, {}))
    parallelism_config: Any = reserved(None, _SHARDING)
    dataloader_prefetch_factor: int | None = None
    dataloader_multiprocessing_context: str | None = None
    dataloader_in_order: bool = True
    length_column_name: str = "length"
    ddp_static_graph: bool | None = reserved(None, same=(False,))
    fsdp: Any = reserved(None, _SHARDING, same=("", False, []))
    fsdp_config: Any = reserved(None, _SHARDING, same=({},))
    deepspeed: Any = reserved(None, _SHARDING)
    debug: str = reserved("", same=(None, []))
    skip_memory_metrics: bool = True

    epoch_train_steps: int = reserved(100000, "give the length of a run over data without a length as max_steps")
    gc_threshold: float = 0.5
    save_safetensors: bool = reserved(True, "checkpoints hold safetensors and JSON, never a pickle")
    fuse_optim_with_backward: bool = reserved(False, "the update follows the whole backward pass")
    speed_metrics_start_step: int = reserved(1, "the speed of a run is measured from the end of its first step")
    set_dataset_epoch: bool = reserved(True, "set_epoch of a dataset is called for every epoch")


def reserved_fields() -> list[Field[Any]]:
    """The fields without an effect. A field that a key declares as its `hf` name has one, so it is not included."""
    return [one for one in fields(ReservedArguments) if one.name not in KEY_OF]


REASONS = {
    one.name: DECLARED[one.name]["reason"] for one in reserved_fields() if DECLARED.get(one.name, {}).get("reason")
}


def check_reserved(arguments: ReservedArguments) -> None:
    """Refuse (ConfigError) any other value of a reserved name than its default; a token is not shown."""
    for one in reserved_fields():
        value = getattr(arguments, one.name)
        if value == one.default or any(value == same for same in DECLARED.get(one.name, {}).get("same", ())):
            continue
        shown = "<hidden>" if one.name.endswith("_token") else repr(value)
        reason = f" ({REASONS[one.name]})" if one.name in REASONS else ""
        raise ConfigError(
            f"TrainingArguments.{one.name}={shown} is not supported yet{reason}; "
            f"leave it at its default {one.default!r}."
        )
