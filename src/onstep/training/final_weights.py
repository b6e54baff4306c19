"""What a run leaves for other programs: its weights as a Hugging Face folder, and LoRA's as one of `peft`."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from onstep.config.parts import PeftConfig
from onstep.errors import CheckpointError, ConfigError, OnstepError
from onstep.events.context import unwrap
from onstep.models import Transformer, hf_config_dict, hf_obstacle, save_hf
from onstep.training.lora import ADAPTER, has_lora, merged_model, projection_in_hf
from onstep.training.pretrained import find_pretrained
from onstep.training.run import Run
from onstep.training.run_folder import RunFolder

logger = logging.getLogger(__name__)

ADAPTER_WEIGHTS = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
_FUSED = ("gpt2",)
"""Models of `transformers` that keep several of our matrices in one, so that an adapter has no names there."""


def has_hf_names(model: Transformer) -> bool:
    """Whether `transformers` has a matrix of its own for each projection."""
    return hf_config_dict(model.config)["model_type"] not in _FUSED


def save_adapter(model: Transformer, config: PeftConfig, directory: str | Path, base_model: str | None) -> None:
    """Write what LoRA added to `directory`, so that `PeftModel.from_pretrained(base, directory)` opens it.

    Each file is replaced whole. One process calls this.

    Args:
        model: one that `add_lora` changed.
        config: what it was changed by.
        base_model: the Hugging Face folder that it goes on, as the file tells it; None where that is not known.
    """
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = _tensors(model)
    partial = folder / f"{ADAPTER_WEIGHTS}.partial"
    save_file(tensors, partial, metadata={"format": "pt"})
    os.replace(partial, folder / ADAPTER_WEIGHTS)
    described = _described(list(tensors), model.config.num_layers, config, base_model)
    partial = folder / f"{ADAPTER_CONFIG}.partial"
    partial.write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
    os.replace(partial, folder / ADAPTER_CONFIG)


def _tensors(model: Transformer) -> dict[str, Tensor]:
    """The added weights by `peft`'s names: the module's in `transformers`, and which of the two matrices."""
    found = {}
    for name, tensor in model.state_dict().items():
        module, matrix, _ = name.partition(".lora_")
        theirs = projection_in_hf(module)
        if matrix and theirs is not None:
            kind = name.removeprefix(module + matrix).partition(f".{ADAPTER}.")[0]
            found[f"base_model.model.{theirs}.lora_{kind}.weight"] = tensor.detach().cpu().contiguous()
    return found


def _described(names: list[str], num_layers: int, config: PeftConfig, base_model: str | None) -> dict[str, Any]:
    """`adapter_config.json`; the targets by the ends of their names where every layer has all of them."""
    modules = sorted({name.removeprefix("base_model.model.").partition(".lora_")[0] for name in names})
    ends = sorted({module.split(".", 3)[3] for module in modules})
    is_everywhere = len(modules) == len(ends) * num_layers
    alpha = int(config.alpha) if float(config.alpha).is_integer() else config.alpha
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "inference_mode": True,
        "r": config.dim,
        "lora_alpha": alpha,
        "lora_dropout": config.dropout,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "target_modules": [end.rpartition(".")[2] for end in ends] if is_everywhere else modules,
    }


def save_weights(state: Run, model: list[Any]) -> None:
    """Write the final weights to the run's folder, as a directory that Hugging Face opens, on rank 0.

    With LoRA these are the merged weights, and what was added goes to `adapter/`. A model that `transformers` has no
    class for is left to its checkpoints, with a warning.
    """
    write_final_weights(state, lambda folder: _save(state, unwrap(model[0])))


def write_final_weights(state: Run, write: Callable[[RunFolder], None]) -> None:
    """Call `write` on rank 0 where the run is to leave weights; `checkpoint.on_save_error` says what a failure does.

    Raises:
        CheckpointError: they could not be written, and `on_save_error` is stop.
    """
    folder = state.run_folder
    if folder is None or not state.world.is_main or not state.cfg.run.save_weights:
        return
    if state.control.should_abort_without_save or state.exits.decided is not None:
        return
    try:
        write(folder)
    except ConfigError as error:
        logger.warning(
            "the final weights are in the checkpoints only, where onstep generate and finetune read them: %s", error
        )
    except (OSError, SafetensorError) as error:
        message = (
            f"the final weights could not be written to {folder.model} ({error}); make room and start the same command "
            f"again, or take them from the newest checkpoint: onstep checkpoint export {folder.path} OUT"
        )
        if state.cfg.checkpoint.on_save_error == "stop":
            raise CheckpointError(message) from error
        logger.warning("%s", message)


def _save(state: Run, model: Transformer) -> None:
    folder, eos_id = state.run_folder, state.tokenizer.eos_id
    assert folder is not None
    obstacle = hf_obstacle(model)
    if has_lora(model):
        if obstacle is not None or has_hf_names(model):
            save_adapter(model, state.cfg.peft, folder.adapter, _base(state))
            state.tokenizer.save(folder.adapter)
        else:
            logger.warning(
                "transformers keeps several projections of this model in one matrix, so the adapter has no form there; "
                "the merged weights are in %s",
                folder.model,
            )
    if obstacle is not None:
        raise ConfigError(obstacle)
    if has_lora(model):
        model = merged_model(model, state.cfg.peft)
    save_hf(model, folder.model, eos_id=eos_id)
    state.tokenizer.save(folder.model)


def _base(state: Run) -> str | None:
    """The Hugging Face folder that the adapter goes on; None where it goes on a checkpoint, or the folder is gone."""
    try:
        source = find_pretrained(state.cfg)
    except OnstepError:
        return None
    return str(source.path.resolve()) if source is not None and source.is_hugging_face else None
