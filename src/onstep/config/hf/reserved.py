"""The names of Hugging Face and Forgather that have no effect here: only their defaults are accepted."""

from __future__ import annotations

from dataclasses import Field, dataclass, field, fields
from typing import Any, TypeVar

from onstep.config.hf.argument import DECLARED, KEY_OF, Anything, declares_arguments
from onstep.errors import ConfigError

T = TypeVar("T")

_SHARDED = "models are sharded by torch's fully_shard: pass fsdp=True"


def reserved(default: T, reason: str = "", *, same: tuple[Any, ...] = ()) -> T:
    """A field that has no effect: only its default is accepted, and the `same` in Hugging Face's `to_dict()`.

    `reason` is an explanation or an alternative, where 'not supported yet' is not enough.
    """
    return field(default=default, metadata={"reason": reason, "same": same})


@declares_arguments
@dataclass(kw_only=True)
class ReservedArguments:
    """Hugging Face's and Forgather's names that have no effect here; Hugging Face's first, in its order."""

    average_tokens_across_devices: bool = reserved(True, "the loss is the mean over the tokens of all ranks")
    trackio_static_space_id: Anything = reserved(
        None,
        "a run is logged to the Space of trackio_space_id as it goes; to freeze that afterwards: trackio freeze",
        same=(False,),
    )
    ignore_data_skip: bool = reserved(False, "a resumed run continues at the very sample where it stopped")
    dataloader_in_order: bool = reserved(
        True, "batches are always trained on in their order, which a resumed run has again"
    )
    deepspeed: Anything = reserved(None, _SHARDED)

    epoch_train_steps: int = reserved(100000, "give the length of a run over data without a length as max_steps")
    gc_threshold: float = 0.5
    """Accepted at its default only; `train.manual_gc` collects garbage at fixed steps."""
    save_safetensors: bool = reserved(
        True, "weights are safetensors, never a pickle; to convert: torch.save(safetensors.torch.load_file(...), ...)"
    )
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
    """Refuse (ConfigError) any other value of a reserved name than its default."""
    for one in reserved_fields():
        value = getattr(arguments, one.name)
        if value == one.default or any(value == same for same in DECLARED.get(one.name, {}).get("same", ())):
            continue
        reason = f" ({REASONS[one.name]})" if one.name in REASONS else ""
        raise ConfigError(
            f"TrainingArguments.{one.name}={value!r} is not supported yet{reason}; "
            f"leave it at its default {one.default!r}."
        )
