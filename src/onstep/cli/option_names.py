"""Errors of functions told in the words of a command line."""

from __future__ import annotations

import re

_OPTIONS = {
    "smooth_window": "--smooth", "x_axis": "--x-axis", "x_min": "--x-min", "x_max": "--x-max", "y_min": "--y-min",
    "y_max": "--y-max", "vmin": "--vmin", "vmax": "--vmax", "v_min": "--vmin", "v_max": "--vmax",
    "step_stride": "--step-stride", "figsize": "--figsize", "log_scale": "--log-scale", "filter_pattern": "--filter",
}  # fmt: skip
"""Parameters of the functions that draw, and the options that set them."""
_FIRST_WORDS = {"metric": "--metric", "metrics": "--metrics", "filter": "--filter", "format": "--format"}
"""Words that are parameters only where an error begins with them."""
_NAME = re.compile(rf"(?<![\w'\"./-])({'|'.join(_OPTIONS)})(?![\w'\"./-])")
_BEGIN = re.compile(rf"\A({'|'.join(_FIRST_WORDS)}) must\b")


def in_options(message: str) -> str:
    """The text of an error with options in place of parameters: ``y_min must be below y_max`` names --y-min, --y-max.

    Names in quotes and in paths stay as they are.
    """
    message = _BEGIN.sub(lambda match: f"{_FIRST_WORDS[match[1]]} must", message)
    return _NAME.sub(lambda match: _OPTIONS[match[1]], message)
