"""Lets a running job be watched and steered over HTTP."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from onstep.analysis.logs.run_status import rewind_command
from onstep.analysis.logs.samples_log import keep_samples, samples_of_run
from onstep.analysis.logs.tokenizers import tokenizer_of
from onstep.checkpoint import checkpoints
from onstep.commands import COMMANDS
from onstep.control.commands import CommandError, CommandRefusedError
from onstep.control.delivery import Delivery, describe_commands
from onstep.control.feed import Feed
from onstep.control.history import History
from onstep.control.inbox import Inbox
from onstep.control.job_server import Address, JobServer, absolute, generated_id, missing_packages
from onstep.control.live_status import LiveStatus
from onstep.control.registry import check_job_id
from onstep.errors import ConfigError, MissingExtraError, RankFailedError, named_text
from onstep.events import CallbackContext, CallbackManager, RunView, TrainerCallback
from onstep.events.settings import check_setting
from onstep.metrics.torch_profiler import NextSteps, is_recording
from onstep.models.generation.generate import representative
from onstep.models.generation.prompts import can_generate, continue_prompts
from onstep.record.kinds import FILE_NAME as RECORD_NAME
from onstep.record.kinds import Kind
from onstep.record.writer import logging_dir_of
from onstep.training.compute.undisturbed import generate_undisturbed, is_run_by_all
from onstep.training.watchdog.stack_exchange import StackExchange

logger: logging.Logger = logging.getLogger(__name__)

_SAVING = tuple(one.name for one in COMMANDS.values() if "should_save" in one.requests)
_SAMPLING = {"do_sample": True, "top_k": 20, "temperature": 0.7}


class TrainerControlCallback(TrainerCallback):
    """Serves a job's status, metrics and events, and accepts commands: stop, save, pause, set a value, ...

    Rank 0 serves HTTP from a background thread, on loopback and with a generated bearer token; `onstep control`,
    `onstep.control` and a browser find address and token in the registry, in files that only this user can read. A
    command is a request to the loop: all ranks apply it after the step in which it arrived, whatever the logging
    interval. Decisions are recorded in `decisions.jsonl` with their author; a resumed run keeps what was set.

    Register it on all ranks. Between commands a step costs rank 0 one comparison.

    Args:
        job_id: name of the job in the registry; None generates `job_<unix seconds>_<host>_<pid>`.
        port: port to bind; None for the first free one from 8900.
        enable_http: False serves nothing; None serves if starlette and uvicorn are installed.
        host: address to bind; None means 127.0.0.1. Any other makes the job reachable from other machines, without
            encryption.
        auth_token: the bearer token; None generates 32 random bytes in hexadecimal.
        disable_auth: accept commands from everyone who can connect.
        uds: bind a Unix socket in the registry, which only this user can open, in place of host and port.

    Raises:
        ConfigError: for arguments that contradict each other; when training begins, if a live job has the same id, or
            the port is taken.
        RuntimeError: when training begins, if none of the ports from 8900 to 8999 is free.
    """

    reads_weights = False
    needs_onstep = "its commands are requests to Onstep's loop"

    def __init__(
        self,
        job_id: str | None = None,
        port: int | None = None,
        enable_http: bool | None = None,
        host: str | None = None,
        auth_token: str | None = None,
        disable_auth: bool = False,
        *,
        uds: bool = False,
    ) -> None:
        self.job_id = check_job_id(job_id) if job_id is not None else generated_id()
        self.enable_http = enable_http
        self._server = JobServer(self.job_id, Address(host, port, auth_token, disable_auth, uds))
        self.feed = Feed()
        """What the job shows."""
        self.inbox = Inbox()
        """The commands that wait for the end of a step."""
        self._delivery = Delivery(self.inbox, self.feed)
        self._live: LiveStatus | None = None
        self._run: RunView | None = None
        self._model: Any = None
        self._stacks: StackExchange | None = None
        self._profile: NextSteps | None = None
        self._is_paused = False
        self._evaluated_step: int | None = None

    # The life of the server

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Refuse Hugging Face's Trainer, before anything is served."""
        super().on_train_begin(args, state, control, **kwargs)  # type: ignore[misc]

    def on_train_start(self, context: CallbackContext) -> None:
        """Keep hold of the run, and start the server on rank 0."""
        run, self._model, args = context.state, representative(context.unwrapped_model), context.args
        self._run = run
        if not self._is_served():
            return
        self._stacks = StackExchange(run.world.rank, run.world.size)
        if run.world.is_main:
            self._reset(run, context.trainer_state)
            dirs = {"output_dir": getattr(args, "output_dir", None), "logging_dir": logging_dir_of(args)}
            paths = {name: absolute(path) for name, path in dirs.items()}
            self._show_earlier_samples(run.run_dir)
            run.record.listeners.add(self._hear)
            self._server.open(self.feed, self.inbox, run.control.commands, **paths)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Refuse further commands; what follows can be watched."""
        self._end_profile()
        self._delivery.close("training has ended, so nothing can be applied any more")

    def on_run_end(self, context: CallbackContext) -> None:
        """Show how the run ended, and close the server."""
        self._end_profile()
        self._delivery.close("the run has ended")
        if self._stacks is not None:
            self._stacks.close()
        if self._server.is_open:
            self.feed.live = None if self.feed.live is None else _frozen(self.feed.live())
            self.feed.update(status="ended", reason=context.reason)
            error = None if context.exception is None else named_text(context.exception)
            self.feed.add_event("end", {"reason": context.reason, "error": error})
            self._server.close()

    def _is_served(self) -> bool:
        missing = [] if self.enable_http is False else missing_packages()
        if missing:
            level = logging.INFO if self.enable_http is None else logging.WARNING
            what = " and ".join(missing)
            logger.log(level, "this job cannot be controlled without %s: pip install 'onstep[control]'", what)
        return self.enable_http is not False and not missing

    def _reset(self, run: RunView, state: Any) -> None:
        log = None if run.run_dir is None else run.run_dir.path / RECORD_NAME
        self.feed = Feed(History(log, list(state.log_history)))
        self._is_paused, self._evaluated_step = False, None
        self.inbox = Inbox(check=self._check, at_once={"stacks": self._collect_stacks})
        self._delivery = Delivery(self.inbox, self.feed)
        for record in state.log_history:
            self.feed.add_record(record)
        self.feed.update(
            job_id=self.job_id,
            status="running",
            run=None if run.run_dir is None else run.run_dir.path.name,
            output_dir=None if run.run_dir is None else str(run.run_dir.path.absolute()),
            rewind=None if run.run_dir is None else rewind_command(run.run_dir.path.absolute()),
            world_size=run.world.size,
            started_at=time.time(),
            num_train_epochs=state.num_train_epochs,
            commands=describe_commands(run.control.commands),
            has_checkpoints=run.checkpoints is not None,
            checkpoints=_steps_of(run.checkpoints),
            memory=[],
            paused_by=None,
            versions=_versions(),
            tokenizer=None if run.run_dir is None else tokenizer_of(run.run_dir.read()),
        )
        self.feed.live = self._live = LiveStatus(run, self.inbox)

    # Commands

    def on_step_end(self, context: CallbackContext) -> None:
        """Request what has been sent during the step."""
        self._deliver(context)
        if self._profile is not None and self._profile.end_step():
            self._end_profile()

    def on_paused(self, context: CallbackContext) -> None:
        """Request what has been sent while the run waits."""
        self._deliver(context)

    def _deliver(self, context: CallbackContext) -> None:
        """Request what has been sent; a save that may become the best checkpoint is evaluated first."""
        if not (self.inbox.has_new or self._delivery.is_busy):
            return
        saves = set(_SAVING) & set(self._delivery.deliver(context.control, context.event, context.step))
        chooses = context.state.cfg.checkpoint.load_best_model_at_end and _has_validation_data(context.state)
        if saves and chooses and self._evaluated_step != context.step:
            context.control.evaluate("checkpoint.load_best_model_at_end compares what is saved")

    def on_decision(self, context: CallbackContext) -> None:
        """Show what was decided, and answer the client that asked for it."""
        request = context.request
        assert request is not None
        shown = {"step": context.step, **vars(request)}
        self.feed.add_event("save" if request.flag == "saved" else "decision", shown)
        if request.flag in ("pause", "resume"):
            self._is_paused = request.flag == "pause"
            by = request.author if self._is_paused else None
            self.feed.update(status="paused" if self._is_paused else "running", paused_by=by)
            if self._live is not None:
                (self._live.pause if self._is_paused else self._live.resume)()
        if request.flag == "rolled_back":
            kept = [step for step in self.feed.status.get("checkpoints", ()) if step <= context.step]
            self.feed.update(checkpoints=kept)
            history = context.state.trainer_state.log_history
            self.feed.go_back([one for one in history if one.get("step", 0) <= context.step])
        self._delivery.note_decision(request, context.step)

    def on_command(self, context: CallbackContext) -> None:
        """Generate texts, or begin to profile."""
        request = context.request
        assert request is not None
        command, data = request.details.get("command"), request.details.get("data", {})
        if command == "generate" and (context.state.world.is_main or is_run_by_all(self._model)):
            request.details["result"] = self._generate(context, **data)
        elif command == "profile":
            self._begin_profile(context, data["steps"])

    def _check(self, command: str, data: dict[str, Any]) -> None:
        """Refuse what this run cannot do now; called in the server's thread."""
        run = self._run
        assert run is not None
        if command in (*_SAVING, "rollback") and run.checkpoints is None:
            _refuse(command, "this run has no directory for checkpoints; give it a run.name or an output_dir")
        if command == "rollback" and run.control.no_rollback is not None:
            _refuse(command, run.control.no_rollback)
        if command == "pause" and self._is_paused and not self.inbox.awaits("resume"):
            _refuse(command, "the run is paused already")
        if command == "resume" and not self._is_paused and not self.inbox.awaits("pause"):
            _refuse(command, "the run is not paused")
        if command == "evaluate" and not _has_validation_data(run):
            _refuse(command, "this run has no validation data")
        if command == "generate" and (run.processing_class is None or not can_generate(self._model)):
            _refuse(command, "the run has no tokenizer, or its model cannot generate text")
        if command == "profile" and (self._profile is not None or is_recording()):
            _refuse(command, "a profiler is already recording")
        if command == "set":
            self._check_setting(run, data)

    def _check_setting(self, run: RunView, data: dict[str, Any]) -> None:
        if isinstance(data["value"], float) and data["value"].is_integer() and data["key"] != "lr_factor":
            data["value"] = int(data["value"])  # JSON does not tell 5.0 from 5
        try:
            check_setting(data["key"], data["value"], run.control.declared)
        except ConfigError as error:
            raise CommandError(f"set: {error}") from None
        step = run.train_state.step
        if data["key"] == "train_iters" and data["value"] is not None and data["value"] <= step:
            _refuse(
                "set", f"train_iters={data['value']} would end the run, which is at step {step}; send graceful_stop"
            )

    def _generate(self, context: CallbackContext, prompts: list[str], max_new_tokens: int) -> list[dict[str, str]]:
        try:
            options = (context.state.processing_class, prompts, _SAMPLING, max_new_tokens, context.step)
            texts = generate_undisturbed(self._model, lambda: continue_prompts(self._model, *options))
        except RankFailedError:
            raise
        except Exception as error:  # noqa: BLE001 - models can raise anything; a failed sample must not end the run
            return [{"error": named_text(error)}]
        try:
            if context.state.world.is_main:
                keep_samples(context.trainer_state, logging_dir_of(context.args), texts)
        except OSError as error:
            logger.warning("control: cannot keep the texts: %s", error)
        return [{"prompt": prompt, "text": text} for prompt, text in texts]

    def _show_earlier_samples(self, run_dir: Any) -> None:
        """Show the texts that a resumed run has; the training does not depend on them."""
        try:
            for sample in [] if run_dir is None else samples_of_run(run_dir.path):
                self.feed.add_event("sample", asdict(sample))
        except OSError as error:
            logger.warning("control: cannot show the texts of before: %s", error)

    def _hear(self, kind: Kind, step: int, data: Mapping[str, Any]) -> None:
        """Show a text that a TextgenCallback or a command has added to the record."""
        if kind == "sample":
            self.feed.add_event(kind, {"timestamp": time.time(), "step": step, **data})

    def _begin_profile(self, context: CallbackContext, steps: int) -> None:
        run = context.state
        directory = Path("profiles") if run.run_dir is None else run.run_dir.path / "profiles"
        name = f"step{context.step + 1}-rank{run.world.rank}.json"
        self._profile = NextSteps(steps, directory / name, self.name)

    def _end_profile(self) -> None:
        profile, self._profile = self._profile, None
        if profile is not None:
            written = profile.close()
            error = "" if written else "no step was recorded: training ended, or another profiler began; see the log"
            self._delivery.finish(["profile"], {"trace": str(profile.path.absolute())}, error=error)

    def _collect_stacks(self) -> dict[str, str]:
        assert self._stacks is not None
        return {f"rank {rank}": stacks for rank, stacks in self._stacks.collect().items()}

    # What the job shows

    def on_log_step(self, context: CallbackContext) -> None:
        """Collect the memory of all ranks. Collective."""
        if self._stacks is None:
            return
        logs = context.logs or {}
        peaks = logs.get("peak_mem_allocated", [])
        resident = context.state.world.gather(_resident_bytes())
        if context.state.world.is_main:
            memory = [
                {"rank": rank, "rss_bytes": rss, "peak_device_bytes": peaks[rank] if rank < len(peaks) else None}
                for rank, rss in enumerate(resident)
            ]
            self.feed.update(memory=memory)
            self.feed.history.add(context.step, time.time(), {"rss_bytes": resident})

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Show a record of the metrics log."""
        if self._server.is_open and logs:
            self.feed.add_record({"timestamp": time.time(), "step": state.global_step, "epoch": state.epoch, **logs})

    def on_eval_start(self, context: CallbackContext) -> None:
        """Show that an evaluation runs."""
        self._show("evaluating")

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        """Show an evaluation, and answer the client that asked for it."""
        self._show()
        self._evaluated_step = state.global_step
        if not self._server.is_open:
            return
        if kwargs.get("trainer") is None:  # a Trainer has passed it to `on_log`
            record = {"timestamp": time.time(), "step": state.global_step, "epoch": state.epoch, **(metrics or {})}
            self.feed.add_record(record)
        self._delivery.finish(["evaluate"], dict(metrics or {}))

    def on_save_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Show that a checkpoint is being saved."""
        self._show("saving")

    def on_save(self, context: CallbackContext) -> None:
        """Show a checkpoint, and answer the client that asked for it."""
        self._show()
        if self._server.is_open:
            saved = {*self.feed.status["checkpoints"], context.checkpoint_step}
            self.feed.update(checkpoints=sorted(saved))
            result = {"checkpoint": context.checkpoint_path, "step": context.checkpoint_step}
            self._delivery.finish(_SAVING, result)

    def _show(self, status: str | None = None) -> None:
        if self._server.is_open:
            self.feed.update(status=status or ("paused" if self._is_paused else "running"))


def add_control(manager: CallbackManager) -> None:
    """Add a `TrainerControlCallback` to the callbacks of a run, unless there is one.

    Args:
        manager: the callbacks of the run, to which it is added.

    Raises:
        MissingExtraError: if a package that it requires is not installed.
    """
    if any(isinstance(one, TrainerControlCallback) for one in manager.callbacks):
        return
    if missing := missing_packages():
        raise MissingExtraError(f"run.control requires {' and '.join(missing)}: pip install 'onstep[control]'")
    manager.add(TrainerControlCallback())


def _refuse(command: str, why: str) -> None:
    raise CommandRefusedError(f"{command}: {why}.")


def _has_validation_data(run: RunView) -> bool:
    is_opened_later = getattr(run.trainer, "eval_dataset", None) is not None  # by a Trainer, when it evaluates
    return is_opened_later or run.eval_dataloader is not None


def _frozen(status: dict[str, Any]) -> Callable[[], dict[str, Any]]:
    return lambda: status


def _resident_bytes() -> int:
    import psutil

    return int(psutil.Process().memory_info().rss)


def _steps_of(run_checkpoints: Any) -> list[int]:
    """The steps of the checkpoints that a resumed run finds."""
    return [] if run_checkpoints is None else sorted(one.step for one in checkpoints(run_checkpoints.root))


def _versions() -> dict[str, str]:
    from importlib.metadata import version
    from platform import python_version

    return {"onstep": version("onstep"), "torch": version("torch"), "python": python_version()}
