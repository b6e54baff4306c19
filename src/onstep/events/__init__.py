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

These are the events, in firing order. The validation events (`on_eval_*`), the test events (`on_test_*`) and the save
events (`on_checkpoint_save*`) fire at every evaluation, test and save, not only at the position listed. Every event can
be handled in both conventions, usually under the same name; "Hugging Face" gives the name there if it differs.

"Fields" are the fields of the context that an event sets in addition to `state`, `model`, `user_state`, `control`,
`rank`, `trainer` and `processing_class`, which every event sets; Hugging Face-style handlers get them as keyword
arguments. T stands for the training objects: `optimizer`, `scheduler`, `train_dataloader` and `eval_dataloader`.

    on_checkpoint_load        After a checkpoint is loaded, before the data is opened.
                              Fields: T, checkpoint_step, checkpoint_path.
    on_data_init_start        After the model, optimizer and scheduler are built, before any data file is opened.
                              Fields: optimizer, scheduler.
    on_init_end               At the end of setup, once per train() and evaluate() call.
                              Fields: T.
    on_train_start            After `model.train()`, before the first step.
                              Fields: T. Hugging Face: on_train_begin.
    on_epoch_start            Before each epoch.
                              Fields: T. Hugging Face: on_epoch_begin.
    on_step_begin             Before the step's micro-batches are read.
                              Fields: T.
    on_train_step_start       After the step's micro-batches are read, before `train_step`.
                              Fields: T, micro_batches, sample_ids.
    on_forward_backward_start Before the forward and backward pass of each micro-batch, which is on the device.
                              Fields: T, micro_batch. Hugging Face: on_forward_backward_begin.
    on_forward_backward_end   After the forward and backward pass of each micro-batch.
                              Fields: T, micro_batch, loss.
    on_substep_end            After each micro-batch of a step except the last.
                              Fields: T.
    on_pre_optimizer_step     After gradients are reduced and clipped (raw for a third-party optimizer), before the
                              update.
                              Fields: T, grad_norm.
    on_optimizer_step         After the update, before the scheduler steps and gradients are zeroed.
                              Fields: T, grad_norm.
    on_train_metrics          After the update, with this rank's loss, gradient norm and label count of the step as
                              device tensors.
                              Fields: T, loss, grad_norm, tokens.
    on_train_step_end         After `train_step`, before the step counter advances.
                              Fields: T, loss_dict, grad_norm, skipped_iter, sample_ids.
    on_step_end               After the step counter advances; `control` holds what is due at this step.
                              Fields: T.
    on_decision               On rank 0, when the loop has recorded a decision, such as a request that all ranks agreed
                              on.
                              Fields: T, request.
    on_command                After ranks agreed on a command that callbacks carry out; `request.details` has its name
                              and data.
                              Fields: T, request.
    on_log_step               At a logged step, before `on_log`; callbacks may add to `logs`.
                              Fields: T, logs.
    on_log                    At a logged step, with `logs` complete; also once with the final metrics.
                              Fields: T, logs.
    on_eval_start             After `model.eval()`, before the validation loop.
    on_eval_step_start        Before each validation batch.
    on_eval_step_end          After each validation batch.
                              Hugging Face: on_prediction_step.
    on_eval_end               After the validation loop, before `model.train()`.
                              Fields: total_loss_dict, metrics. Hugging Face: on_evaluate.
    on_checkpoint_save_start  Before a checkpoint is saved.
                              Fields: optimizer, checkpoint_step. Hugging Face: on_save_begin.
    on_checkpoint_save        After a checkpoint is durable on disk.
                              Fields: optimizer, checkpoint_step, checkpoint_path. Hugging Face: on_save.
    on_paused                 While the run is paused, about ten times a second; callbacks may ask to resume.
                              Fields: T.
    on_epoch_end              After each epoch, including one that was stopped early.
                              Fields: T.
    on_final_metrics          After the last step, with the final metrics in `logs`, before `on_log`; callbacks may add
                              to `logs`.
                              Fields: T, logs.
    on_train_end              After the training loop, before the final validation and test.
                              Fields: T.
    on_test_start             After `model.eval()`, before the test loop.
    on_test_step_start        Before each test batch.
    on_test_step_end          After each test batch.
                              Hugging Face: on_prediction_step.
    on_test_end               After the test loop.
                              Fields: total_loss_dict, metrics. Hugging Face: on_predict.
    on_exception              Once, when an exception ends the run; never for a requested exit.
                              Fields: T, exception.
    on_run_end                Exactly once, at the very end; `reason` is completed, stopped, preempted or failed.
                              Fields: T, reason, exception.

An event without listeners costs about 40 ns. No feature of the loop is a callback.
"""

from onstep.events.callback import Callback, DefaultFlowCallback, TrainerCallback
from onstep.events.callback_timer import CallbackTimer
from onstep.events.context import CallbackContext
from onstep.events.control import Control, Request, TrainerControl
from onstep.events.dispatch import Dispatcher
from onstep.events.events import EVENTS, HF_EVENTS, VALID_EVENTS, Event
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
