"""Determines whether a model, a `compute_loss` or a `compute_loss_func` returns a mean or a share of the step's loss.

Assuming a mean is always safe for code that does not receive `num_items_in_batch`: the mean is weighted by the
micro-batch's labels, which are found and counted here too. Only code that certainly divides by the number receives it.
"""

from __future__ import annotations

import ast
import dis
import inspect
import textwrap
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from types import CodeType
from typing import Literal

from torch import Tensor, nn

from onstep.data import Batch
from onstep.events.context import unwrap
from onstep.training.compute.losses import IGNORE_INDEX

Convention = Literal["share", "mean"]
NUM_ITEMS = "num_items_in_batch"

MAPPING = (dict, Mapping)
"""For `isinstance`, which recognizes a dictionary at once and runs Python code for everything else."""


def of_model(model: nn.Module) -> Convention:
    """A model whose `forward` names `num_items_in_batch`, or passes keywords to its `loss_function`, returns a share.

    A model's own `accepts_loss_kwargs` decides if it is set.
    """
    model = inner_module(model)
    stated = getattr(model, "accepts_loss_kwargs", None)
    if stated is not None:
        return "share" if stated else "mean"
    forward = model.forward
    return "share" if _divides_by_items(getattr(forward, "__func__", forward)) else "mean"


def of_function(function: Callable[..., object]) -> Convention:
    """A function that reads its `num_items_in_batch` divides by it; one that ignores it returns a mean.

    Many overrides of `compute_loss` have the parameter only because the base class does, and return a plain mean.
    """
    function = _plain(function)
    parameters = inspect.signature(function).parameters
    code = getattr(function, "__code__", None)
    if NUM_ITEMS in parameters:
        return "share" if code is None or _loads(code, NUM_ITEMS) else "mean"
    return "share" if _accepts_keywords(function) and code is not None and _spells(code, NUM_ITEMS) else "mean"


def hands_on(compute_loss: Callable[..., object]) -> bool:
    """Whether an overridden `compute_loss` passes `num_items_in_batch`, or all its keywords, to another function.

    The result of `super().compute_loss(...)` then determines the result of the override.
    """
    function = _plain(compute_loss)
    code = getattr(function, "__code__", None)
    if code is None or "compute_loss" not in code.co_names:
        return False
    parameters = inspect.signature(function).parameters.values()
    keywords = (p.name for p in parameters if p.kind is inspect.Parameter.VAR_KEYWORD)
    return any(_loads(code, name) for name in (NUM_ITEMS, *keywords))


def multiplies_by_ranks(compute_loss: Callable[..., object]) -> bool:
    """Whether an overridden `compute_loss` multiplies by the number of ranks, as Hugging Face's own does for a share.

    Its loss is then to be averaged over ranks, not added up.
    """
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(_plain(compute_loss))))
    except (OSError, SyntaxError, TypeError):  # no source to inspect
        return False
    named = {
        target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and _reads_ranks(node.value, set())
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    products = [node for node in ast.walk(tree) if isinstance(getattr(node, "op", None), ast.Mult)]
    return any(_reads_ranks(node, named) for node in products)


def _reads_ranks(node: ast.AST, names: set[str]) -> bool:
    return any(
        (isinstance(one, ast.Attribute) and one.attr in ("num_processes", "world_size"))
        or (isinstance(one, ast.Name) and one.id in names)
        for one in ast.walk(node)
    )


def called(function: Callable[..., object]) -> Callable[..., object]:
    """The function that has the signature of a call: `forward` of a module, whose `__call__` accepts anything."""
    return function.forward if isinstance(function, nn.Module) else function


def accepts_num_items(function: Callable[..., object]) -> bool:
    """Whether a function can be called with `num_items_in_batch`."""
    function = called(function)
    return NUM_ITEMS in inspect.signature(function).parameters or _accepts_keywords(function)


@lru_cache(maxsize=64)
def _divides_by_items(forward: Callable[..., object]) -> bool:
    if NUM_ITEMS in inspect.signature(forward).parameters:
        return True
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(forward))))
    except (OSError, SyntaxError, TypeError):  # no source to inspect
        return False
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    return any(
        isinstance(call.func, ast.Attribute)
        and call.func.attr == "loss_function"
        and any(keyword.arg in (None, NUM_ITEMS) for keyword in call.keywords)
        for call in calls
    )


def _plain(function: Callable[..., object]) -> Callable[..., object]:
    """The Python function behind methods, decorators, partials and callable objects."""
    while hasattr(function, "func"):  # partials
        function = function.func
    function = called(function)
    function = inspect.unwrap(getattr(function, "__func__", function))
    return function if hasattr(function, "__code__") else type(function).__call__


def _accepts_keywords(function: Callable[..., object]) -> bool:
    parameters = inspect.signature(function).parameters.values()
    return any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)


def _loads(code: CodeType, name: str) -> bool:
    """Whether code reads a local variable; a nested function reads it from there too."""
    loads = (step.argval for step in dis.get_instructions(code) if step.opname.startswith("LOAD"))
    return any(name in value if isinstance(value, tuple) else value == name for value in loads)


def _spells(code: CodeType, text: str) -> bool:
    """Whether code contains a string among its constants, or in a tuple of keyword names."""
    constants = [const for value in code.co_consts for const in (value if isinstance(value, tuple) else (value,))]
    return text in constants or any(isinstance(const, CodeType) and _spells(const, text) for const in constants)


class Labels:
    """Finds and counts the labels of micro-batches.

    Args:
        names: keys of the labels in a mapping; in a tuple, the last element is the labels.
        found: keys that the model's `forward` suggests, without `names`: they count if a batch has all of them, else
            `labels` does.
        shifted: the model shifts its labels to predict the next token, so the first label of each row is not trained
            on.
    """

    def __init__(self, names: list[str] | None = None, *, found: Sequence[str] = (), shifted: bool = False) -> None:
        self._names = names or ["labels"]
        self._found = () if names or list(found) == ["labels"] else tuple(found)
        self._shifted = shifted

    def of(self, batch: Batch) -> object:
        """The labels: a tensor, a tuple of them for several names, None unless all are present."""
        if isinstance(batch, MAPPING):
            suggested = tuple(batch.get(name) for name in self._found)
            if suggested and all(labels is not None for labels in suggested):
                return suggested[0] if len(suggested) == 1 else suggested
            if len(self._names) == 1:
                return batch.get(self._names[0])
            found = tuple(batch.get(name) for name in self._names)
            return None if any(labels is None for labels in found) else found
        return batch[-1] if isinstance(batch, (list, tuple)) and len(batch) > 1 else None

    def count(self, batch: Batch) -> Tensor | None:
        """Number of labels that are trained on, as a 0-d tensor; None if they are not integers."""
        return self.measure(batch)[0]

    def measure(self, batch: Batch) -> tuple[Tensor | None, bool]:
        """`count`, and whether there is one label per position of a sequence, rather than one per sample."""
        labels = self._main(batch)
        known = labels if isinstance(labels, Tensor) and _is_class_ids(labels) else None
        are_tokens = known is not None and known.ndim > 1
        if known is not None and are_tokens and self._shifted:
            known = known[..., 1:]
        shifted = batch.get("shift_labels") if isinstance(batch, MAPPING) else None
        if shifted is not None and _is_class_ids(shifted):  # shifted by the collator
            known = shifted
        return None if known is None else known.ne(IGNORE_INDEX).sum(), are_tokens

    def items(self, batch: Batch) -> Tensor | None:
        """What a micro-batch adds to `num_items_in_batch`, as Hugging Face counts it; None without a label tensor.

        It equals `count` where that is known. Labels of any other type, such as a regression's, count by their
        elements.
        """
        counted = self.count(batch)
        if counted is not None:
            return counted
        labels = self._main(batch)
        return labels.ne(IGNORE_INDEX).sum() if isinstance(labels, Tensor) else None

    def _main(self, batch: Batch) -> object:
        return batch.get("labels") if self._found and isinstance(batch, MAPPING) else self.of(batch)


def inner_module(module: nn.Module) -> nn.Module:
    """The user's module without data-parallel, compile and PEFT wrappers."""
    inner = unwrap(module)
    get_base_model = getattr(inner, "get_base_model", None)
    base: nn.Module = get_base_model() if callable(get_base_model) else inner
    return base


def shifts_labels(module: nn.Module) -> bool:
    """Whether a model predicts the next token and shifts its labels itself, as `transformers` models do."""
    module = inner_module(module)
    if getattr(getattr(module, "config", None), "is_encoder_decoder", False):
        return False
    name = type(module).__name__
    return getattr(module, "loss_type", None) == "ForCausalLM" or name.endswith(("ForCausalLM", "LMHeadModel"))


def label_parameters(module: nn.Module) -> list[str]:
    """The parameters of a model's `forward` that are labels, judged by their names as `transformers` does."""
    kind = type(inner_module(module))
    names = list(inspect.signature(kind.forward).parameters)
    spans = ("start_positions", "end_positions") if "QuestionAnswering" in kind.__name__ else ()
    return [name for name in names if "label" in name or name in spans]


def _is_class_ids(labels: object) -> bool:
    return isinstance(labels, Tensor) and labels.ndim > 0 and not labels.is_floating_point()
