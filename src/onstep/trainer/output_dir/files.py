"""Writes the files beside weights that Hugging Face's tools look for: configuration, tokenizer, state and arguments."""

from __future__ import annotations

import copy
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

from torch import nn

from onstep.distributed import on_main
from onstep.distributed.shards import is_in_shards, is_sharded
from onstep.errors import DataError
from onstep.events import TrainerState
from onstep.events.context import unwrap
from onstep.record.kinds import Metrics
from onstep.trainer.methods import TrainerMethods
from onstep.trainer.methods.saving import is_of, write_arguments
from onstep.training.run import Run
from onstep.training.runs.run_dir import RunDir, next_free

logger = logging.getLogger(__name__)

STATE_FILE = "trainer_state.json"
_WEIGHTS = ("model*.safetensors", "model.safetensors.index.json", "adapter_model*", "pytorch_model*")
_BESIDE_WEIGHTS = ("*config.json", "tokenizer*", "special_tokens_map.json", "vocab*", "merges.txt", "chat_template*")


def files_of_checkpoint(trainer: TrainerMethods) -> Callable[[Path], None]:
    """What writes the files into a checkpoint: the state is that of now, even if the file is written later."""
    assert trainer.global_state is not None
    state = trainer.global_state.trainer_state.to_json_string()

    def write(directory: Path) -> None:
        _write_configuration(trainer.model, directory)
        processing_class = trainer.saved_processing_class
        if hasattr(processing_class, "save_pretrained"):
            processing_class.save_pretrained(directory)
        _write_records(trainer, state, directory)

    return write


def recall_history(run: Run) -> None:
    """Let `log_history` begin with the records at the checkpoint that the run continues from.

    They are read when somebody looks: at the latest when the next checkpoint is saved, before this one may be deleted.
    """
    history, start = run.info.history, None if run.checkpoints is None else run.checkpoints.start
    path = None if start is None else start.path / STATE_FILE
    if path is None or len(history) >= history.num_saved or not path.is_file():
        return

    def read() -> list[Metrics] | None:
        try:
            return TrainerState.load_from_json(str(path)).log_history
        except (OSError, DataError) as error:
            logger.warning("the log_history before step %d is lost: %s", run.train_state.step, error)
            return None

    history.begin_with(history.num_saved, read)


def write_final_files(trainer: TrainerMethods, directory: RunDir) -> None:
    """Write the final weights, and what belongs to them, to the run's directory; weights from before it are moved.

    Called by rank 0, or, if the model is sharded, by all ranks.
    """
    assert trainer.global_state is not None
    world, in_layout = trainer.global_state.world, directory.layout == "hugging_face"
    in_parts = trainer.stages is not None or (trainer.model is not None and is_in_shards(trainer.model))
    if in_layout and in_parts:
        on_main(world, lambda: _set_weights_aside(directory))
    elif in_layout:
        _set_weights_aside(directory)
    trainer.save_model(str(directory.model))
    if in_layout and world.is_main:
        _write_records(trainer, trainer.global_state.trainer_state.to_json_string(), directory.model)


def _set_weights_aside(directory: RunDir) -> None:
    """Move weights that are older than the run to `model-<n>`, with copies of the files that loading them requires."""
    path, started_at = directory.model, directory.read().get("started_at", 0)
    earlier = [one for name in _WEIGHTS for one in path.glob(name) if one.lstat().st_mtime < started_at]
    if not earlier:
        return
    aside = next_free(path / "model", 1)
    aside.mkdir()
    for one in (one for name in _BESIDE_WEIGHTS for one in path.glob(name) if one.is_file()):
        shutil.copy2(one, aside)
    for one in earlier:
        one.rename(aside / one.name)
    logger.warning("%s held weights from before this run, which are now in %s", path, aside)


def _write_records(trainer: TrainerMethods, state: str, directory: Path) -> None:
    (directory / STATE_FILE).write_text(state, encoding="utf-8")
    write_arguments(trainer.args, directory)


def _write_configuration(model: nn.Module | None, directory: Path) -> None:
    """Write what `from_pretrained` needs beside the weights of a `transformers` model, or of its adapter."""
    module = unwrap(model)
    if module is None:
        return
    if is_of(module, "peft"):
        if not is_sharded(module.parameters()):  # all ranks have written them already: `writes_weights_beside`
            module.save_pretrained(directory)
    elif is_of(module, "transformers"):
        config = copy.deepcopy(module.config)
        config.architectures = [type(module).__name__]
        config.dtype = str(module.dtype).removeprefix("torch.")
        config.save_pretrained(directory)
        generation = getattr(module, "generation_config", None)
        if generation is not None and module.can_generate():
            generation.save_pretrained(directory)
