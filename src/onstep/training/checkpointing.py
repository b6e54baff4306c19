"""A run's checkpoints: what they hold, when they are written, and how a run continues from one."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onstep.checkpoint import (
    CheckpointInfo,
    CheckpointManager,
    ModelState,
    Retention,
    RngState,
    SavedCheckpoint,
    SaveRequest,
    SharingPattern,
    StateComponent,
    check_encodable,
    resolve,
)
from onstep.config import ConfigContainer
from onstep.errors import CheckpointError
from onstep.events import Request
from onstep.training.callback_states import CallbackStates
from onstep.training.decisions import write_decision
from onstep.training.progress_log import log_async_checkpoint_saved
from onstep.training.saved_parts import (
    DataPosition,
    LoopParts,
    RunProgress,
    SchedulerPosition,
    check_has_state,
    finite_numbers,
    is_stateful,
)

if TYPE_CHECKING:
    from onstep.training.state import GlobalState
    from onstep.training.telling import Teller

logger = logging.getLogger(__name__)

COMPONENTS = ("model", "optimizer", "scheduler", "trainer", "dataset", "rng", "callbacks")
"""What `checkpoint.components` selects from."""


class RunCheckpoints:
    """Writes the checkpoints of a run and continues it from one.

    Continuing has two halves: `load_progress` before any data is opened, `load_position` right before the first step,
    so that nothing between them can move the random generators.
    """

    def __init__(self, state: GlobalState, tell: Teller, root: Path) -> None:
        config = state.cfg.checkpoint
        self.state = state
        self.tell = tell
        self.root = root
        self.callbacks = CallbackStates(tell.manager)
        self.rng = RngState(state.world.device)
        self.start: CheckpointInfo | None = None
        """The checkpoint that the run continues from."""
        self._chooses = False
        """Whether the start was asked for, and `load_optim` and `load_rng` say how much of it is taken."""
        self._loaded: set[str] = set()
        self.manager = CheckpointManager(
            root,
            state.world,
            run_id=state.run_folder.run_id if state.run_folder is not None else "",
            retention=retention_of(state.cfg),
            async_save=config.async_save,
            on_durable=self._tell_durable,
            on_save_error="continue" if config.on_save_error == "continue" else "stop",
            groups=state.process_groups,
        )

    @property
    def is_writing(self) -> bool:
        """Whether this rank still writes its files of a pending save."""
        return self.manager.is_saving and not self.manager.is_written

    def find(self) -> CheckpointInfo | None:
        """The checkpoint to continue from: the one asked for, else the run's newest verified one. Collective.

        Newer checkpoints than the one asked for belong to a branch that the run leaves; they are kept aside.

        Raises:
            CheckpointError: for one that was asked for and is not there.
        """
        state, asked = self.state, asked_start(self.state.cfg)
        folder = state.run_folder
        if asked is not None and not (folder is not None and folder.has_started_from(asked)):
            self.start, self._chooses = self._resolve(), True
        elif state.cfg.checkpoint.resume:
            self.start = self.manager.newest()
            self._check_not_all_damaged()
        if self.start is not None:
            self._leave_branch(self.start)
        if asked is not None and folder is not None and state.world.is_main:
            folder.note_start(asked)  # after the branch was left: until then a crash must ask for the same start
        return self.start

    def load_progress(self, model: list[Any], optimizer: Any, scheduler: Any) -> None:
        """Load weights, optimizer, scheduler, progress and callbacks, and tell `on_checkpoint_load`. Collective.

        Raises:
            CheckpointError: when a part does not fit; nothing trains on half a checkpoint.
        """
        info = self.start
        if info is None:
            return
        with self._todays_values(info, optimizer):
            self._load(info, self._progress_components(model, optimizer, scheduler, loads=True))
        self.state.is_resumed, self.state.is_unsaved = True, False
        if self.state.world.is_main:
            logger.info("continuing from %s", info.path)
        self.tell("on_checkpoint_load", checkpoint_step=info.step, checkpoint_path=str(info.path))

    def load_position(self, reader: Any, scheduler: Any = None) -> None:
        """Load the data position, the log interval and the random generators. Collective."""
        if self.start is None:
            return
        takes_all = self.state.cfg.checkpoint.load_optim or not self._chooses
        if scheduler is not None and "scheduler" not in self._loaded and takes_all:
            self._load(self.start, [self._scheduler(scheduler)])
        self._load_position(self.start, reader)

    def restore(self, info: CheckpointInfo, model: list[Any], optimizer: Any, scheduler: Any) -> None:
        """Go back to a checkpoint while the run goes on, and tell `on_checkpoint_load`. Collective.

        The data stays where it is: what led to this is not read again.
        """
        self._load(info, self._progress_components(model, optimizer, scheduler))
        self._load(info, self._position_components(None, loads=True))
        self._leave_branch(info)
        self.tell("on_checkpoint_load", checkpoint_step=info.step, checkpoint_path=str(info.path))

    def save(self, model: list[Any], optimizer: Any, scheduler: Any, reader: Any, persistent: bool = True) -> None:
        """Write a checkpoint of this moment. Collective; asynchronous where `checkpoint.async_save` says so.

        Raises:
            CheckpointError: see `CheckpointManager.save`.
        """
        state = self.state
        state.is_unsaved = False
        self.manager.save(
            SaveRequest(
                step=state.train_state.step,
                components=self._selected(
                    [
                        *self._progress_components(model, optimizer, scheduler),
                        *self._position_components(DataPosition(reader, state)),
                    ]
                ),
                config=state.cfg.to_dict(),
                metrics=finite_numbers(state.last_metrics) if state.evaluated_at == state.train_state.step else {},
                layout={"world_size": state.world.size, "num_microbatches": state.num_microbatches},
                persistent=persistent,
            )
        )

    def finalize_if_written(self) -> None:
        """Make a pending save durable, if all ranks have written their files. Collective, right after an agreement."""
        if self.manager.is_saving and not self.state.exits.some_rank_writes:
            self.manager.finalize()

    def finish(self) -> None:
        """Wait for a pending save and make it durable. Collective."""
        if self.manager.is_saving:
            self.manager.finalize()

    def close(self) -> None:
        """Let go of threads and buffers; a save that is not durable is abandoned. No collective."""
        self.manager.close()

    def check_states(self, optimizer: Any, scheduler: Any) -> None:
        """Refuse states that no checkpoint can hold, before anything is trained.

        Raises:
            CheckpointError: naming the optimizer, callback or value, and the way out.
        """
        config = self.state.cfg.checkpoint
        if config.save_optim and optimizer is not None:
            check_has_state("optimizer", optimizer, "give it both, or set checkpoint.save_optim=false")
        if config.components is None or "callbacks" in config.components:
            check_encodable(self.callbacks.state_dict(), "callbacks")
        if scheduler is not None and config.save_optim:
            check_encodable(SchedulerPosition(scheduler).state_dict(), "scheduler")

    def _resolve(self) -> CheckpointInfo | None:
        """What `checkpoint.load` and `ckpt_step` name, found and verified on rank 0."""
        config, world = self.state.cfg.checkpoint, self.state.world
        outcome: Any = None
        if world.is_main:
            try:
                outcome = resolve(Path(config.load) if config.load else self.root, step=config.ckpt_step)
            except CheckpointError as error:
                missing = config.load is not None and not Path(config.load).exists()
                outcome = error if missing or config.ckpt_step or config.exit_on_missing_checkpoint else None
                if outcome is None:
                    logger.warning("%s The run starts from nothing (checkpoint.exit_on_missing_checkpoint).", error)
        outcome = world.share(outcome)
        if isinstance(outcome, CheckpointError):
            raise outcome
        info: CheckpointInfo | None = outcome
        return info

    @contextmanager
    def _todays_values(self, info: CheckpointInfo, optimizer: Any) -> Iterator[None]:
        """With `checkpoint.on_config_change=apply`, let today's optimizer settings win over those that are loaded.

        A best metric of another name is forgotten.
        """
        if self.state.cfg.checkpoint.on_config_change != "apply" or optimizer is None:
            yield
            return
        of_the_scheduler = ("params", "lr", "initial_lr", "weight_decay")
        before = [
            {key: value for key, value in group.items() if key not in of_the_scheduler}
            for group in optimizer.param_groups
        ]
        yield
        for group, values in zip(optimizer.param_groups, before, strict=False):
            group.update(values)
        stored = info.manifest.config.get("validation", {}).get("metric_for_best_model")
        if stored != self.state.cfg.validation.metric_for_best_model:
            self.state.train_state.best_metric = self.state.train_state.best_step = None

    def _check_not_all_damaged(self) -> None:
        """Refuse to start from nothing over checkpoints that cannot be used; the reasons were told one by one."""
        there = self.state.world.share(sorted(path.name for path in self.root.glob("checkpoint-*")))
        if self.start is None and there:
            raise CheckpointError(
                f"none of the checkpoints in {self.root} can be used ({', '.join(there)}), and starting from nothing "
                f"would hide that. Restore one of them, or start a new run: run.fresh=true, or another run.name."
            )

    def _leave_branch(self, info: CheckpointInfo) -> None:
        """Keep newer checkpoints of this run aside: the run continues from an older one."""
        if info.path.parent.resolve() == self.root.resolve():
            self.manager.set_aside_newer(info.step)

    def _load(self, info: CheckpointInfo, components: list[StateComponent]) -> None:
        known = set(info.manifest.components)
        there = [one for one in components if one.key in known]
        lacking = [one.key for one in components if one.key not in known]
        required = [one.key for one in components if one.key not in known and one.required]
        if required:
            raise CheckpointError(
                f"{info.path} has no {', '.join(required)}; continue from another checkpoint (checkpoint.ckpt_step), "
                f"or start a new run from its weights alone (checkpoint.load with checkpoint.load_optim=false)."
            )
        if lacking and self.state.world.is_main:
            logger.warning("%s has no %s; the run goes on with what it has", info.path, ", ".join(lacking))
        self.manager.load(info, there, skip=known - {one.key for one in there})
        self._loaded |= {one.key for one in there}

    def _load_position(self, info: CheckpointInfo, reader: Any) -> None:
        position = DataPosition(reader, self.state)
        self._load(info, self._position_components(position, loads=True))
        if not position.is_loaded or info.manifest.world_size != self.state.world.size:
            position.seek()

    def _selected(self, components: list[StateComponent]) -> list[StateComponent]:
        wanted = self.state.cfg.checkpoint.components
        if wanted is None:
            return components
        keep = {*wanted, *(("loop", "rank") if "trainer" in wanted else ())}
        return [one for one in components if one.key in keep or one.key not in (*COMPONENTS, "loop", "rank")]

    def _progress_components(
        self, model: list[Any], optimizer: Any, scheduler: Any, loads: bool = False
    ) -> list[StateComponent]:
        config, replicated = self.state.cfg.checkpoint, SharingPattern.REPLICATED
        compared, selected = config.validate_replication, config.components is None
        parts = [
            StateComponent("model", ModelState(model), replicated, required=selected, validate_replication=compared)
        ]
        if optimizer is not None and ((config.load_optim or not self._chooses) if loads else config.save_optim):
            parts.append(
                StateComponent("optimizer", optimizer, replicated, required=selected, validate_replication=compared)
            )
            if scheduler is not None:
                parts.append(self._scheduler(scheduler))
        parts.append(StateComponent("trainer", RunProgress(self.state), replicated, required=selected))
        parts.append(StateComponent("callbacks", self.callbacks, SharingPattern.PER_RANK, required=False))
        return [*parts, *self._user_components()]

    def _user_components(self) -> list[StateComponent]:
        """What the user's objects bring: a forward step with a state, and the `state_components()` of callbacks."""
        forward_step = self.state.forward_step_func
        parts = []
        if is_stateful(forward_step):
            parts.append(StateComponent("forward_step", forward_step, SharingPattern.PER_RANK, required=False))
        for callback in self.tell.manager.callbacks if self.tell.manager is not None else []:
            of_callback = getattr(callback, "state_components", None)
            parts += of_callback() if callable(of_callback) else []
        return parts

    def _scheduler(self, scheduler: Any) -> StateComponent:
        return StateComponent("scheduler", SchedulerPosition(scheduler), SharingPattern.REPLICATED, required=False)

    def _position_components(self, position: DataPosition | None, loads: bool = False) -> list[StateComponent]:
        state, config, per_rank = self.state, self.state.cfg.checkpoint, SharingPattern.PER_RANK
        parts = [StateComponent("loop", LoopParts(state.loop_parts), SharingPattern.REPLICATED, required=False)]
        if position is not None:
            parts.append(StateComponent("dataset", position, per_rank, required=False))
        if state.rank_parts:
            parts.append(StateComponent("rank", LoopParts(state.rank_parts), per_rank, required=False))
        if (config.load_rng or not self._chooses) if loads else config.save_rng:
            parts.append(StateComponent("rng", self.rng, per_rank, required=False))
        return parts

    def _tell_durable(self, saved: SavedCheckpoint) -> None:
        self.state.saved_step = saved.step
        if self.state.cfg.checkpoint.async_save and self.state.cfg.logger.log_progress:
            log_async_checkpoint_saved(self.state, saved.step)
        details = {"checkpoint_step": saved.step, "path": str(saved.path)}
        write_decision(self.state, Request("saved", "the loop", "", self.state.save_reason, 0, details))
        self.tell("on_checkpoint_save", checkpoint_step=saved.step, checkpoint_path=str(saved.path))

    def load_best_model(self, model: list[Any]) -> None:
        """Load the weights of the best checkpoint into `model`; progress and optimizer stay. Collective."""
        best = self.manager.best()
        if best is None:
            logger.warning("no checkpoint has the metric of checkpoint.load_best_model_at_end; the weights stay")
            return
        self.manager.load(
            best,
            [StateComponent("model", ModelState(model), SharingPattern.REPLICATED)],
            skip=set(best.manifest.components) - {"model"},
        )
        if self.state.world.is_main:
            logger.info("loaded the best weights, of step %d", best.step)


def open_checkpoints(state: GlobalState, tell: Teller) -> RunCheckpoints | None:
    """The checkpoints of a run, in `checkpoint.save` or its folder; None for a run that has neither."""
    if state.cfg.checkpoint.save is not None:
        return RunCheckpoints(state, tell, Path(state.cfg.checkpoint.save))
    if state.run_folder is not None:
        return RunCheckpoints(state, tell, state.run_folder.checkpoints)
    return None


def asked_start(config: ConfigContainer) -> str | None:
    """What `checkpoint.load` and `checkpoint.ckpt_step` ask for, in words; None where they ask for nothing."""
    checkpoint = config.checkpoint
    if checkpoint.load is None and checkpoint.ckpt_step is None:
        return None
    step = "" if checkpoint.ckpt_step is None else f" step {checkpoint.ckpt_step}"
    return f"{Path(checkpoint.load).absolute() if checkpoint.load else 'own'}{step}"


def retention_of(config: ConfigContainer) -> Retention:
    """Which checkpoints are kept."""
    checkpoint, validation = config.checkpoint, config.validation
    return Retention(
        most_recent_k=checkpoint.most_recent_k,
        keep_every_n=checkpoint.keep_every_n,
        keep_best_n=max(checkpoint.keep_best_n, int(checkpoint.load_best_model_at_end)),
        metric=validation.metric_for_best_model or "loss",
        greater_is_better=validation.greater_is_better,
    )
