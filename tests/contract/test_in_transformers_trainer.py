"""Every built-in callback in Hugging Face's own `Trainer`: it does there what it is for, or is refused by name."""

from __future__ import annotations

import logging
import tracemalloc
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from onstep.callbacks import (
    EMA,
    DiLoCoCallback,
    DivergenceDetector,
    EarlyStopping,
    EarlyStoppingCallback,
    ResumableSummaryWriter,
    TBLogger,
    WeightAverage,
)
from onstep.diloco import DiLoCoServer
from onstep.errors import ConfigError
from onstep.events import Callback
from tests.support.contract.every_callback import discovered, make
from tests.support.small_models import VOCABULARY, Regression, causal_rows, qwen, regression_rows

pytestmark = pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")

REFUSED = {
    "DefaultMetrics": "only Onstep's loop counts",
    "EMA": "evaluate=False",
    "LmEvalCallback": "on_<event>",
    "RouterMonitor": "on_<event>",
    "ThroughputMonitor": "on_<event>",
    "TrackersCallback": "on_<event>",
    "TrainerControlCallback": "requests to Onstep's loop",
    "WeightAverage": "evaluate=False",
}


def words() -> Any:
    vocabulary = {"</s>": 0, **{f"w{number}": number for number in range(1, VOCABULARY)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="</s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", pad_token="</s>")


def trainer_of(directory: Path, *callbacks: Any, is_language: bool = False, **options: Any) -> Any:
    torch.manual_seed(0)
    given: dict[str, Any] = {"max_steps": 4, "logging_steps": 1, "eval_steps": 2, "eval_strategy": "steps"}
    given |= {"report_to": "none", "disable_tqdm": True, "use_cpu": True, "per_device_train_batch_size": 2}
    given |= {"metric_for_best_model": "loss", "greater_is_better": False, "save_steps": 2, **options}
    args = transformers.TrainingArguments(str(directory), **given)
    model, rows = (qwen(), causal_rows(16)) if is_language else (Regression(), regression_rows(16))
    tokenizer = words() if is_language else None
    trainer = transformers.Trainer(
        model, args, train_dataset=rows, eval_dataset=rows, processing_class=tokenizer, callbacks=list(callbacks)
    )
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("is_late", [False, True])
def test_a_callback_that_needs_onsteps_loop_is_refused_by_name(name: str, is_late: bool, tmp_path: Path) -> None:
    callback = make(name, tmp_path)[0]
    trainer = trainer_of(tmp_path)
    trainer.add_callback(callback)
    start: Callable[[], Any] = trainer.train if is_late else lambda: trainer_of(tmp_path, callback)
    with pytest.raises(ConfigError, match=rf"{name} does not work in Hugging Face's Trainer: .*{REFUSED[name]}"):
        start()


def test_a_callback_of_the_users_with_contexts_is_refused_too(tmp_path: Path) -> None:
    class Mine(Callback):
        def on_train_step_end(self, context: Any) -> None: ...

    with pytest.raises(ConfigError, match="Mine does not work in Hugging Face's Trainer"):
        trainer_of(tmp_path, Mine())


class Outcome(NamedTuple):
    """What a training with a callback has left."""

    trainer: Any
    directory: Path
    text: str

    def has_file(self, pattern: str) -> bool:
        return any(path.stat().st_size > 2 for path in self.directory.rglob(pattern))

    def has_logged(self, name: str) -> bool:
        return any(name in record for record in self.trainer.state.log_history)

    @property
    def steps(self) -> int:
        return int(self.trainer.state.global_step)


EFFECTS: dict[str, Callable[[Outcome], bool]] = {
    "DiLoCoCallback": lambda one: "is a worker of" in one.text,
    "DivergenceDetector": lambda one: one.steps < 4,
    "EarlyStopping": lambda one: one.steps < 4,
    "EarlyStoppingCallback": lambda one: one.steps < 4,
    "GradNormLogger": lambda one: one.has_file("gradient_norms.json"),
    "InfoCallback": lambda one: "trainable_parameters: 4" in one.text,
    "JsonLogger": lambda one: one.has_file("trainer_logs.json"),
    "LearningRateMonitor": lambda one: one.has_logged("learning_rate/0"),
    "ParameterNormLogger": lambda one: one.has_file("parameter_norms.json"),
    "PeakMemory": lambda one: ("Peak CUDA Memory" in one.text) == torch.cuda.is_available(),
    "PrinterCallback": lambda one: "'loss': " in one.text,
    "ProfilerCallback": lambda one: one.has_file("real_training_rank0.json"),
    "ProgressCallback": lambda one: "eval" in one.text,
    "ResumableSummaryWriter": lambda one: one.has_file("events.out.*"),
    "TBLogger": lambda one: one.has_file("events.out.*"),
    "TextgenCallback": lambda one: one.has_file("text_samples.jsonl"),
    "TraceMalloc": lambda one: "resident (RSS)" in one.text and not tracemalloc.is_tracing(),
    "WeightNormLogger": lambda one: one.has_logged("weight_norm"),
}
MAKE: dict[str, Callable[[], Any]] = {
    "DivergenceDetector": lambda: DivergenceDetector(threshold=0.1, patience=1, warmup=0),
    "EarlyStopping": lambda: EarlyStopping(patience=1),
    "EarlyStoppingCallback": lambda: EarlyStoppingCallback(1),
    "DiLoCoCallback": lambda: DiLoCoCallback(sync_every=2),
}
"""Those that do what they are for in four steps only if they are made for it."""
RISING = ("DivergenceDetector", "EarlyStopping", "EarlyStoppingCallback")
"""Those that stop when the loss rises."""


def test_each_callback_has_its_place_here() -> None:
    assert sorted([*REFUSED, *EFFECTS]) == sorted(discovered())


@pytest.mark.parametrize("name", EFFECTS)
def test_a_callback_does_there_what_it_is_for(
    name: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level(logging.INFO)
    others = [TBLogger(writer := ResumableSummaryWriter(str(tmp_path / "tb"))), writer]
    callbacks = others[::-1] if name == "ResumableSummaryWriter" else [MAKE[name]()] if name in MAKE else []
    with DiLoCoServer(Regression(), port=0) if name == "DiLoCoCallback" else nullcontext() as server:
        if server is not None:
            monkeypatch.setenv("DILOCO_SERVER", server.address)
            callbacks = [MAKE[name]()]
        options: dict[str, Any] = {"learning_rate": 100.0, "eval_steps": 1} if name in RISING else {}
        is_language = name == "TextgenCallback"
        trainer = trainer_of(tmp_path, *(callbacks or make(name, tmp_path)), is_language=is_language, **options)
        trainer.train()
    output = capfd.readouterr()
    assert EFFECTS[name](Outcome(trainer, tmp_path, output.out + output.err + caplog.text))


@pytest.mark.parametrize("kind", [EMA, WeightAverage])
def test_averages_are_what_the_model_ends_with_there(kind: Any, tmp_path: Path) -> None:
    average = kind(evaluate=False)
    trainer = trainer_of(tmp_path, average)
    trainer.train()
    found = dict(trainer.model.named_parameters())
    assert average.num_averaged == 4
    assert all(torch.equal(found[name], value) for name, value in average.averages.items())
