"""Makes a run one site of a DiLoCo run: sites that share only an ordinary network train one model together."""

from __future__ import annotations

import logging
import os
from typing import Any

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from onstep.checkpoint import SharingPattern, StateComponent
from onstep.commands import COMMANDS
from onstep.config import TrainingArguments
from onstep.diloco.group.sites import Sites
from onstep.diloco.protocol.relay import RELAYED
from onstep.diloco.worker import DiLoCoWorker
from onstep.diloco.worker.defaults import (
    DEFAULTS,
    check_one_way,
    check_verifies,
    decided_by_server,
    flag_from_environment,
    number_from_environment,
)
from onstep.diloco.worker.divergence import DivergenceWatch
from onstep.diloco.worker.first_contact import check_server, seconds_of_retries
from onstep.diloco.worker.kept_work import WorkKept
from onstep.diloco.worker.parameters import Parameters
from onstep.diloco.worker.schedules import Schedule, advance
from onstep.distributed import World
from onstep.distributed.shards import rank, world_size
from onstep.errors import ConfigError
from onstep.events import Control, RunState, TrainerCallback
from onstep.record.kinds import Metrics
from onstep.train_state import StateDict

logger: logging.Logger = logging.getLogger(__name__)


_NO_ROLLBACK = (
    "one site of a DiLoCo run cannot be rolled back alone: the others would average the way back, and the samples of "
    "the steps that are repeated would not come again; skip such steps (on_spike=skip, on_nonfinite=skip), or let an "
    "operator go back for all sites (onstep diloco control go-back)"
)


class DiLoCoCallback(TrainerCallback):
    """Trains together with the other workers of a DiLoCo server, or the other sites of a process group.

    Without an address or a group, every method is a no-op.

    So one configuration trains alone and, with `DILOCO_SERVER` set, as a worker. A whole job is one worker, whether it
    is one process or many (DDP, FSDP2): rank 0 talks to the server. Steps are counted when the loop has counted them,
    and work is weighted by the labels trained on. When training begins the model gets the run's parameters, the
    learning-rate schedule continues at the run's step, and the data is this worker's share of it, from where it has
    been used; the run ends at its last step for a worker that joined later, too. After it, and where a stop was
    requested, the steps since the last round are submitted as well, so that workers that end together end with the same
    model; at the last step before the evaluation and the checkpoint that are due there. A run that fails or is
    preempted submits nothing more. What is exchanged when, and what happens when the server cannot be reached, is
    described at `onstep.diloco.worker.DiLoCoWorker`.

    Checkpoints hold the position in the cycle, submissions in flight and what the codec has lost so far; the
    parameters of the last round come from the server again. A run that resumes while the server still has that
    round continues exactly; else it gets the server's newest parameters, and the local steps since its last
    submission are lost.

    Metrics: `diloco/sync_count`, `/version`, `/contributors`, `/local_step`, `/sync_every`, `/last_sync_time` and
    `/total_sync_time` in seconds, `/last_send_mb`, `/last_recv_mb`, `/total_send_mb` and `/total_recv_mb`,
    `/quantization_error` of the last submission, `/steps_per_second`, and others when there is something to report:
    `/lost_steps`, which were given up because they began from a version that was too old after an absence,
    `/diverging`, ...

    A worker does what an operator tells all workers of the run to do (`onstep diloco control stop`, `save --workers`,
    ...): heartbeats bring the commands, and they are carried out at the end of the step.

    It works in Hugging Face's own `Trainer` as well. There, restrict the data to the worker's share yourself
    (`dataset.shard(num_workers, index)`), and checkpoints do not hold its state. It does not tell callbacks of an
    exception: the worker then leaves when training begins again or the callback is gone, or is evicted after ten
    minutes without a step.

    Args:
        server_addr: `host:port`; by default `DILOCO_SERVER`; empty for training alone.
        sync_every: optimizer steps of this worker between two submissions; by default `DILOCO_SYNC_EVERY`, else 500.
            This default, and the following ones, yield to the server's values, and the worker says so.
        worker_id: unique in the run; by default `DILOCO_WORKER_ID`, else the checkpoint's, else a new one.
        bf16_comm: True submits bfloat16, False float32; by default `DILOCO_BF16_COMM`, else True.
        dylu: take as many steps as the server recommends; by default `DILOCO_DYLU`, else False.
        heartbeat_interval: seconds between heartbeats, at most a third of the server's timeout; by default
            `DILOCO_HEARTBEAT_INTERVAL`, else 30.
        num_fragments: must be the server's if given; by default `DILOCO_NUM_FRAGMENTS`, else 1.
        timeout: seconds that a sync waits for its result; training continues afterwards.
        max_sync_retries: see `DiLoCoWorker`.
        codec: `fp32`, `bf16`, `int8` or `int4`; wins over `bf16_comm`; by default `DILOCO_CODEC`.
        verify: for an `https` server, the PEM file of the authority that vouches for it; by default `DILOCO_CA_FILE`,
            else the authorities of the system.
        auth_token: of the server; by default `DILOCO_TOKEN`, or the token file.
        verify_tls: True; the identity of an `https` server is always verified.
        group: of the sites, instead of a server, as of `onstep.diloco.Sites`; by default `DILOCO_GROUP`. A checkpoint
            then has the state of the outer optimizer, too, and all sites resume from checkpoints of the same round.

    Raises:
        ConfigError: for an environment variable that is not a number where one is needed, or a group and a server.
    """

    changes_weights = True

    def __init__(
        self,
        server_addr: str | None = None,
        sync_every: int | None = None,
        worker_id: str | None = None,
        bf16_comm: bool | None = None,
        dylu: bool | None = None,
        heartbeat_interval: float | None = None,
        num_fragments: int | None = None,
        timeout: float = 600,
        max_sync_retries: int = 3,
        *,
        codec: str | None = None,
        verify: str | None = None,
        auth_token: str | None = None,
        verify_tls: bool | None = None,
        group: Sites | ProcessGroup | str | None = None,
    ) -> None:
        self.server_addr = os.environ.get("DILOCO_SERVER", "") if server_addr is None else server_addr
        self.group = os.environ.get("DILOCO_GROUP") or None if group is None else group
        check_one_way(self.server_addr, self.group)
        self.needs_whole_model = self.group is not None
        self.no_rollback = _NO_ROLLBACK if self.active else None
        self.worker_id = worker_id or os.environ.get("DILOCO_WORKER_ID") or None
        number = number_from_environment if self.active else _no_number
        interval = number("DILOCO_HEARTBEAT_INTERVAL", float) if heartbeat_interval is None else heartbeat_interval
        self.heartbeat_interval = 30.0 if interval is None else interval
        given = {
            "sync_every": number("DILOCO_SYNC_EVERY", int) if sync_every is None else sync_every,
            "bf16_comm": flag_from_environment("DILOCO_BF16_COMM") if bf16_comm is None else bf16_comm,
            "dylu": flag_from_environment("DILOCO_DYLU") if dylu is None else dylu,
            "num_fragments": number("DILOCO_NUM_FRAGMENTS", int) if num_fragments is None else num_fragments,
        }
        self._given = {name for name, value in given.items() if value is not None}
        values: dict[str, Any] = DEFAULTS | {name: given[name] for name in self._given}
        self.sync_every, self.bf16_comm = values["sync_every"], values["bf16_comm"]
        self.dylu, self.num_fragments = values["dylu"], values["num_fragments"]
        self.timeout, self.max_sync_retries = timeout, max_sync_retries
        self.codec = codec or os.environ.get("DILOCO_CODEC") or None
        self.verify = verify or os.environ.get("DILOCO_CA_FILE") or None
        self.auth_token = auth_token
        check_verifies(verify_tls)
        self.worker: DiLoCoWorker | None = None
        """While training."""
        self._loaded: StateDict | None = None
        self.loaded_divided: StateDict = {}
        """What ranks have parts of, in a checkpoint, until the worker exists."""
        self._tokens: Tensor | float | None = None
        self._loss: Tensor | None = None
        self._counted = 1.0
        """The part of a rank's tokens that it counts, where several ranks have the same ones."""
        self._offset = 0
        """Optimizer steps of the run that this worker has not taken."""
        self._steps_to_advance = 0
        """Those that its schedule does not have yet."""
        self._data_start = 0
        """Samples of this worker's share that were used before it joined, less what it has read of another share."""
        self._share = (0, 1)
        self._times_over = 0
        self._divergence: DivergenceWatch | None = None
        self._is_at_start = False
        self._is_told_to_save = False
        self._adds_at_log_step = False

    @property
    def active(self) -> bool:
        """Whether a server or a group is configured."""
        return bool(self.server_addr) or self.group is not None

    def check_start(self) -> None:
        """Before anything is built, wait until the server answers.

        Raises:
            RefusedByServerError: for an address at which there is another server, with a wrong token, or under the
                `worker_id` of a process that lives.
            ServerLostError: without an answer, after 2 + 4 + ... seconds, with `max_sync_retries` terms.
        """
        if self.server_addr:
            check_server(
                self.server_addr,
                lost_seconds=seconds_of_retries(self.max_sync_retries),
                worker_id=self.worker_id,
                auth_token=self.auth_token,
                verify=self.verify,
            )

    def skips_event(self, name: str) -> bool:
        """Without a server or a group, only the beginning is of interest, where that is logged.

        Args:
            name: the name of the event.
        """
        return not self.active and name not in ("on_train_begin", "on_train_start")

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: RunState,
        control: object,
        model: nn.Module | None = None,
        optimizer: object = None,
        **kwargs: object,
    ) -> None:
        """Register, and give the model the run's parameters. Collective.

        Raises:
            RefusedByServerError: if the server refuses this worker.
            ServerLostError: without an answer.
        """
        if not self.active:
            logger.info("DiLoCo: no server is set, and no group, so this callback is a no-op")
            return
        if model is None or optimizer is None:
            logger.error("DiLoCo: there is no model or no optimizer when training begins; this callback stays inactive")
            return
        self._stop(merge=False)  # of a training that failed, which Hugging Face's Trainer tells nobody
        loaded, self._loaded = self._loaded, None
        self._counted = args.world_size / world_size()
        worker = self._new_worker(model, loaded)
        if self.loaded_divided:
            worker.load_state_dict({**(loaded or {}), "divided": self.loaded_divided})
        self.loaded_divided = {}
        worker.start(step=state.global_step)
        self.worker, self._is_at_start, self._adds_at_log_step, self._tokens = worker, True, False, None
        self._times_over, self._divergence = worker.times_over, DivergenceWatch(worker.registered.settings)
        self._loss = None
        # of rank 0, as a rank that the job did not have before has no state
        known, data_start, share = worker.share(_saved_place(loaded))
        self._offset = max(known, worker.registered.step - state.global_step)
        self._steps_to_advance = self._offset - known  # a restored schedule has the others behind it
        is_same = share is None or tuple(share) == self._place()
        continues = is_same and (worker.has_resumed or self.group is not None)
        self._take_share(args, state.global_step, kwargs.get("train_dataloader"), data_start if continues else None)
        if self.group is not None:
            logger.info("DiLoCo: this is site %d of %d, without a server", *self._place())
            return
        logger.info("DiLoCo: %s is a worker of %s", worker.worker_id, self.server_addr)
        asked = {name: self._asked(name) for name in DEFAULTS} | ({"bf16_comm": True} if self.codec else {})
        decided = decided_by_server(worker.registered.settings, asked)
        if decided is not None:
            logger.info("DiLoCo: %s", decided)

    def _place(self) -> tuple[int, int]:
        """This worker's share of the data, and how many there are."""
        assert self.worker is not None
        return self.worker.registered.slot, self.worker.registered.num_slots

    def _take_share(self, args: TrainingArguments, step: int, data: object, known: int | None) -> None:
        """Train on this worker's part of the data, from where it has been used; None: another part than before."""
        assert self.worker is not None
        take_share = getattr(data, "take_share", None)
        place, self._share = self.worker.registered, self._place()
        start = (place.slot_steps - step) * _samples_of_a_step(args)
        # the server may have counted more of this share than the worker, if it is new or its checkpoint is old
        self._data_start = start if known is None else max(known, start)
        if take_share is not None and not place.has_share:
            worker_id = self.worker.worker_id
            self._stop(merge=False, reason=f"all {place.num_slots} shares of the data are taken")
            raise ConfigError(
                f"all {place.num_slots} shares of the data are taken, so {worker_id!r} would train on another worker's "
                f"samples; wait until one has left, or start the server of a new run with --num-workers for the most "
                f"workers at a time."
            )
        if take_share is not None:
            take_share(place.slot, place.num_slots, self._data_start)
        elif place.num_slots > 1:
            logger.warning(
                "DiLoCo: this data cannot be divided here; make it give samples i with i %% %d == %d, or data that no "
                "other worker has",
                place.num_slots,
                place.slot,
            )

    def _asked(self, name: str) -> Any:
        """A value that was given, or set later; None for the default, which yields to the server's."""
        value = getattr(self, name)
        return value if name in self._given or value != DEFAULTS[name] else None

    def _new_worker(self, model: nn.Module, loaded: StateDict | None) -> DiLoCoWorker:
        known = None if loaded is None else str(loaded["worker_id"])
        worker = DiLoCoWorker(
            model,
            None,
            self.server_addr,
            self._asked("sync_every"),
            self.worker_id or known,
            self._asked("bf16_comm"),
            self.timeout,
            self._asked("dylu"),
            self.heartbeat_interval,
            self._asked("num_fragments"),
            self.max_sync_retries,
            codec=self.codec,
            auth_token=self.auth_token,
            verify=self.verify,
            group=self.group,
        )
        if loaded is not None:
            worker.load_state_dict(loaded)
        return worker

    def on_step_begin(
        self,
        args: TrainingArguments,
        state: RunState,
        control: object,
        lr_scheduler: Schedule | None = None,
        **kwargs: object,
    ) -> None:
        """Before the first step, move the learning-rate schedule to the run's step; later, take another share."""
        if self._is_at_start:
            self._is_at_start = False
            if self._steps_to_advance and lr_scheduler is not None:
                advance(lr_scheduler, self._steps_to_advance, _samples_of_a_step(args))
        elif self.worker is not None and (self._share, self._times_over) != (self._place(), self.worker.times_over):
            slot, num_slots = self._place()
            if self._share != (slot, num_slots):
                logger.warning(
                    "DiLoCo: %s was away, and another worker has its share of the data; "
                    "it continues with share %d of %d",
                    self.worker.worker_id,
                    slot,
                    num_slots,
                )
            self._times_over = self.worker.times_over  # the samples of the steps that were given up come again
            self._take_share(args, state.global_step, kwargs.get("train_dataloader"), None)

    def on_train_metrics(
        self,
        args: object,
        state: object,
        control: object,
        tokens: Tensor | float | None = None,
        loss: Tensor | None = None,
        **kwargs: object,
    ) -> None:
        """Note how many labels this rank has trained on in the step, and with which loss."""
        self._loss = loss
        self._tokens = tokens if tokens is None or self._counted == 1 else tokens * self._counted

    def on_step_end(self, args: object, state: RunState, control: Control, **kwargs: object) -> None:
        """Count the step, and exchange what is due; after the last one, all that is left. Collective."""
        if self.worker is None:
            return
        self.worker.end_step(self._tokens, self._loss)
        self._obey(control)
        if self._is_last_step(state):
            self.worker.finish()
            control.should_training_stop = True

    def _obey(self, control: Control) -> None:
        """Ask the loop for what an operator has asked all workers of the run to do."""
        assert self.worker is not None
        commands = self.worker.take_commands()
        if not isinstance(control, Control):  # of Hugging Face's Trainer, whose ranks do not agree on flags
            commands = self.worker.share(commands)
        for name in dict.fromkeys(commands):
            logger.info("DiLoCo: the server tells its workers to %s", RELAYED[name])
            self._is_told_to_save = self._is_told_to_save or name == "save_checkpoint"
            for flag in COMMANDS[name].requests:
                if hasattr(control, flag):
                    setattr(control, flag, True)
                else:
                    logger.warning("DiLoCo: this Trainer cannot abort; it stops, and saves as it does at every end")

    def on_save(self, args: object, state: RunState, control: object, **kwargs: object) -> None:
        """Say that the checkpoint is there which the server has asked for."""
        if self._is_told_to_save and self.worker is not None:
            logger.info("DiLoCo: the checkpoint that the server asks for is that of step %d", state.global_step)
        self._is_told_to_save = False

    def on_log_step(
        self, args: object, state: RunState, control: object, logs: Metrics | None = None, **kwargs: object
    ) -> None:
        """Add the metrics to `logs`, before anything reports them."""
        self._adds_at_log_step = True
        if self.worker is not None and logs is not None:
            self._add_metrics(state, logs)

    def on_log(
        self, args: object, state: RunState, control: object, logs: Metrics | None = None, **kwargs: object
    ) -> None:
        """Add the metrics here in Hugging Face's Trainer, which has no event before."""
        if self.worker is not None and logs is not None and not self._adds_at_log_step:
            self._add_metrics(state, logs)

    def _add_metrics(self, state: RunState, logs: Metrics) -> None:
        assert self.worker is not None
        assert self._divergence is not None
        logs.update(self.worker.sync_metrics)
        loss = logs.get("loss")
        if isinstance(loss, int | float):
            self._divergence.note(loss, state.global_step)
        if self._divergence.is_diverging:
            logs["diloco/diverging"] = 1

    def on_exception(self, args: object, state: object, control: object, **kwargs: object) -> None:
        """Leave the run without waiting for anybody."""
        self._stop(merge=False, reason="its training failed")

    def on_train_end(self, args: object, state: RunState, control: Control, **kwargs: object) -> None:
        """Leave the run; where a stop was requested before the last step, submit what is left. Collective then.

        A preempted run leaves at once: its checkpoint is written, and it continues from there.

        Raises:
            WorkKept: a SystemExit with code 75, if the server does not answer; the steps that are in no round are on
                disk, and the next start submits them.
        """
        is_aborted = getattr(control, "should_abort_without_save", False)
        ends = control.should_training_stop and not is_aborted
        is_last = self._is_last_step(state)  # after which it has finished
        if ends and is_last and self.worker is not None:
            self.worker.keep_unsent()
        reason = "it was stopped" if ends else "it was aborted" if is_aborted else "it ended early"
        if is_last:
            own = f", {state.global_step} of them by this worker" if self._offset else ""
            reason = f"the run's {state.global_step + self._offset} steps are taken{own}"
        kept = self._stop(merge=ends and not is_last, reason=reason)
        if kept is not None and isinstance(control, Control):
            raise WorkKept(kept)

    def _is_last_step(self, state: RunState) -> bool:
        return bool(0 < state.max_steps <= state.global_step + self._offset)

    def state_components(self, model: nn.Module) -> list[StateComponent]:
        """What the codec has lost so far, of which each rank saves and loads its part, on any number of ranks."""
        if not self.active:
            return []
        pattern = SharingPattern.SHARDED if world_size() > 1 else SharingPattern.REPLICATED
        return [StateComponent("diloco", _Divided(self, model), pattern, required=False)]

    def _stop(self, merge: bool, reason: str = "") -> str | None:
        """Leave the run; what could not be submitted, and where that is kept."""
        worker, self.worker = self.worker, None
        if worker is None:
            return None
        worker.stop(merge, reason)
        return worker.kept

    def state_dict(self) -> StateDict:
        """The worker's state but for what ranks have parts of (`state_components`); empty unless training as one."""
        if self.worker is None:
            return {}
        state = {name: value for name, value in self.worker.state_dict().items() if name != "divided"}
        place = {"data_start": self._data_start, "offset": self._offset, "share": list(self._share)}
        return {**state, **place}

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Keep a state until training begins and the worker exists; an empty one is ignored.

        Args:
            state_dict: what `state_dict()` returned.
        """
        self._loaded = dict(state_dict) if state_dict else None


class _Divided:
    """What the ranks of a worker have parts of, as the state of a component."""

    def __init__(self, callback: DiLoCoCallback, model: nn.Module) -> None:
        self._callback, self._model = callback, model

    def state_dict(self) -> StateDict:
        """See `DiLoCoWorker.state_dict`."""
        worker = self._callback.worker
        return {} if worker is None else dict(worker.state_dict()["divided"])

    def destinations(self, outline: StateDict) -> StateDict:
        """New tensors for residuals, divided between the ranks as the model is here; the tokens of ranks stay whole."""
        parts = Parameters(self._model, World(rank(), world_size())).parts
        own = {kind: outline[kind] | parts.empty_state(outline[kind]) for kind in outline if kind != "tokens"}
        return {**outline, **own}

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Keep it until the worker exists."""
        self._callback.loaded_divided = dict(state_dict)


def _no_number(name: str, kind: type) -> None:
    """Without a server, no number of the environment is of interest."""


def _saved_place(loaded: StateDict | None) -> tuple[int, int, list[int] | None]:
    """Offset, start of the data and share of a checkpoint."""
    return (0, 0, None) if loaded is None else (loaded.get("offset", 0), loaded["data_start"], loaded.get("share"))


def _samples_of_a_step(args: TrainingArguments) -> int:
    return int(args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size)
