"""Events of a run and the callbacks that they call. This package does not import torch.

A callback is an object with methods named after events, or a function that is registered for one event. A
`CallbackManager` holds callbacks of both conventions and calls them in order of registration:

    class PrintLoss(Callback):  # the context convention, as in Megatron Bridge
        def on_log(self, context):
            print(context.step, context.logs.get("loss"))

    class StopAtTen(TrainerCallback):  # the Hugging Face convention
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = state.global_step >= 10

    manager = CallbackManager()
    manager.add([PrintLoss(), StopAtTen()])
    manager.register("on_eval_end", lambda context: print(context.metrics))

An event without listeners costs about 40 ns. No feature of the loop is a callback.
`EVENTS` has the events in firing order, and `help(onstep.events)` lists them; the guide to callbacks has them as a
table. Every event can be handled in both conventions, usually under the same name.
"""

from onstep.events.callback import Callback, DefaultFlowCallback, TrainerCallback
from onstep.events.callback_timer import CallbackTimer
from onstep.events.context import CallbackContext
from onstep.events.control import Control, Request, TrainerControl
from onstep.events.dispatch import Dispatcher
from onstep.events.events import EVENTS, HF_EVENTS, VALID_EVENTS, Event, listing
from onstep.events.exportable_state import ExportableState
from onstep.events.manager import CallbackManager, normalize_callbacks, should_fire
from onstep.events.run_state import RunInfo, RunState
from onstep.events.settings import Setting
from onstep.events.trainer_state import TrainerState
from onstep.events.views import OptimizerView, RunView, SchedulerView, WorldView

__all__ = [
    "Callback",
    "CallbackTimer",
    "CallbackContext",
    "CallbackManager",
    "Control",
    "DefaultFlowCallback",
    "Dispatcher",
    "HF_EVENTS",
    "EVENTS",
    "Event",
    "ExportableState",
    "OptimizerView",
    "Request",
    "RunInfo",
    "RunState",
    "RunView",
    "SchedulerView",
    "Setting",
    "TrainerCallback",
    "TrainerControl",
    "TrainerState",
    "VALID_EVENTS",
    "WorldView",
    "normalize_callbacks",
    "should_fire",
]

__doc__ = f"{__doc__}\n{listing()}"
