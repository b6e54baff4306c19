"""Generates text samples from a few prompts during training."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
import yaml
from torch import nn

from onstep.analysis.logs.samples_log import FILE_NAME, keep_samples, set_samples_aside
from onstep.config import TrainingArguments
from onstep.config.field_types import is_integer_from
from onstep.config.hf.checks import evaluates
from onstep.distributed import World
from onstep.distributed.shards import rank, world_size
from onstep.errors import ConfigError, RankFailedError, require, text_of
from onstep.events import RunState, Setting, TrainerCallback
from onstep.files.bounded_reading import read_bytes
from onstep.models.generation.generate import representative
from onstep.models.generation.prompts import (
    can_generate,
    check_options,
    continue_prompts,
    decode_new,
    encode_prompt,
    eos_of,
)
from onstep.record.writer import logging_dir_of
from onstep.train_state import StateDict
from onstep.training.compute.undisturbed import generate_undisturbed, is_run_by_all, preserve_state

logger: logging.Logger = logging.getLogger(__name__)

TAG = "eval-text"
MAX_PROMPTS_BYTES = 1 << 20
DEFAULT_GENERATION: dict[str, object] = {"do_sample": True, "top_k": 20, "temperature": 0.7, "repetition_penalty": 1.15}
"""Sampling options if `generation_config` is None."""


class TextgenCallback(TrainerCallback):
    """Continues prompts after an evaluation, and writes the texts to TensorBoard under `eval-text`.

    In a run with a directory, the texts are also lines of its record and of its `text_samples.jsonl`, next to the
    metrics log (see `onstep.analysis.logs.samples_log`). Texts longer than the model's trained length are continued
    within a sliding window of that length.

    Works with Onstep's transformer (`pretrain`, with the tokenizer of the run) and with models that have the `generate`
    method of `transformers` (`Trainer`, with its `processing_class`), both with a key/value cache. Rank 0 generates
    while the other ranks wait at their next collective. All ranks generate together if they divide the model, and a
    trainer's `pipeline_generate` method, if any, is called on all ranks.

    Training is not affected: random generators, the mode of every module and compiled forwards are restored, even after
    an error. The texts depend only on the weights, `seed` and the step. A failed generation only causes a warning, the
    first time with its traceback; with `on_generation_error = "raise"` it ends the run. An error of some of the ranks
    that generate together always ends it, and so does any with `pipeline_generate`.

    Args:
        summary_writer: a TensorBoard `SummaryWriter`; None logs the texts instead.
        prompts: a list of prompts, or the path of a YAML file that contains one.
        generation_config: arguments of `transformers.GenerationConfig`; the default samples from the 20 most likely
            tokens at temperature 0.7 with repetition penalty 1.15.
        generation_steps: steps between generations; None uses `eval_steps`. Texts are generated after evaluations only,
            so never more often than those.
        max_new_tokens: maximum number of tokens to add to a prompt.

    Raises:
        ConfigError: (a ValueError) for arguments of the wrong type, and for a file without a list of prompts; when
            training begins, for options that the model does not support and for invalid values.
    """

    seed = 0
    """The texts of a step depend on this seed and the step."""
    on_generation_error: Literal["warn", "raise"] = "warn"
    settable: ClassVar = {
        "generation_steps": Setting(int, 1, "Steps between generations"),
        "max_new_tokens": Setting(int, 1, "Maximum number of tokens to add to a prompt", 4096),
    }

    def __init__(
        self,
        summary_writer: Any,
        prompts: list[str] | str | os.PathLike[str],
        generation_config: Mapping[str, object] | None = None,
        generation_steps: int | None = None,
        max_new_tokens: int = 200,
    ) -> None:
        if generation_config is not None and not isinstance(generation_config, Mapping):
            raise ConfigError(f"generation_config must be a dictionary, got {type(generation_config).__name__}.")
        for name, value in (("generation_steps", generation_steps), ("max_new_tokens", max_new_tokens)):
            require(value is None or is_integer_from(value, 1), name, "an integer >= 1", value)
        self.summary_writer = summary_writer
        self.prompts = read_prompts(prompts)
        self.generation_config = dict(DEFAULT_GENERATION if generation_config is None else generation_config)
        self.generation_steps = generation_steps
        self.max_new_tokens = max_new_tokens
        self.next_gen_step = 0
        """First step whose evaluation is followed by a generation."""
        self._has_warned = self._has_traced = False

    def on_train_begin(
        self, args: TrainingArguments, state: RunState, control: object, model: nn.Module, **kwargs: object
    ) -> None:
        """Check that the model supports the options, and reset the schedule if training starts from step 0.

        Collective where all ranks generate together.
        """
        if state.global_step == 0:
            self.next_gen_step = 0
            self._set_samples_aside(args, state)
        self._has_warned = self._has_traced = False
        if kwargs.get("trainer") is not None and state.is_world_process_zero and not evaluates(args):
            logger.warning("no text will be generated: there is no evaluation to follow; set eval_strategy")
        module = representative(model)
        if is_run_by_all(module):  # a rank that the checkpoint did not have has no state
            self.next_gen_step = World(rank(), world_size()).share(self.next_gen_step)
        if can_generate(module) and not getattr(kwargs.get("trainer"), "pipeline_generate", None):
            check_options(module, self.generation_config)

    def on_evaluate(
        self, args: TrainingArguments, state: RunState, control: object, model: nn.Module, **kwargs: object
    ) -> None:
        """Generate if it is due."""
        model = representative(model)
        step = state.global_step
        if step < self.next_gen_step:
            return
        is_by_steps = getattr(args, "eval_strategy", "steps") == "steps"
        configured = self.generation_steps or (getattr(state, "eval_steps", None) if is_by_steps else 1)
        configured = configured or getattr(args, "eval_steps", None)
        every = max(1, int(configured or 1))
        self.next_gen_step = (step // every + 1) * every
        tokenizer, trainer = kwargs.get("processing_class"), kwargs.get("trainer")
        if not self._is_able(model, tokenizer, trainer):
            return
        if getattr(trainer, "pipeline_generate", None):
            self._write(args, state, self._with_pipeline(model, tokenizer, trainer))
        elif state.is_world_process_zero or is_run_by_all(model):
            self._generate(args, state, model, tokenizer)

    def state_dict(self) -> StateDict:
        """The step of the next generation."""
        return {"next_gen_step": self.next_gen_step}

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Restore the step of the next generation.

        Args:
            state_dict: what `state_dict()` returned.
        """
        self.next_gen_step = state_dict["next_gen_step"]

    def _is_able(self, model: nn.Module, tokenizer: object, trainer: object) -> bool:
        if tokenizer is None:
            lacking = "there is no tokenizer; pass a processing_class to the Trainer"
        elif not (can_generate(model) or getattr(trainer, "pipeline_generate", None)):
            lacking = f"{type(model).__name__} is not an Onstep transformer and has no generate method"
        else:
            return True
        if not self._has_warned:
            logger.warning("no text will be generated: %s", lacking)
        self._has_warned = True
        return False

    def _generate(self, args: TrainingArguments, state: RunState, model: nn.Module, tokenizer: object) -> None:
        seed = (self.seed * 1_000_003 + state.global_step * 1_009) % 2**32
        options = (self.prompts, self.generation_config, self.max_new_tokens, seed)
        try:
            texts = generate_undisturbed(model, lambda: continue_prompts(model, tokenizer, *options))
            self._write(args, state, texts)
        except RankFailedError:
            raise
        except Exception as error:  # models and writers can raise anything; a failed sample must not end the run
            if self.on_generation_error == "raise":
                raise
            what, trace = f"{type(error).__name__}: {text_of(error)}", None if self._has_traced else error
            logger.warning("no text was generated at step %d: %s", state.global_step, what, exc_info=trace)
            self._has_traced = True

    def _with_pipeline(self, model: nn.Module, tokenizer: object, trainer: Any) -> list[tuple[str, str]]:
        """Collective: every rank passes the same prompts in the same order, one at a time to avoid padding."""
        eos = eos_of(tokenizer)
        pad = getattr(tokenizer, "pad_token_id", None)
        options = {"max_new_tokens": self.max_new_tokens, **self.generation_config}
        texts = []
        with preserve_state(model):
            for prompt in self.prompts:
                ids = torch.tensor([encode_prompt(tokenizer, prompt)])
                out = trainer.pipeline_generate(
                    ids, eos_token_id=eos, pad_token_id=eos if pad is None else pad, **options
                )
                texts.append((prompt, decode_new(tokenizer, out[0, ids.shape[1] :].tolist())))
        return texts

    def _write(self, args: TrainingArguments, state: RunState, texts: Sequence[tuple[str, str]]) -> None:
        if not state.is_world_process_zero:
            return
        keep_samples(state, logging_dir_of(args), texts)
        text = "\n\n---\n\n".join(f"{prompt} [START] {continuation}" for prompt, continuation in texts)
        if self.summary_writer is None:
            logger.info("%s at step %d:\n%s", TAG, state.global_step, text)
            return
        self.summary_writer.add_text(TAG, text, state.global_step)
        self.summary_writer.flush()

    def _set_samples_aside(self, args: TrainingArguments, state: RunState) -> None:
        """Rename the samples of an earlier run in the same directory."""
        directory = logging_dir_of(args)
        if directory is not None and state.is_world_process_zero:
            set_samples_aside(directory / FILE_NAME)


def read_prompts(prompts: object) -> list[str]:
    """Return the prompts, or read them from a YAML file.

    Raises:
        ConfigError: if the result is not a list of texts.
    """
    source = "prompts"
    if isinstance(prompts, (str, os.PathLike)):
        source = f"prompts file {os.fspath(prompts)!r}"
        try:
            prompts = yaml.safe_load(
                read_bytes(os.fspath(prompts), MAX_PROMPTS_BYTES, error=ConfigError, allows_pipe=True).decode("utf-8")
            )
        except Exception as error:  # besides its own errors, the library raises some of Python's for odd files
            raise ConfigError(
                f"cannot read {source}: {error}; pass a YAML file with a list of prompts, or a Python list."
            ) from error
    if not isinstance(prompts, list) or not prompts:
        found = "an empty list" if prompts == [] else type(prompts).__name__
        raise ConfigError(f"{source} must be a non-empty list of strings, got {found}.")
    for number, prompt in enumerate(prompts, start=1):
        if not isinstance(prompt, str):
            raise ConfigError(
                f"{source} must be a non-empty list of strings, got {type(prompt).__name__} as item {number}; put it "
                "in quotes."
            )
    return list(prompts)
