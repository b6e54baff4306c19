"""Megatron Bridge's import path of the callback page; the names live in `onstep.events`."""

import logging

from onstep.events import (
    VALID_EVENTS,
    Callback,
    CallbackContext,
    CallbackManager,
    normalize_callbacks,
    should_fire,
)

__all__ = ["VALID_EVENTS", "Callback", "CallbackContext", "CallbackManager", "normalize_callbacks", "should_fire"]

logger: logging.Logger = logging.getLogger(__name__)
