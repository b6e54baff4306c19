"""Writes the files beside weights that Hugging Face's tools look for: configuration, tokenizer, state and arguments."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from onstep.events.context import unwrap
from onstep.trainer.methods import TrainerMethods
from onstep.training.runs.run_dir import RunDir

STATE_FILE, ARGUMENTS_FILE = "trainer_state.json", "training_args.json"


def files_of_checkpoint(trainer: TrainerMethods) -> Callable[[Path], None]:
    """What writes the files into a checkpoint: the state is that of now, even if the file is written later."""
    assert trainer.global_state is not None
    state = trainer.global_state.trainer_state.to_json_string()

    def write(directory: Path) -> None:
        _write_configuration(trainer.model, directory)
        processing_class: Any = trainer.saved_processing_class
        if hasattr(processing_class, "save_pretrained"):
            processing_class.save_pretrained(directory)
        _write_records(trainer, state, directory)

    return write


def write_final_files(trainer: TrainerMethods, directory: RunDir) -> None:
    """Write the final weights, and what belongs to them, to the run's directory."""
    trainer.save_model(str(directory.model))
    if directory.layout == "hugging_face":
        assert trainer.global_state is not None
        _write_records(trainer, trainer.global_state.trainer_state.to_json_string(), directory.model)


def _write_records(trainer: TrainerMethods, state: str, directory: Path) -> None:
    (directory / STATE_FILE).write_text(state, encoding="utf-8")
    arguments = json.dumps(trainer.args.to_dict(), indent=2, default=str)
    (directory / ARGUMENTS_FILE).write_text(arguments + "\n", encoding="utf-8")


def _write_configuration(model: nn.Module | None, directory: Path) -> None:
    """Write what `from_pretrained` needs beside the weights of a `transformers` model, or of its adapter."""
    module: Any = unwrap(model)
    bases = {base.__module__.partition(".")[0] for base in type(module).__mro__}
    if "peft" in bases:
        module.save_pretrained(directory)
    elif "transformers" in bases:
        config = copy.deepcopy(module.config)
        config.architectures = [type(module).__name__]
        config.dtype = str(module.dtype).removeprefix("torch.")
        config.save_pretrained(directory)
        generation = getattr(module, "generation_config", None)
        if generation is not None and module.can_generate():
            generation.save_pretrained(directory)
