"""Every function and class of Megatron Bridge's pages `training.train` and `training.utils.train_utils`."""

from __future__ import annotations

import ast
import importlib
import inspect
import logging
import pickle
import re
import sys
from pathlib import Path
from typing import Any

import pytest

import onstep
import onstep.events as events
import onstep.training as training
from tests.support.contract.bridge_pages import BASES, DATA, TRAIN, TRAIN_STEP_RESULT, TRAIN_UTILS

CALLABLES = {**TRAIN, **TRAIN_UTILS}
NAMES = [*dict.fromkeys(name.partition(".")[0] for name in CALLABLES), *DATA]
CALLBACK_PAGE = ["Callback", "CallbackContext", "CallbackManager", "VALID_EVENTS", "normalize_callbacks", "should_fire"]
LOGGERS = ["callbacks", "utils.train_utils"]
"""The modules whose pages list a `logger`."""
GUIDE = Path(__file__).parents[2] / "docs" / "coming-from" / "megatron-bridge.md"


def found(name: str) -> Any:
    target: Any = training
    for part in name.split("."):
        target = getattr(target, part)
    return inspect.unwrap(target)


def documented_parameters(text: str) -> dict[str, Any]:
    """Each parameter of a signature with its default; the empty marker where it has none."""
    definition = ast.parse(f"def f({text}): ...").body[0]
    assert isinstance(definition, ast.FunctionDef)
    names = [argument.arg for argument in definition.args.args]
    defaults = [ast.literal_eval(default) for default in definition.args.defaults]
    without = len(names) - len(defaults)
    return dict(zip(names, [inspect.Parameter.empty] * without + defaults, strict=True))


IMPORT_PATHS = {
    "callbacks": CALLBACK_PAGE,
    "checkpointing": ["load_checkpoint", "save_checkpoint"],
    "comm_overlap": ["CommOverlapConfig"],
    "config": ["ConfigContainer", "GPTDatasetConfig", "ProfilingConfig", "TrainingConfig"],
    "forward_step_func_types": ["ForwardStepCallable"],
    "gpt_step": ["GPTForwardStep", "forward_step", "get_batch"],
    "mixed_precision": ["MixedPrecisionConfig", "bf16_mixed", "fp16_mixed", "get_mixed_precision_config"],
    "pretrain": ["pretrain"],
    "profiling": ["TNvtxContext"],
    "state": ["GlobalState", "TrainState"],
    "tokenizers.config": ["TokenizerConfig"],
    "train": [name for name in TRAIN if "." not in name],
    "utils.train_utils": [*(name for name in TRAIN_UTILS if "." not in name), *DATA],
}
"""The modules of `megatron.bridge.training` that the pages name, and what they have there."""


def test_an_import_line_of_the_pages_works_with_bridges_package_replaced_by_ours() -> None:
    for module, name in [(module, name) for module, names in IMPORT_PATHS.items() for name in names]:
        line = f"from megatron.bridge.training.{module} import {name}".replace("megatron.bridge", "onstep")
        imported: dict[str, Any] = {}
        exec(line, imported)
        assert imported[name] is not None
        if hasattr(training, name):  # both paths lead to one object
            assert imported[name] is inspect.unwrap(getattr(training, name))


@pytest.mark.parametrize("module", IMPORT_PATHS)
def test_a_module_of_the_pages_can_be_imported_under_a_name(module: str) -> None:
    imported: dict[str, Any] = {}
    exec(f"import onstep.training.{module} as T", imported)
    assert imported["T"] is sys.modules[f"onstep.training.{module}"]
    assert not [name for name in IMPORT_PATHS[module] if not hasattr(imported["T"], name)]


@pytest.mark.parametrize("name", ["train", "pretrain"])
def test_a_function_named_like_its_module_is_called_through_either(name: str) -> None:
    from_package, module = getattr(training, name), importlib.import_module(f"onstep.training.{name}")
    function = getattr(module, name)
    assert inspect.isfunction(function)
    assert inspect.signature(from_package) == inspect.signature(function)
    assert pickle.loads(pickle.dumps(from_package)) is from_package
    with pytest.raises(TypeError, match=rf"{name}\(\) got an unexpected keyword argument 'colour'"):
        from_package(colour="red")


@pytest.mark.parametrize("module", LOGGERS)
def test_a_module_has_the_logger_of_its_page(module: str) -> None:
    logger = importlib.import_module(f"onstep.training.{module}").logger
    assert isinstance(logger, logging.Logger)
    assert logger.name == f"onstep.training.{module}"


def test_the_recipe_of_the_pages_is_where_they_import_it_from() -> None:
    from onstep.recipes.qwen import qwen25_500m_pretrain_config

    assert qwen25_500m_pretrain_config().model.num_layers == 24


def test_a_documented_name_can_be_imported_from_the_training_package() -> None:
    for name in NAMES:
        assert hasattr(training, name)
        assert name in training.bridge.HOMES


def test_the_training_package_lists_a_dozen_names() -> None:
    assert len(training.__all__) <= 14
    assert set(training.__all__) <= set(training.bridge.HOMES)


def test_every_name_of_the_callback_page_can_be_imported_from_onstep() -> None:
    for name in CALLBACK_PAGE:
        assert name in onstep.__all__
        assert getattr(onstep, name) is getattr(events, name)


@pytest.mark.parametrize("name", CALLABLES)
def test_parameters_have_the_documented_names_order_and_defaults(name: str) -> None:
    parameters = inspect.signature(found(name)).parameters
    documented = documented_parameters(CALLABLES[name])
    assert list(parameters)[: len(documented)] == list(documented)
    for one, default in documented.items():
        parameter = parameters[one]
        assert parameter.kind is not parameter.KEYWORD_ONLY, one
        if default is not parameter.empty:
            assert parameter.default == default, one
            assert type(parameter.default) is type(default), one
    for own in set(parameters) - set(documented):
        assert parameters[own].default is not inspect.Parameter.empty, f"{own} is ours: a documented call lacks it"


def test_a_docstring_names_every_parameter() -> None:
    for name in CALLABLES:
        target = found(name)
        text = inspect.getdoc(target) or ""
        if inspect.isclass(target):
            text += inspect.getdoc(target.__init__) or ""
        assert re.match(r"\S[^\n]{19,}", text), f"{name} has no sentence that says what it gives"
        absent = [
            one
            for one in documented_parameters(CALLABLES[name])
            if one != "self" and not re.search(rf"\b{one}\b", text)
        ]
        assert not absent, f"the docstring of {name} does not say what {absent} is"


@pytest.mark.parametrize("name", BASES)
def test_a_class_has_the_documented_base(name: str) -> None:
    assert BASES[name] in [base.__name__ for base in found(name).__mro__[1:]]


def test_a_step_returns_the_documented_tuple() -> None:
    assert training.TrainStepResult._fields == TRAIN_STEP_RESULT
    result = training.TrainStepResult({}, 0, False, False, 0, None, None)
    assert isinstance(result, tuple)
    assert len(result) == 7


def rows_of_the_guide() -> dict[str, str]:
    """Each name in the guide's tables of names and the module that it says it lives in."""
    rows = re.findall(r"^\| `(\w+)`[^|]*\| `(onstep[\w.]*)` \|", GUIDE.read_text(encoding="utf-8"), re.MULTILINE)
    return dict(rows)


def test_the_guide_says_where_a_documented_name_lives() -> None:
    for name in NAMES:
        home = rows_of_the_guide().get(name)
        assert home is not None, f"{GUIDE.name} has no row `{name}`"
        assert getattr(importlib.import_module(home), name) is getattr(training, name)
