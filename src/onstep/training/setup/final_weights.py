"""What a run leaves for other programs: its weights as a Hugging Face folder, and LoRA's as one of `peft`."""

from __future__ import annotations

import logging
from collections.abc import Callable

from safetensors import SafetensorError
from torch import nn

from onstep.errors import CheckpointError, ConfigError, OnstepError
from onstep.events.context import unwrap
from onstep.models import Transformer, hf_obstacle, save_hf
from onstep.training.run import Run
from onstep.training.runs.run_dir import RunFolder
from onstep.training.setup.lora import has_hf_names, has_lora, merged_model, save_adapter
from onstep.training.setup.pretrained import find_pretrained

logger = logging.getLogger(__name__)


def save_weights(state: Run, model: list[nn.Module]) -> None:
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
