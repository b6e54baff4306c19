"""Evaluates the model on tasks of lm-eval while it trains."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

from torch import nn
from torch.distributed.tensor import DTensor

from onstep.analysis.logs.task_results import evaluation_lines, line_of
from onstep.config.field_types import is_integer_from
from onstep.errors import ConfigError, require
from onstep.events import Callback, Setting
from onstep.events.context import CallbackContext, unwrap
from onstep.models.hf.any_directory import save_directory
from onstep.models.hf.tasks import TaskSettings, evaluate_tasks, load_tasks
from onstep.training.compute.undisturbed import preserve_state
from onstep.training.setup.lora import has_lora, merged_model

logger: logging.Logger = logging.getLogger(__name__)


class LmEvalCallback(Callback):
    """Evaluates tasks of lm-eval after every n-th step, with the numbers of `onstep evaluate` on a checkpoint of it.

    The results are a line of the record, of the kind `evaluation`, with `eval_<task>_<metric>` for trackers and charts;
    `onstep why` and the report show them. A resumed run has each of them once.

    Training is not affected: random generators and the mode of every module are restored, and nothing else of the run
    is read or changed. Rank 0 evaluates while the other ranks wait at their next collective, so `dist`'s timeouts must
    be longer than an evaluation. A model of transformers (`Trainer`) is evaluated as it is. One of `pretrain` is
    exported to a temporary directory, with LoRA's matrices merged, and opened from there, which requires the memory of
    a second copy. Weights that are sharded over ranks are refused: evaluate their checkpoints.

    Args:
        tasks: names of tasks, groups or tags of lm-eval, or patterns such as `arc_*`; a text has commas between them.
        every: steps between evaluations, >= 1.
        include_path: directories with task files of your own.
        num_fewshot: solved examples before each question; None is that of the task.
        limit: number of questions of each task, or below 1 a share of them; None is all.
        batch_size: sequences at a time, or `auto`.
        apply_chat_template: whether each question is a turn of the tokenizer's chat template.
        trust_task_code: whether to execute Python functions that task files name (`!function`) and metrics of the
            library evaluate.

    Raises:
        ConfigError: for an invalid value; when training begins, for a task that does not exist, a run without a
            tokenizer, and sharded weights.
        MissingExtraError: when training begins without lm-eval.
        OnstepError: if an evaluation fails.
    """

    needs_whole_model = True

    settable: ClassVar = {"every": Setting(int, 1, "Steps between evaluations")}

    def __init__(
        self,
        tasks: str | Sequence[str],
        every: int,
        *,
        include_path: str | Path | Sequence[str | Path] = (),
        num_fewshot: int | None = None,
        limit: float | None = None,
        batch_size: int | str = 1,
        apply_chat_template: bool = False,
        trust_task_code: bool = False,
    ) -> None:
        require(is_integer_from(every, 1), "every", "an integer >= 1", every)
        require(limit is None or limit > 0, "limit", "> 0", limit, "; None asks all questions.")
        names = tasks.split(",") if isinstance(tasks, str) else tasks
        places = [include_path] if isinstance(include_path, str | Path) else include_path
        self.every = every
        self.settings = TaskSettings(
            tuple(names), tuple(map(str, places)), num_fewshot, limit, batch_size, apply_chat_template, trust_task_code
        )

    def on_train_start(self, context: CallbackContext) -> None:
        """Check that the tasks exist, and that the model can be evaluated."""
        model = unwrap(context.model[0] if isinstance(context.model, list) else context.model)
        if context.processing_class is None:
            raise ConfigError("LmEvalCallback requires a tokenizer; pass processing_class to the Trainer.")
        if any(isinstance(one, DTensor) for one in model.parameters()):
            raise ConfigError(
                "LmEvalCallback evaluates on rank 0, which has only a part of this model's weights; drop it and use "
                "onstep evaluate RUN@STEP on its checkpoints."
            )
        with preserve_state(model):
            load_tasks(self.settings)

    def on_step_end(self, context: CallbackContext) -> None:
        """Evaluate if it is due."""
        state = context.state.trainer_state
        if state.global_step % self.every or not state.is_world_process_zero:
            return
        model = unwrap(context.model[0] if isinstance(context.model, list) else context.model)
        with preserve_state(model), _opened(model, context) as (opened, arguments):
            results = evaluate_tasks(self.settings, opened, **arguments)
        state.append_to_record("evaluation", line_of(results))
        for line in evaluation_lines(results):
            logger.info("step %d: %s", state.global_step, line)


@contextmanager
def _opened(model: nn.Module, context: CallbackContext) -> Iterator[tuple[Any, dict[str, Any]]]:
    """The model as lm-eval opens it, and the arguments to open it with."""
    tokenizer: Any = context.processing_class
    if hasattr(model, "save_pretrained"):
        yield model, {"tokenizer": tokenizer}
        return
    language_model: Any = model
    config = context.state.cfg.peft
    with tempfile.TemporaryDirectory(prefix="onstep-tasks-") as directory:
        if has_lora(model):
            language_model = merged_model(language_model, config)
        save_directory(language_model, directory, eos_id=getattr(tokenizer, "eos_id", None))
        if hasattr(tokenizer, "save_pretrained"):
            tokenizer.save_pretrained(directory)
        else:
            tokenizer.save(Path(directory))
        yield directory, {"device": str(next(model.parameters()).device)}
