"""The event engine: events, contexts, the two base classes and the manager that calls them. No torch in here."""

from onstep.events.callback import Callback, TrainerCallback
from onstep.events.callback_timer import CallbackClock
from onstep.events.context import CallbackContext
from onstep.events.control import Control, Request, TrainerControl
from onstep.events.dispatch import Dispatcher
from onstep.events.events import HF_EVENTS, MOMENTS, VALID_EVENTS, Moment
from onstep.events.manager import CallbackManager, normalize_callbacks, should_fire
from onstep.events.trainer_state import RunFacts, TrainerState
from onstep.events.views import OptimizerView, RunView, SchedulerView, WorldView

__all__ = [
    "Callback",
    "CallbackClock",
    "CallbackContext",
    "CallbackManager",
    "Control",
    "Dispatcher",
    "HF_EVENTS",
    "MOMENTS",
    "Moment",
    "OptimizerView",
    "Request",
    "RunFacts",
    "RunView",
    "SchedulerView",
    "TrainerCallback",
    "TrainerControl",
    "TrainerState",
    "VALID_EVENTS",
    "WorldView",
    "normalize_callbacks",
    "should_fire",
]
