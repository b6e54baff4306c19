"""Every method of the installed `transformers.Trainer`: an override of it has its effect, or is refused by name.

The table has one row for each. A method that is new in `transformers` fails here until it has one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from onstep import Trainer
from onstep.errors import ConfigError
from tests.support.observed_runs import NotedRegression, arguments, described, observe
from tests.support.small_models import regression_rows

pytestmark = pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")

Override = Callable[..., Any]
"""A user's method, as a function of what it overrides, the Trainer (None for a static method) and its arguments."""


@dataclass(frozen=True)
class Changes:
    """The run calls the override, and what the override does shows in `seen` (of `observe`)."""

    seen: str
    override: Override
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Called:
    """The run calls the override, which calls `super()`: an effect of its own is whatever the user writes there."""

    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ForScripts:
    """Only scripts and overrides call it, in `transformers` too; `holds(trainer)` calls it after a run."""

    holds: Callable[[Any], bool]


@dataclass(frozen=True)
class Refused:
    """A class that overrides it cannot be constructed; the message has the method's name and `remedy`."""

    remedy: str


Row = Changes | Called | ForScripts | Refused


def _doubled(original: Any, trainer: Any, *args: Any, **kwargs: Any) -> Any:
    return 2 * original(*args, **kwargs)


def _reversed_loader(original: Any, trainer: Any, *args: Any, **kwargs: Any) -> Any:
    rows = regression_rows(12)[::-1]
    return torch.utils.data.DataLoader(rows, batch_size=2, collate_fn=transformers.default_data_collator)


def _reversed_sampler(original: Any, trainer: Any, dataset: Any = None) -> Any:
    dataset = trainer.train_dataset if dataset is None else dataset
    return list(range(len(dataset)))[::-1]


def _plain_sgd(original: Any, trainer: Any, *args: Any, **kwargs: Any) -> Any:
    trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.01)
    return trainer.optimizer


def _constant(original: Any, trainer: Any, num_training_steps: int, optimizer: Any = None) -> Any:
    optimizer = trainer.optimizer if optimizer is None else optimizer
    trainer.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)
    return trainer.lr_scheduler


def _both(original: Any, trainer: Any, num_training_steps: int) -> None:
    _plain_sgd(original, trainer)
    _constant(original, trainer, num_training_steps, trainer.optimizer)


def _zero_step(original: Any, trainer: Any, *args: Any, **kwargs: Any) -> Any:
    original(*args, **kwargs)
    trainer.model.zero_grad()
    return torch.tensor(7.0)


def _negated(original: Any, trainer: Any, inputs: Any) -> Any:
    return {key: -value for key, value in original(inputs).items()}


def _more(original: Any, trainer: Any, *args: Any, **kwargs: Any) -> Any:
    return {**original(*args, **kwargs), "eval_mine": 1.0}


def _noted(original: Any, trainer: Any, logs: Any, *args: Any, **kwargs: Any) -> None:
    original({**logs, "mine": 1.0}, *args, **kwargs)


def _marked(original: Any, trainer: Any, *args: Any, **kwargs: Any) -> Any:
    result = original(*args, **kwargs)
    Path(trainer.args.output_dir).mkdir(exist_ok=True)
    Path(trainer.args.output_dir, "mine.txt").write_text("mine")
    return result


def _elsewhere(original: Any, trainer: Any, *args: Any, **kwargs: Any) -> Any:
    return original(*args, **kwargs) + "/mine"


SAVES = {"save_strategy": "steps", "save_steps": 3}
EVALUATES = {"eval_strategy": "steps", "eval_steps": 3}
BEST = {**SAVES, **EVALUATES, "load_best_model_at_end": True, "save_total_limit": 1}

METHODS: dict[str, Row] = {
    # data
    "get_train_dataloader": Changes("order", _reversed_loader),
    "get_eval_dataloader": Changes("eval_order", _reversed_loader),
    "get_test_dataloader": Changes("eval_order", _reversed_loader),
    "_get_train_sampler": Changes("order", _reversed_sampler),
    "_get_eval_sampler": Changes("eval_order", _reversed_sampler),
    "num_examples": Called(),
    # optimizer and schedule
    "create_optimizer": Changes("optimizer", _plain_sgd),
    "create_scheduler": Changes("rates", _constant),
    "create_optimizer_and_scheduler": Changes("optimizer", _both),
    "get_optimizer_cls_and_kwargs": Changes(
        "optimizer", lambda original, trainer, *args, **kwargs: (torch.optim.SGD, {"lr": 0.01})
    ),
    "get_decay_parameter_names": Changes("optimizer", lambda original, trainer, model: [], {"weight_decay": 0.5}),
    # a step
    "training_step": Changes("losses", _zero_step),
    "compute_loss": Changes("losses", _doubled),
    "_prepare_inputs": Changes("order", _negated),
    # evaluation
    "evaluate": Changes("names", _more, EVALUATES),
    # saving
    "save_model": Changes("files", _marked),
    "_save": Changes("files", _marked, SAVES),
    "_save_checkpoint": Changes("files", _marked, SAVES),
    # reports
    "log": Changes("names", _noted),
    "floating_point_ops": Changes("total_flos", lambda original, trainer, inputs: 1000),
}


def methods_of_transformers() -> list[str]:
    """Its methods, public or with one underscore, with what it has from its bases."""
    return [
        name
        for name, value in vars(transformers.Trainer).items()
        if not name.startswith("__") and (callable(value) or isinstance(value, (staticmethod, classmethod, property)))
    ]


def subclass(name: str, override: Override, calls: list[str]) -> type[Trainer]:
    """A user's class that overrides one method."""
    is_static = isinstance(vars(transformers.Trainer).get(name), staticmethod)

    def method(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        if is_static:
            return override(getattr(Trainer, name), None, *args, **kwargs)
        trainer, *others = args
        return override(getattr(super(cls, trainer), name), trainer, *others, **kwargs)

    cls: type[Trainer] = type("Mine", (Trainer,), {name: staticmethod(method) if is_static else method})
    return cls


def unchanged(original: Any, trainer: Any, *args: Any, **kwargs: Any) -> Any:
    return original(*args, **kwargs)


def assigned(name: str, override: Override, calls: list[str]) -> Callable[..., Trainer]:
    """Makes a Trainer one method of which is replaced on the object, as libraries do that patch a Trainer."""

    def make(*args: Any, **kwargs: Any) -> Trainer:
        trainer = Trainer(*args, **kwargs)
        original = getattr(trainer, name)

        def method(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return override(original, trainer, *args, **kwargs)

        setattr(trainer, name, method)
        return trainer

    return make


def seen(run: dict[str, Any], name: str) -> Any:
    return described(run["trainer"].optimizer) if name == "optimizer" else run[name]


@pytest.fixture(scope="module")
def plain_run(tmp_path_factory: pytest.TempPathFactory) -> Callable[[dict[str, Any], str], Any]:
    """What is seen of a run without overrides, by its options."""
    runs: dict[str, dict[str, Any]] = {}

    def plain(options: dict[str, Any], name: str) -> Any:
        if repr(options) not in runs:
            runs[repr(options)] = observe(tmp_path_factory.mktemp("plain"), **options)
        return seen(runs[repr(options)], name)

    return plain


@pytest.mark.parametrize("name", METHODS)
def test_an_override_has_its_effect_or_is_refused(
    name: str, plain_run: Callable[[dict[str, Any], str], Any], tmp_path: Path
) -> None:
    calls: list[str] = []
    match METHODS[name]:
        case Refused(remedy):
            cls = subclass(name, unchanged, calls)
            with pytest.raises(ConfigError, match=rf"(?s)\b{name}\b.*{remedy}"):
                cls(NotedRegression(), arguments(tmp_path), train_dataset=regression_rows(4))
        case ForScripts(holds):
            trainer = observe(tmp_path, subclass(name, unchanged, calls))["trainer"]
            calls.clear()
            assert holds(trainer)
            assert calls
        case Called(options):
            observe(tmp_path, subclass(name, unchanged, calls), **options)
            assert calls
        case Changes(what, override, options):
            mine = observe(tmp_path, subclass(name, override, calls), **options)
            assert calls
            assert seen(mine, what) != plain_run(options, what)


@pytest.mark.parametrize("name", [name for name, row in METHODS.items() if isinstance(row, Changes)])
def test_a_method_assigned_to_the_object_has_its_effect_too(
    name: str, plain_run: Callable[[dict[str, Any], str], Any], tmp_path: Path
) -> None:
    row, calls = METHODS[name], list[str]()
    assert isinstance(row, Changes)
    mine = observe(tmp_path, assigned(name, row.override, calls), **row.options)
    assert calls
    assert seen(mine, row.seen) != plain_run(row.options, row.seen)


def test_every_method_has_a_row() -> None:
    assert set(METHODS) == set(methods_of_transformers())


def test_the_counts() -> None:
    counts = Counter(type(row).__name__ for row in METHODS.values())
    honoured = counts["Changes"] + counts["Called"]
    print(
        f"{len(METHODS)} methods: {honoured} honoured, {counts['ForScripts']} of scripts, {counts['Refused']} refused"
    )
