"""Trains for a few steps and notes everything that an argument or an override could change."""

from __future__ import annotations

import contextlib
import io
import logging
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn

from onstep import Trainer, TrainingArguments
from tests.support.small_models import Regression, causal_rows, qwen, regression_rows


class NotedRegression(Regression):
    """Notes what each forward pass received."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[bool, list[list[float]]] = {True: [], False: []}

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        self.seen[self.training].append([round(value, 4) for value in x[:, 0].tolist()])
        return super().forward(x, labels)


def arguments(directory: Path, **options: Any) -> TrainingArguments:
    """Six steps of two rows each, every step logged, no files of weights unless asked for."""
    values: dict[str, Any] = {
        "output_dir": str(directory / "out"),
        "use_cpu": True,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 4,
        "num_train_epochs": 1,
        "learning_rate": 0.05,
        "logging_steps": 1,
        "save_strategy": "no",
        "train_sampling_strategy": "sequential",
        "disable_tqdm": True,
    }
    return TrainingArguments(**{**values, **options})


def observe(
    directory: Path,
    make: Callable[..., Any] = Trainer,
    *,
    tokens: bool = False,
    model: nn.Module | None = None,
    rows: Any = None,
    model_init: Any = None,
    **options: Any,
) -> dict[str, Any]:
    """Train, evaluate and predict with a Trainer of `make` and these arguments; what can be seen, by name.

    Args:
        tokens: train a small Qwen2 in place of the regression, without `compute_metrics`.
    """
    if rows is None:
        rows = causal_rows(12) if tokens else regression_rows(12)
    if model_init is not None:
        model = model_init()
    elif model is None:
        model = qwen() if tokens else NotedRegression()
    notes, metrics = _Notes(model), _Metrics()
    printed, logged = io.StringIO(), _Records()
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed), logged.attached(), notes.attached():
        args = arguments(directory, **options)
        held_out = [rows[number] for number in range(6)]
        trainer = make(
            None if model_init else model,
            args,
            train_dataset=rows,
            eval_dataset=held_out,
            compute_metrics=None if tokens else metrics,
            model_init=model_init,
        )
        output = trainer.train()
        state = trainer.state
        history = [dict(record) for record in state.log_history]
        evaluated = trainer.evaluate()
        trainer.predict(held_out[:5])
        loader = trainer.get_train_dataloader()
    training = [record for record in history if "loss" in record]
    evaluations = [record for record in history if any(name.startswith("eval_") for name in record)]
    found = {
        "losses": [record["loss"] for record in training],
        "rates": [record.get("learning_rate") for record in training],
        "logged_steps": [record["step"] for record in training],
        "names": sorted({name for record in history for name in record}),
        "train_metrics": sorted(output.metrics),
        "norms": [record.get("grad_norm") for record in training],
        "sizes": output.metrics.get("effective_batch_size"),
        "input_tokens": state.num_input_tokens_seen,
        "total_flos": output.metrics.get("total_flos"),
        "evaluated_steps": [record["step"] for record in evaluations],
        "eval_names": sorted(evaluated),
        "eval_loss": evaluated.get("eval_loss"),
        "given_to_metrics": metrics.given,
        "steps": state.global_step,
        "best": (state.best_metric, Path(state.best_model_checkpoint or "").name),
        "files": sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()),
        "checkpoints": sorted(path.name for path in directory.rglob("checkpoint-*") if path.is_dir()),
        "weights": [value.tolist() for value in model.state_dict().values()],
        "loader": _attributes(loader),
        "printed": printed.getvalue(),
        "log_lines": logged.lines,
        "dtypes": sorted(notes.dtypes[True]),
        "eval_dtypes": sorted(notes.dtypes[False]),
        "deterministic": notes.is_deterministic,
        "compiled": notes.compiled,
        "hooks": sum(len(module._forward_hooks) for module in model.modules()),
        "trainer": trainer,
        "args": args,
    }
    if isinstance(model, NotedRegression):
        found |= {"order": model.seen[True], "eval_order": model.seen[False]}
    return found


class _Notes:
    """Notes how a model computes: its precision, whether deterministically, and whether compiled."""

    def __init__(self, model: nn.Module) -> None:
        self.dtypes: dict[bool, set[str]] = {True: set(), False: set()}
        self.is_deterministic = False
        self.compiled: list[dict[str, Any]] = []
        self._model = model

    @contextlib.contextmanager
    def attached(self) -> Iterator[None]:
        """Compiling is noted, and not done: it would need a C++ compiler and seconds."""
        hook = self._model.register_forward_hook(self._note)
        with mock.patch.object(nn.Module, "compile", lambda _, **options: self.compiled.append(options)):
            yield
        hook.remove()

    def _note(self, model: nn.Module, _: Any, output: Any) -> None:
        self.dtypes[model.training].add(str(output["logits"].dtype))
        self.is_deterministic |= torch.are_deterministic_algorithms_enabled()


class _Metrics:
    """A `compute_metrics` that notes what it is given."""

    def __init__(self) -> None:
        self.given: dict[str, Any] = {"calls": 0}

    def __call__(self, prediction: Any, compute_result: bool = True) -> dict[str, float]:
        predictions = prediction.predictions
        self.given["calls"] += 1
        self.given |= {
            "inputs": prediction.inputs is not None,
            "losses": prediction.losses is not None,
            "predictions": type(predictions).__name__,
            "labels": type(prediction.label_ids).__name__,
            "on_cpu": not isinstance(predictions, Tensor) or predictions.device.type == "cpu",
        }
        return {"count": float(len(predictions))}


def described(optimizer: Any) -> tuple[str, list[tuple[int, dict[str, Any]]]]:
    """The class of an optimizer, and of each group the number of its tensors and its options."""
    inner = getattr(optimizer, "optimizer", optimizer)
    groups = [
        (len(group["params"]), {key: value for key, value in group.items() if key not in ("params", "lr")})
        for group in inner.param_groups
    ]
    return type(inner).__name__, groups


def _attributes(loader: Any) -> dict[str, Any]:
    names = ("num_workers", "prefetch_factor", "pin_memory", "persistent_workers", "in_order", "drop_last")
    inner = getattr(loader, "base_dataloader", loader)
    context = getattr(inner, "multiprocessing_context", None)
    return {
        **{name: getattr(inner, name, None) for name in names},
        "context": context if context is None or isinstance(context, str) else context.get_start_method(),
    }


class _Records(logging.Handler):
    """The lines that Onstep logs."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.lines: list[tuple[str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append((record.levelname, record.getMessage()))

    @contextlib.contextmanager
    def attached(self) -> Any:
        logger = logging.getLogger("onstep")
        logger.addHandler(self)
        try:
            yield
        finally:
            logger.removeHandler(self)
