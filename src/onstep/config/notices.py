"""Warnings about a configuration, each said once, however often the configuration is checked."""

from __future__ import annotations

import warnings

_said: set[str] = set()


def warn_once(text: str) -> None:
    """Warn (UserWarning) of `text`, once in this process: a run checks its configuration more than once."""
    if text not in _said:
        _said.add(text)
        warnings.warn(text, UserWarning, stacklevel=2)
