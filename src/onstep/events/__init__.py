"""The event engine: moments, contexts, the two base classes and the manager that tells them. No torch in here."""

from onstep.events.callback import Callback, TrainerCallback
from onstep.events.callback_clock import CallbackClock
from onstep.events.context import CallbackContext
from onstep.events.control import Control, Request, TrainerControl
from onstep.events.manager import CallbackManager, normalize_callbacks, should_fire
from onstep.events.moments import HF_EVENTS, MOMENTS, VALID_EVENTS, Moment
from onstep.events.trainer_state import RunFacts, TrainerState

__all__ = [
    "Callback",
    "CallbackClock",
    "CallbackContext",
    "CallbackManager",
    "Control",
    "HF_EVENTS",
    "MOMENTS",
    "Moment",
    "Request",
    "RunFacts",
    "TrainerCallback",
    "TrainerControl",
    "TrainerState",
    "VALID_EVENTS",
    "normalize_callbacks",
    "should_fire",
]
