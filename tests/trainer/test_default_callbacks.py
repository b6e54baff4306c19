"""What a script sets in `transformers.trainer` as the default callbacks, after the exchange of names."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
from torch import nn

from onstep import DefaultFlowCallback, PrinterCallback, ProgressCallback, Trainer, TrainerCallback, TrainingArguments
from onstep.originals import ORIGINALS


class OwnFlow(DefaultFlowCallback):
    def on_step_end(self, *args: Any, **kwargs: Any) -> Any:
        return super().on_step_end(*args, **kwargs)


class Further(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None: ...


class OwnProgress(ProgressCallback):
    """As ms-swift sets it."""


class OwnPrinter(PrinterCallback):
    """As ms-swift sets it."""


@pytest.fixture
def theirs(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A `transformers.trainer` in which names are exchanged."""
    module: Any = ModuleType("transformers.trainer")
    module.DEFAULT_CALLBACKS, module.DEFAULT_PROGRESS_CALLBACK = [DefaultFlowCallback], ProgressCallback
    module.PrinterCallback = PrinterCallback
    setattr(module, ORIGINALS, {})
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module  # type: ignore[no-any-return]


def defaults(**arguments: Any) -> list[type]:
    trainer = Trainer(nn.Linear(1, 1), TrainingArguments("out", report_to="none", **arguments))
    return [type(one) for one in trainer.callback_manager.callbacks]


def test_defaults_that_a_script_sets_are_added(theirs: Any) -> None:
    usual = defaults()
    theirs.DEFAULT_CALLBACKS = [OwnFlow, Further()]
    assert defaults() == [OwnFlow, Further, *usual]


@pytest.mark.parametrize(
    ("name", "own", "arguments"),
    [("DEFAULT_PROGRESS_CALLBACK", OwnProgress, {}), ("PrinterCallback", OwnPrinter, {"disable_tqdm": True})],
)
def test_progress_that_a_script_sets_replaces_onsteps(
    theirs: Any, name: str, own: type, arguments: dict[str, Any]
) -> None:
    usual = defaults(**arguments)
    setattr(theirs, name, own)
    assert defaults(**arguments) == [own if one is ProgressCallback else one for one in usual]


def test_without_the_exchange_transformers_is_not_asked(theirs: Any) -> None:
    usual = defaults()
    delattr(theirs, ORIGINALS)
    theirs.DEFAULT_CALLBACKS = [OwnFlow]
    assert defaults() == usual
