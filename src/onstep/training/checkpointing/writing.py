"""Writes the checkpoints of a run, and resumes a run from one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from onstep.checkpoint import (
    CheckpointInfo,
    CheckpointManager,
    Manifest,
    ModelState,
    SavedCheckpoint,
    SaveRequest,
    SharingPattern,
    StateComponent,
)
from onstep.config import ChangeClass
from onstep.config.differences import of_kind
from onstep.data import StepSource
from onstep.distributed import World
from onstep.distributed.pipeline.seats import is_staged
from onstep.distributed.random_streams import draw_alike
from onstep.errors import CheckpointError
from onstep.events import Dispatcher, Request
from onstep.optim import OptimizerParamScheduler
from onstep.training.checkpointing.current_values import current_values, place_scheduler
from onstep.training.checkpointing.in_memory import StateInMemory, open_state_in_memory
from onstep.training.checkpointing.over_stages import ModelOverStages
from onstep.training.checkpointing.place import SavePlace
from onstep.training.checkpointing.saved_states import DataPosition, RunComponents, finite_numbers, pattern_of
from onstep.training.checkpointing.starts import (
    DECISIONS,
    asked_start,
    check_not_all_damaged,
    compare_configuration,
    compare_identity,
    compare_layout,
    layout_of,
    leave_commands,
    lift_end,
    newest_of_all,
    record_lost_save,
    requested_start,
)
from onstep.training.checkpointing.weights_of_others import beside_weights_of_others
from onstep.training.protocols import Trained, UserScheduler
from onstep.training.run import Run
from onstep.training.runs.claims import Claim
from onstep.training.runs.decisions import BRANCH, DecisionLog
from onstep.training.runs.mirrored import retention_of
from onstep.training.runs.sent_commands import everything_sent, steps_to_keep
from onstep.training.stages.agreement import write_decision
from onstep.training.stages.best_metric import note_best_checkpoint
from onstep.training.stages.progress_log import log_async_checkpoint_saved

logger = logging.getLogger(__name__)

_IN_MEMORY = "in the memory of the nodes"
"""Why a state is saved there, for the record."""


class RunCheckpoints:
    """Writes the checkpoints of a run and resumes it from one.

    Resuming has three parts: `load_progress` before any data is opened, `load_features` before `on_train_start`, and
    `load_position` right before the first step, so that nothing in between can advance the random generators.
    """

    def __init__(self, state: Run, notify: Dispatcher, root: Path, claim: Claim | None = None) -> None:
        config = state.cfg.checkpoint
        self.state = state
        self.notify = notify
        self.root = root
        self._place = SavePlace(state, root)
        self.components = RunComponents(state, notify)
        self._given = None if claim is None else claim.start
        self.start: CheckpointInfo | None = None
        """The checkpoint from which the run continues."""
        self.is_chosen_start = False
        """The user chose it, so `load_optim` and `load_rng` determine how much of it is loaded."""
        self.is_loaded = False
        """Whether its progress is loaded."""
        self.saved_mark: tuple[object, ...] | None = None
        self.failure: str | None = None
        self.some_rank_writes = False
        self._memory: StateInMemory | None = None
        self._is_over = False
        self._saved_step: int | None = None
        """The step of the newest checkpoint on the disk that this process knows of."""
        self._identity: Mapping[str, str] = {} if claim is None else claim.identity
        """Digests of what the run is trained on, which its checkpoints record."""
        applied = claim.changes if claim is not None and config.on_config_change == "apply" else ()
        self._changes = of_kind(applied, ChangeClass.TRAJECTORY)
        """The settings of what is learned with which the user continues the run, if they are others than its
        checkpoint's; what would have ended it is lifted."""
        self._reason = ""
        """Why the newest checkpoint was started."""
        self._loaded: set[str] = set()
        self._to_keep: tuple[int, ...] = ()
        """The steps that the run goes back to if it continues from its newest checkpoint; on rank 0."""
        self.manager = CheckpointManager(
            root,
            state.world,
            run_id=state.run_dir.run_id if state.run_dir is not None else "",
            retention=replace(retention_of(state.cfg), steps_to_keep=lambda: self._to_keep),
            async_save=config.async_save,
            on_durable=self._notify_durable,
            on_save_error="continue" if config.on_save_error == "continue" else "stop",
            is_shared=state.run_dir is not None and root == state.run_dir.path,
        )

    @property
    def is_writing(self) -> bool:
        """Whether this rank is still writing its files of a pending save."""
        in_memory = self._memory is not None and self._memory.is_writing
        return in_memory or (self.manager.is_saving and not self.manager.is_written)

    @property
    def is_saving(self) -> bool:
        """Whether a save has begun and is not yet finalized; the same on all ranks."""
        return self.manager.is_saving or (self._memory is not None and self._memory.is_saving)

    def find(self) -> CheckpointInfo | None:
        """The checkpoint to continue from: the requested one, else the run's newest verified one. Collective.

        Raises:
            CheckpointError: if a requested checkpoint does not exist.
            RunExistsError: if another live run saves in the same directory.
        """
        if self._given is not None:
            self.start = self._given
            return self.start
        self._place.lock()
        state, asked = self.state, asked_start(self.state.cfg)
        directory = state.run_dir
        record_lost_save(state, self.root)
        self._memory = (
            None if state.cfg.validation.skip_train else open_state_in_memory(state, self.root, self._note_in_memory)
        )
        if asked is not None and not (directory is not None and directory.has_started_from(asked)):
            self.start, self.is_chosen_start = requested_start(state, self.root), True
        elif state.cfg.checkpoint.resume:
            if directory is not None and state.world.is_main:
                self._to_keep = steps_to_keep(everything_sent(directory.decisions))
            self.start = newest_of_all(state, self.manager, self._memory)
            if self.start is None:
                check_not_all_damaged(state, self.root)
        if self.start is not None:
            self._changes = compare_configuration(state, self.start) or self._changes
            compare_layout(state, self.start)
        self._identity = compare_identity(state, self.start, self.root, self._identity)
        if self.start is None:
            self._record_start()
        if self._memory is not None:
            self._memory.begin(self.start)
            self._saved_step = None if self.start is None or self.start.in_memory else self.start.step
        return self.start

    def check_states(self, trained: Trained) -> None:
        """Reject states that no checkpoint can hold, before any training.

        Raises:
            CheckpointError: naming the optimizer, callback or value, and the remedy.
            ConfigError: if memory is to hold checkpoints and has too little space.
        """
        self.components.check_states(trained)
        if self._memory is not None:
            kinds = {one.sharing_pattern for one in self.components.progress(trained)}
            self._memory.check_space(in_shards=SharingPattern.SHARDED in kinds)

    def load_progress(self, trained: Trained) -> None:
        """Load weights, optimizer, scheduler, progress and callbacks, and fire `on_checkpoint_load`. Collective.

        Raises:
            CheckpointError: if a state does not fit; training never starts from half a checkpoint.
        """
        info, scheduler = self.start, trained.scheduler
        if info is None:
            lift_end(self.state, self._changes)
            return
        self.state.begin_training()
        with current_values(self.state, info, trained.optimizer):
            self._load(info, self.components.progress(trained, loads=True))
        lift_end(self.state, self._changes)
        if isinstance(scheduler, OptimizerParamScheduler):
            scheduler.step(0)  # uses the groups' current values
            if "scheduler" not in self._loaded:
                place_scheduler(scheduler, self.state)
        self.is_loaded = True
        if self.state.world.is_main:
            logger.info("continuing from %s", info.path)
        if not info.in_memory:
            note_best_checkpoint(self.state, info.step, info.path)
        self.notify.on_checkpoint_load(checkpoint_step=info.step, checkpoint_path=str(info.path))

    def load_features(self) -> None:
        """Load the states of the loop and its features, such as the log interval and the trackers' runs. Collective.

        Checkpoints newer than a requested one belong to a branch that the run abandons; they are then set aside.
        """
        if self.start is not None:
            self._load(self.start, self.components.features())
            self._leave_branch(self.start)
            if self.is_chosen_start:
                leave_commands(self.state, self.start)
            self._record_start()

    def load_position(self, reader: StepSource, scheduler: UserScheduler | None = None) -> None:
        """Load the data position and the random generators. Collective."""
        if self.start is None:
            return
        loads_all = self.state.cfg.checkpoint.load_optim or not self.is_chosen_start
        if scheduler is not None and "scheduler" not in self._loaded and loads_all:
            self._load(self.start, [self.components.scheduler(scheduler)])
        if isinstance(scheduler, OptimizerParamScheduler) and "scheduler" not in self._loaded:
            place_scheduler(scheduler, self.state)  # again: the length of an epoch is now known
        position = DataPosition(reader, self.state)
        self._load(self.start, self.components.position(position, loads=True))
        draw_alike(self.state.world)
        if not position.is_loaded or self.start.manifest.data_ranks != self.state.world.data.size:
            position.seek()

    def to_go_back_to(self, max_step: int, went_to: int | None, branch: int) -> CheckpointInfo | None:
        """The newest verified checkpoint up to `max_step`, where the directory is now; None without one. Collective.

        A rollback that is repeated went to step `went_to` after `branch` rollbacks: a checkpoint of that step that a
        later rollback has set aside is moved back.
        """
        self.finish()
        self._follow()
        if went_to is not None:
            self.manager.bring_back(went_to, lambda manifest: _branch_of(manifest, branch))
        return self.manager.newest(max_step)

    def restore(self, info: CheckpointInfo, trained: Trained) -> None:
        """Load a checkpoint in the middle of a run, and fire `on_checkpoint_load`. Collective.

        The data position stays: the samples that led to the rollback are not read again.
        """
        self._load(info, self.components.progress(trained))
        self._load(info, [*self.components.features(), *self.components.position(None, loads=True)])
        self._leave_branch(info)
        if self._memory is not None:
            self._memory.begin(None)
        note_best_checkpoint(self.state, info.step, info.path)
        self.notify.on_checkpoint_load(checkpoint_step=info.step, checkpoint_path=str(info.path))

    def save(
        self,
        trained: Trained,
        reader: StepSource | None,
        persistent: bool = True,
        adopts: bool = False,
        reason: str = "",
    ) -> None:
        """Write a checkpoint of the current state. Collective; asynchronous with `checkpoint.async_save`.

        With `adopts`, files that the user's code wrote where the checkpoint will be become part of it.

        Raises:
            CheckpointError: see `CheckpointManager.save`.
        """
        state = self.state
        self._begin_save(reason)
        self.saved_mark = state.mark
        with state.features.pause("write"):
            request = self._request(trained, reader)
            request.persistent, request.adopts = persistent, adopts
            if adopts:
                place = self.root / f"checkpoint-{request.step}"
                request.components = beside_weights_of_others(request.components, place, state.world)
            state.features.add_to_checkpoint(request)
            self._save(request, reason)
        self.failure = self.manager.failure

    def save_in_memory(self, trained: Trained, reader: StepSource | None) -> None:
        """Keep the current state in the memory of the nodes, if it is not there. Collective; a failure is a warning.

        `on_checkpoint_save` does not fire: a node has not all files of the state.
        """
        if self._memory is not None and self._memory.newest != self.state.train_state.step:
            self._begin_save(_IN_MEMORY)
            with self.state.features.pause("write"):
                self._memory.save(self._request(trained, reader))

    def _begin_save(self, reason: str) -> None:
        self.notify.on_checkpoint_save_start(checkpoint_step=self.state.train_state.step)
        self.state.note("checkpoint", {"reason": reason})

    def _request(self, trained: Trained, reader: StepSource | None) -> SaveRequest:
        """The current state, to be saved."""
        state = self.state
        components = [
            *self.components.progress(trained),
            *self.components.features(),
            *self.components.position(None if reader is None else DataPosition(reader, state)),
        ]
        is_evaluated = state.evaluated.at_step == state.train_state.step
        return SaveRequest(
            step=state.train_state.step,
            components=self.components.selected(components),
            config=state.cfg.to_dict(),
            metrics=finite_numbers(state.evaluated.last_metrics) if is_evaluated else {},
            layout=layout_of(state),
            extra=self._extra(),
        )

    def finalize_if_written(self) -> None:
        """Make a pending save durable once all ranks have written their files. Collective, right after an agreement."""
        if not self.some_rank_writes:
            self.finish()

    def finish(self) -> None:
        """Wait for a pending save and make it durable. Collective."""
        if self._memory is not None and self._memory.is_saving:
            with self.state.features.pause("finalize"):
                self._memory.finish()
        if self.manager.is_saving:
            with self.state.features.pause("finalize"):
                if self._following(self.manager.finalize):
                    self.failure = self.manager.failure

    def end(self) -> None:
        """Note that no error has ended the run; if nothing else has cut it short either, nobody continues it."""
        self._is_over = self.state.exits.decided is None and not self.state.ending.by_anomaly

    def close(self) -> None:
        """Release threads and buffers. A single rank makes a pending save durable; several ranks abandon it."""
        self.manager.close()
        if self._memory is not None:
            self._memory.close(saved=self._saved_step, is_over=self._is_over and self.failure is None)
        self._place.release()

    def _save(self, request: SaveRequest, reason: str) -> None:
        """Save where the directory is now. Collective."""
        self.finish()
        self._reason = reason
        self._follow()
        self._to_keep = steps_to_keep(self.state.features.room(DecisionLog).repeats)
        if not self._following(lambda: self.manager.save(request)):
            self.manager.save(request)

    def _following(self, work: Callable[[], None]) -> bool:
        """Do `work`; False if it failed since the directory was moved or removed meanwhile. Collective."""
        try:
            work()
        except CheckpointError as error:
            if not self._follow():
                raise
            logger.warning("%s The directory was moved meanwhile; the run continues, and saves there.", error)
            self.saved_mark, self.failure = None, str(error)
            return False
        return True

    def _follow(self) -> bool:
        """Find the directory where it is now; whether it was moved or removed. Collective."""
        before, self.root = self.root, self._place.now()
        self.manager.root = self.root
        return self.root != before

    def load_best_model(self, model: list[nn.Module]) -> None:
        """Load the weights of the best checkpoint into `model`, but not its progress or optimizer. Collective."""
        self._follow()
        best = self.manager.best()
        if best is None:
            logger.warning("checkpoint.load_best_model_at_end: no checkpoint has the metric; the weights are unchanged")
            return
        self.read(best, [weights_of(model, self.state.world)])
        self.state.train_state.best_model_checkpoint = str(best.path)
        if self.state.world.is_main:
            logger.info("loaded the best weights, from step %d", best.step)

    def _record_start(self) -> None:
        """Record that the run has started from what was requested: until then, a restart must request the same."""
        asked, directory = asked_start(self.state.cfg), self.state.run_dir
        if asked is not None and directory is not None and self.state.world.is_main:
            directory.note_start(asked)

    def _leave_branch(self, info: CheckpointInfo) -> None:
        """Set aside newer checkpoints of this run: it continues from an older one."""
        if info.in_memory or info.path.parent.resolve() == self.root.resolve():
            self.manager.set_aside_newer(info.step)

    def _extra(self) -> dict[str, Any]:
        state = self.state
        extra: dict[str, Any] = {"identity": dict(self._identity)} if self._identity else {}
        if state.run_dir is not None and state.world.is_main:
            extra[DECISIONS] = state.features.room(DecisionLog).captured_now(state.run_dir.decisions)
        return extra

    def _load(self, info: CheckpointInfo, components: list[StateComponent]) -> None:
        known = set(info.manifest.components)
        there = [one for one in components if one.key in known]
        lacking = [one.key for one in components if one.key not in known]
        required = [one.key for one in components if one.key not in known and one.required]
        if required:
            raise CheckpointError(
                f"{info.path} has no {', '.join(required)}; continue from another checkpoint, or "
                f"{self._ways_without(info, required)}."
            )
        if lacking and self.state.world.is_main:
            logger.warning("%s has no %s; keeping their current state", info.path, ", ".join(lacking))
        self.state.features.wrap("load", self.read)(info, there)
        self._loaded |= {one.key for one in there}

    def read(self, info: CheckpointInfo, components: Sequence[StateComponent]) -> None:
        """Load these components of a checkpoint, and nothing else of it. Collective."""
        self.manager.load(info, components, skip=set(info.manifest.components) - {one.key for one in components})

    def _ways_without(self, info: CheckpointInfo, required: list[str]) -> str:
        """What to do with a checkpoint that lacks the `required` components, as an error says it."""
        entry_point = self.state.entry_point
        if required == ["optimizer"]:
            return f"continue without: {entry_point.without_optimizer(info.path)}"
        if "model" in required:
            return f"start again: {entry_point.new_run}"
        return f"start again from its weights: {entry_point.from_weights(info.path)}"

    def _note_in_memory(self, request: SaveRequest) -> None:
        details = {"checkpoint_step": request.step, **request.extra.get(DECISIONS, {})}
        write_decision(self.state, Request("saved", "the loop", "", _IN_MEMORY, 0, details))

    def _notify_durable(self, saved: SavedCheckpoint) -> None:
        self._saved_step = saved.step
        if self.state.cfg.checkpoint.async_save and self.state.cfg.logger.log_progress:
            log_async_checkpoint_saved(self.state, saved.step)
        details: dict[str, Any] = {"checkpoint_step": saved.step, "path": str(saved.path)}
        details |= saved.extra.get(DECISIONS, {})
        note_best_checkpoint(self.state, saved.step, saved.path)
        write_decision(self.state, Request("saved", "the loop", "", self._reason, 0, details))
        self.notify.on_checkpoint_save(checkpoint_step=saved.step, checkpoint_path=str(saved.path))


def weights_of(model: Sequence[nn.Module], world: World) -> StateComponent:
    """The weights of a model, or of a rank's stages of one, as a component to load."""
    weights = ModelOverStages(model, world) if is_staged(model) else ModelState(model)
    return StateComponent("model", weights, pattern_of(weights))


def _branch_of(manifest: Manifest, most: int) -> int | None:
    """The number of rollbacks before a checkpoint; None if unknown or above `most`."""
    branch = manifest.extra.get(DECISIONS, {}).get(BRANCH)
    return branch if isinstance(branch, int) and branch <= most else None
