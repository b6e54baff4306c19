"""Names the call in a user's code that led to where a function was called from."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path
from types import FrameType

import torch
from torch import nn

_TORCH, _ONSTEP = str(Path(torch.__file__).parent), str(Path(__file__).parents[1])
_LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_CALLED_MODEL = "_wrapped_call_impl"


def call_in_own_code(outer: FrameType | None) -> str | None:
    """What the innermost frame of the user's own code has called, and where, as in `DTensor.full_tensor() at a.py:3`.

    Args:
        outer: the last frame to look at; None looks at all frames.

    Returns:
        None if there is no such frame.
    """
    frames: list[FrameType] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        frames.append(frame)
        frame = None if frame is outer else frame.f_back
    for excluded in ((_TORCH, _ONSTEP, "<frozen", *_LIBRARIES), (_TORCH, _ONSTEP, "<frozen")):
        for number, one in enumerate(frames):
            if not one.f_code.co_filename.startswith(excluded):
                name = next(filter(None, map(_name_of, reversed(frames[:number]))), None)
                return None if name is None else f"{name}() at {one.f_code.co_filename}:{one.f_lineno}"
    return None


def _name_of(frame: FrameType) -> str | None:
    """What users call the function of a frame; None for wrappers and private functions."""
    name = frame.f_code.co_qualname
    if frame.f_code.co_name == _CALLED_MODEL:
        called = frame.f_locals.get("self")
        return type(called).__name__ if isinstance(called, nn.Module) else None
    if "<locals>" in name or frame.f_code.co_name.startswith("_"):
        return None
    module = str(frame.f_globals.get("__name__", "")).removesuffix(".distributed_c10d")
    return name if "." in name else f"{module}.{name}"
