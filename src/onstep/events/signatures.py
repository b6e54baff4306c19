"""Three spellings at the door, one inside: any accepted callable becomes `handler(context)`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Literal

from onstep.events.context import CallbackContext
from onstep.events.moments import ALWAYS, MOMENTS, Moment

Handler = Callable[[CallbackContext], None]
Style = Literal["context", "hf"]

ACCEPTED = (
    "fn(context), fn() or, in the Hugging Face convention, fn(args, state, control, **kwargs) or any subset of its "
    "keywords with **kwargs"
)

HF_KEYWORDS: frozenset[str] = frozenset(
    {
        *("args", "state", "control", "model", "processing_class", "tokenizer"),
        *("optimizer", "lr_scheduler", "train_dataloader", "eval_dataloader", "trainer"),
        *(name for moment in MOMENTS for name in moment.fields if name != "scheduler"),
    }
)
"""Every keyword that some moment hands to a Hugging Face-style handler."""

_BASE_KEYWORDS = frozenset({*ALWAYS, "optimizer", "scheduler", "train_dataloader", "eval_dataloader"})


class _Shape:
    """What a callable's parameters look like, `self` already bound."""

    def __init__(self, parameters: list[inspect.Parameter]) -> None:
        kinds = inspect.Parameter
        self.positional = [p for p in parameters if p.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)]
        self.required = [p.name for p in self.positional if p.default is kinds.empty]
        self.keyword_only = [p for p in parameters if p.kind is kinds.KEYWORD_ONLY]
        self.required_keywords = [p.name for p in self.keyword_only if p.default is kinds.empty]
        self.takes_args = any(p.kind is kinds.VAR_POSITIONAL for p in parameters)
        self.takes_kwargs = any(p.kind is kinds.VAR_KEYWORD for p in parameters)

    def fits_nothing(self) -> bool:
        return not (self.positional or self.takes_args or self.required_keywords or self.takes_kwargs)

    def fits_context(self) -> bool:
        return len(self.required) <= 1 and bool(self.positional or self.takes_args) and not self.required_keywords

    def fits_hf(self) -> bool:
        required = {*self.required, *self.required_keywords}
        return required <= HF_KEYWORDS and (self.takes_kwargs or bool(required)) and not self._positional_only()

    def fits_hf_by_position(self) -> bool:
        return len(self.required) == 3 and not self.required_keywords

    def looks_like_hf(self) -> bool:
        """Whether the names alone say Hugging Face, with no base class to tell."""
        if not self.fits_hf() or self.takes_args:
            return False
        return self.takes_kwargs or bool(self.required_keywords) or len(self.required) >= 2

    def names(self) -> set[str]:
        return {p.name for p in (*self.positional, *self.keyword_only)}

    def _positional_only(self) -> bool:
        return any(p.kind is inspect.Parameter.POSITIONAL_ONLY for p in self.positional)


def as_handler(fn: Callable[..., Any], moment: Moment, style: Style | None = None) -> Handler:
    """`fn` as a `handler(context)` for `moment`.

    `style` is what the base class says; where it says nothing, or its form does not fit, the signature decides.

    Raises:
        TypeError: when the signature fits no convention; the message has the accepted forms.
    """
    if not callable(fn):
        raise TypeError(f"The handler of '{moment.name}' must be callable, got {fn!r}. Accepted: {ACCEPTED}.")
    if inspect.iscoroutinefunction(fn):
        raise TypeError(f"{_describe(fn)} for '{moment.name}' is async and would never run; make it a plain function.")
    shape = _shape_of(fn)
    if shape is None:
        return fn
    if shape.fits_nothing():
        return lambda context: fn()
    as_hf = _hf_handler(fn, moment, shape)
    if as_hf is not None and (style == "hf" or shape.looks_like_hf()):
        return as_hf
    if shape.fits_context():
        return fn
    raise TypeError(
        f"{_describe(fn)} cannot handle '{moment.name}': its signature {inspect.signature(fn)} fits no convention. "
        f"Accepted: {ACCEPTED}."
    )


def _shape_of(fn: Callable[..., Any]) -> _Shape | None:
    try:
        return _Shape(list(inspect.signature(fn).parameters.values()))
    except ValueError:  # some builtins have no signature: they can only be called with the context
        return None


def _hf_handler(fn: Callable[..., Any], moment: Moment, shape: _Shape) -> Handler | None:
    specific = tuple(name for name in moment.fields if name not in _BASE_KEYWORDS)
    if shape.fits_hf():
        wanted = None if shape.takes_kwargs else shape.names()

        def by_keyword(context: CallbackContext) -> None:
            keywords = context.hf_keywords()
            for name in specific:
                keywords[name] = getattr(context, name)
            if wanted is not None:
                keywords = {name: keywords.get(name) for name in wanted}
            context.control.take(fn(**keywords))

        return by_keyword
    if shape.fits_hf_by_position():

        def by_position(context: CallbackContext) -> None:
            keywords = context.hf_keywords()
            leading = [keywords.pop(name) for name in ("args", "state", "control")]
            for name in specific:
                keywords[name] = getattr(context, name)
            context.control.take(fn(*leading, **(keywords if shape.takes_kwargs else {})))

        return by_position
    return None


def _describe(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__qualname__", None) or repr(fn)
