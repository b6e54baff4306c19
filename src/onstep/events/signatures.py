"""Adapts handlers of every accepted signature to `handler(context)`."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable
from types import CodeType
from typing import Literal

from onstep.errors import CallbackError
from onstep.events.context import CallbackContext, Keywords
from onstep.events.events import EVENTS, Event

Handler = Callable[[CallbackContext], object]
Style = Literal["context", "hf"]

ACCEPTED = (
    "fn(context), fn() or, in the Hugging Face convention, fn(args, state, control, **kwargs) or any subset of its "
    "keywords with **kwargs"
)

_LEADING = ("args", "state", "control")
"""The arguments that `transformers` passes by position; a handler may rename these three parameters."""

_OBJECTS = (
    *("model", "processing_class", "tokenizer", "optimizer", "lr_scheduler"),
    *("train_dataloader", "eval_dataloader", "trainer"),
)

_BASE_KEYWORDS = frozenset((*_LEADING, *_OBJECTS))
"""Keywords that every Hugging Face-style handler is called with."""

HF_KEYWORDS: frozenset[str] = _BASE_KEYWORDS.union(*(m.own_fields for m in EVENTS))
"""Every keyword that some event passes to a Hugging Face-style handler."""

_SEE_ALL = frozenset({"locals", "vars", "dir", "eval", "exec", "breakpoint", "currentframe", "_getframe"})
"""Names through which a function can read its local variables indirectly."""

_CONTEXT_NAMES = frozenset({"context", "ctx"})
"""Parameter names that indicate the context convention."""


class _Shape:
    """The parameters of a callable by name and kind, without a bound `self`."""

    def __init__(self, parameters: list[inspect.Parameter]) -> None:
        kinds = inspect.Parameter
        positional = [p for p in parameters if p.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)]
        keyword_only = [p for p in parameters if p.kind is kinds.KEYWORD_ONLY]
        self.positional = [p.name for p in positional]
        self.num_positional_only = sum(p.kind is kinds.POSITIONAL_ONLY for p in positional)
        self.required = [p.name for p in positional if p.default is kinds.empty]
        self.keyword_only = [p.name for p in keyword_only]
        self.required_keywords = [p.name for p in keyword_only if p.default is kinds.empty]
        self.names = {*self.positional, *self.keyword_only}
        self.has_var_args = any(p.kind is kinds.VAR_POSITIONAL for p in parameters)
        self.has_var_kwargs = any(p.kind is kinds.VAR_KEYWORD for p in parameters)

    def fits_nothing(self) -> bool:
        return not (self.positional or self.has_var_args or self.required_keywords or self.has_var_kwargs)

    def fits_context(self) -> bool:
        return len(self.required) <= 1 and bool(self.positional or self.has_var_args) and not self.required_keywords

    def fits_hf_by_keyword(self) -> bool:
        required, leading = {*self.required, *self.required_keywords}, self.positional[: len(_LEADING)]
        renames_leading = len(leading) == len(_LEADING) and HF_KEYWORDS.isdisjoint(leading)
        if not required <= HF_KEYWORDS or self.num_positional_only or renames_leading:
            return False
        return self.has_var_kwargs or bool(required)

    def fits_hf_by_position(self) -> bool:
        leading, further = self.positional[: len(_LEADING)], self.positional[len(_LEADING) :]
        in_place = zip(leading, _LEADING, strict=False)
        keeps_leading = all(ours == theirs or ours not in HF_KEYWORDS for ours, theirs in in_place)
        if not keeps_leading or not {*further, *self.keyword_only}.isdisjoint(_LEADING):
            return False
        required = {*self.required[len(_LEADING) :], *self.required_keywords}
        accepts_leading = self.has_var_args or len(leading) == len(_LEADING)
        return accepts_leading and required <= HF_KEYWORDS and self.num_positional_only <= len(_LEADING)

    def looks_like_hf(self) -> bool:
        """Whether the signature alone identifies the Hugging Face convention, without a base class."""
        if self.has_var_args or self.names & _CONTEXT_NAMES:
            return False
        if self.fits_hf_by_keyword():
            return self.has_var_kwargs or bool(self.required_keywords) or len(self.required) >= 2
        return self.has_var_kwargs and len(self.required) >= len(_LEADING) and self.fits_hf_by_position()


def as_handler(fn: Callable[..., object], event: Event, style: Style | None = None) -> Handler:
    """Adapt `fn` to a `handler(context)` for an event.

    `style` is the convention of the base class; without it, or if the signature does not fit it, the signature decides.

    Raises:
        CallbackError: when the signature matches no convention; the message lists the accepted forms.
    """
    if not callable(fn):
        raise CallbackError(f"The handler of '{event.name}' must be callable, got {fn!r}. Accepted: {ACCEPTED}.")
    _refuse_what_never_runs(fn, event)
    shape = _shape_of(fn)
    if shape is None:
        return fn
    if shape.fits_nothing():
        return lambda context: fn()
    as_hf = _hf_handler(fn, event, shape)
    if as_hf is not None and (style == "hf" or shape.looks_like_hf()):
        return as_hf
    if shape.fits_context():
        return fn
    raise CallbackError(
        f"{_describe(fn)} cannot handle '{event.name}': its signature {inspect.signature(fn)} matches no convention. "
        f"Accepted: {ACCEPTED}."
    )


def _refuse_what_never_runs(fn: Callable[..., object], event: Event) -> None:
    for code in (fn, type(fn).__call__):
        if inspect.iscoroutinefunction(code) or inspect.isasyncgenfunction(code):
            kind = "async"
        elif inspect.isgeneratorfunction(code):
            kind = "a generator"
        else:
            continue
        raise CallbackError(
            f"{_describe(fn)} for '{event.name}' is {kind} and would never run; make it a plain function."
        )
    method = fn.__func__ if inspect.ismethod(fn) and not isinstance(fn.__self__, type) else None
    first = next(iter(inspect.signature(method).parameters), None) if inspect.isfunction(method) else None
    if first in _CONTEXT_NAMES.union(_LEADING):
        raise CallbackError(
            f"{_describe(fn)} for '{event.name}' is a method whose first parameter is {first!r}, which would be the "
            f"callback itself; put self before it."
        )


def _shape_of(fn: Callable[..., object]) -> _Shape | None:
    try:
        shape = _Shape(list(inspect.signature(fn, follow_wrapped=False).parameters.values()))
    except ValueError:  # some builtins have no signature; they are called with the context
        return None
    if shape.has_var_args and shape.has_var_kwargs and not shape.names:  # a decorator that forwards everything
        return _Shape(list(inspect.signature(fn).parameters.values()))
    return shape


def _hf_handler(fn: Callable[..., object], event: Event, shape: _Shape) -> Handler | None:
    by_position = shape.fits_hf_by_position()
    selected = _selection(event, shape)

    def call_by_keyword(context: CallbackContext) -> None:
        keywords = context.keywords or context.event_keywords()
        returned = fn(**(keywords if selected is None else selected(keywords)))
        if returned is not None:
            context.control.merge(returned)

    def call_by_position(context: CallbackContext) -> None:
        keywords = context.keywords or context.event_keywords()
        further = keywords if selected is None else selected(keywords)
        further = {name: value for name, value in further.items() if name not in _LEADING}
        context.control.merge(fn(context.args, context.trainer_state, context.control, **further))

    def call_with_leading(context: CallbackContext) -> None:
        state, given, keywords = context.state, context.__dict__, dict[str, object]()
        for name in further:
            keywords[name] = given[name] if name in given else getattr(context, name)
        returned = fn(getattr(state, "args", None), getattr(state, "trainer_state", None), context.control, **keywords)
        if returned is not None:
            context.control.merge(returned)

    further = [*shape.positional[len(_LEADING) :], *shape.keyword_only]
    takes_few = tuple(shape.positional[: len(_LEADING)]) == _LEADING and set(further).issubset(event.own_fields)
    if takes_few and shape.num_positional_only <= len(_LEADING) and _ignores_keywords(fn):
        return call_with_leading
    if shape.fits_hf_by_keyword() and not (shape.has_var_args and by_position):
        return call_by_keyword
    return call_by_position if by_position else None


def takes_context(fn: Callable[..., object]) -> bool:
    """Whether a function has one parameter that has to be passed, and no keywords: the context convention."""
    shape = _shape_of(fn)
    return shape is not None and shape.fits_context() and len(shape.required) == 1 and not shape.has_var_kwargs


def call_with_keywords(fn: Callable[..., object], context: CallbackContext) -> None:
    """Call a Hugging Face-style function with the first three arguments by position, and those keywords it accepts."""
    shape, keywords = _shape_of(fn), dict(context.keywords or {})
    leading = [keywords.pop(name) for name in _LEADING]
    if shape is not None and not shape.has_var_kwargs:
        keywords = {name: value for name, value in keywords.items() if name in shape.names}
    context.control.merge(fn(*leading, **keywords))


def _ignores_keywords(fn: Callable[..., object]) -> bool:
    """Whether a function's code never reads its `**kwargs`, which can then be omitted."""
    code = getattr(getattr(fn, "__func__", fn), "__code__", None)
    if not isinstance(code, CodeType) or hasattr(fn, "__wrapped__") or not code.co_flags & inspect.CO_VARKEYWORDS:
        return False
    if code.co_flags & inspect.CO_VARARGS or not _SEE_ALL.isdisjoint(code.co_names):
        return False
    keywords = code.co_varnames[code.co_argcount + code.co_kwonlyargcount]
    for step in dis.get_instructions(code):
        # from Python 3.13 on, one instruction can name two variables
        if keywords in (step.argval if isinstance(step.argval, tuple) else (step.argval,)):
            return False
    return True


def _selection(event: Event, shape: _Shape) -> Callable[[Keywords], Keywords] | None:
    """Build a function that selects a handler's keywords from the event's; None if the handler gets them unchanged.

    Keywords that a handler requires and the event does not have are None.
    """
    names = shape.names
    known = _BASE_KEYWORDS.union(event.own_fields)
    demanded = HF_KEYWORDS.intersection((*shape.required, *shape.required_keywords))
    further = demanded - known
    if not shape.has_var_kwargs:
        wanted = further | (names & known)
        return lambda keywords: {name: keywords.get(name) for name in wanted}
    if not further:
        return None
    return lambda keywords: keywords | {name: keywords.get(name) for name in further}


def _describe(fn: Callable[..., object]) -> str:
    return getattr(fn, "__qualname__", None) or repr(fn)
