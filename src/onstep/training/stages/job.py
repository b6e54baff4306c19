"""Holds the objects of one training: the run, and everything passed to `train()`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from onstep.config.checks import check_parallel
from onstep.data import StepBatches, StepSource, as_step_source
from onstep.distributed import (
    check_exchanged,
    check_loader,
    check_ranks,
    check_weights,
    has_fixed_buckets,
    is_bare,
    refused_together,
)
from onstep.distributed.exchanges import casts_weights, divisor_of
from onstep.distributed.pipeline.seats import check_seats, is_staged
from onstep.distributed.shards import sharded_modules
from onstep.errors import ConfigError
from onstep.events import CallbackManager, Dispatcher
from onstep.events.context import unwrap
from onstep.metrics.norms.named_parameters import reshard
from onstep.optim import (
    ForeignOptimizer,
    ScalesRates,
    StepOptimizer,
    TorchSchedulerAdapter,
    TrainingOptimizer,
    as_step_optimizer,
    check_scheduler,
)
from onstep.optim.param_groups import trainable_parameters
from onstep.training.compute.step import LastStep, Step
from onstep.training.compute.training_modes import TrainingModes
from onstep.training.protocols import DataSource, ForwardStep, NonLossFunction, Trained, UserOptimizer, UserScheduler
from onstep.training.reporting.loss_accumulator import LossAccumulator
from onstep.training.run import Run
from onstep.training.stages.forward_step import check_chunks, prepare_forward_step_func
from onstep.training.stages.left_out import LeftOut, check_stages, check_trains, first_of
from onstep.training.stages.record import RunStart
from onstep.training.stages.staged import check_hooks

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Job:
    """One training of a run."""

    run: Run
    forward_step_func: ForwardStep
    """Called as `(iterator, model chunk)`, with the run's state injected if it expects one."""
    raw_forward_step_func: ForwardStep
    model: list[nn.Module]
    optimizer: StepOptimizer
    raw_optimizer: UserOptimizer
    """The optimizer as callbacks and checkpoints see it, without an adapter."""
    scheduler: UserScheduler | None
    reader: StepSource
    notify: Dispatcher
    valid_data_iterator: DataSource | None = None
    process_non_loss_data_func: NonLossFunction | None = None
    non_loss_data_func: NonLossFunction | None = None
    accumulator: LossAccumulator = field(default_factory=LossAccumulator)
    instead_of_due: Callable[[Job], object] | None = None
    """Called at the end of every step and epoch in place of `do_what_is_due`, where a feature wraps that."""

    @property
    def last(self) -> Step | None:
        """The current or most recent step."""
        return self.run.features.room(LastStep).step

    @classmethod
    def of(
        cls,
        run: Run,
        forward_step_func: ForwardStep,
        model: list[nn.Module],
        optimizer: UserOptimizer,
        scheduler: UserScheduler | None,
        data: object,
        callbacks: CallbackManager | None = None,
    ) -> Job:
        """A training of what a user has passed; `data` is a loader of `onstep.data`, an iterator or None.

        Collective.

        Raises:
            ConfigError: on all ranks, if a parallel size is not supported, the model has several chunks or weights
                without values, the world is not the process group, the data is that of other ranks, some trained
                parameters are outside of what averages the gradients of the rest, the forward step cannot be called,
                the optimizer has no `step()` or no parameter of the model, or the scheduler is one of another
                optimizer.
            ShardingError: if parameters are sharded over ranks other than by `fully_shard` over all of them.
        """

        def made() -> Job:
            check_chunks(model)
            check_weights(model)
            reshard(model)
            check_ranks(model, run.world)
            run.model_casts = casts_weights(model)
            check_loader(data, run.world)
            check_parallel(run.cfg, run.world.size)
            check_seats([unwrap(chunk) for chunk in model], run.cfg.parallel, run.world.sizes, run.world.rank)
            check_stages(model)
            if is_staged(model):
                check_hooks(run.cfg.parallel, model)
            driven = drive(optimizer, model, run)
            if is_staged(model) and not isinstance(driven, TrainingOptimizer):
                raise ConfigError(
                    f"stages of a pipeline require an optimizer of torch, got {type(optimizer).__name__}: its norm "
                    f"would be that of each rank; pass a torch.optim.Optimizer."
                )
            used: UserOptimizer = optimizer
            trained = None
            if not isinstance(driven, ForeignOptimizer):  # one of Megatron's may have copies of the weights
                check_trains(driven.param_groups, model)
                trained = [parameter for group in driven.param_groups for parameter in group["params"]]
                used = driven
            check_exchanged(model, trained)
            if scheduler is not None:
                check_scheduler(scheduler, used)
            stepped = TorchSchedulerAdapter(scheduler) if isinstance(scheduler, LRScheduler) else scheduler
            return cls(
                run=run,
                forward_step_func=prepare_forward_step_func(forward_step_func, run),
                raw_forward_step_func=forward_step_func,
                model=model,
                optimizer=driven,
                raw_optimizer=used,
                scheduler=stepped,
                reader=as_step_source(data, run.world.data.size),
                notify=Dispatcher(callbacks, run, model, used, stepped),
            )

        job = refused_together(run.world, made)
        if is_staged(job.model):
            assert isinstance(job.optimizer, TrainingOptimizer)
            refused_together(run.world, lambda: check_callbacks(callbacks))
            job.optimizer.sum_over_stages(run.world.group("pp"))
        return job

    def __post_init__(self) -> None:
        self.begin()
        self.divisor = divisor_of(self.model, self.run.world)
        """What the exchange of gradients divides their sum over the ranks by."""
        self.sharded = [module for chunk in self.model for module in sharded_modules(chunk)]
        """The parts of the model that FSDP2 gathers."""
        exchanges_each, ranks = self.run.cfg.ddp.sync_each_micro_batch, self.run.world.sizes
        are_replicas = ranks.tp > 1 and ranks.dp_shard == 1  # of divided tensors, which FSDP2 sums the gradients of
        self.exchanges_each = bool(self.sharded) and not are_replicas if exchanges_each is None else exchanges_each
        """Whether ranks exchange gradients after each micro-batch of a step, not only after the last."""
        self.runs_backward = bool(getattr(self.forward_step_func, "runs_backward", False))
        """Whether the forward step runs the backward pass, as a user's `training_step` does."""
        self.scaler = self.optimizer.scaler
        """The loss scaler of float16; None in any other precision."""
        self.tells_of_overflow = self.scaler is not None
        """Whether no step has been skipped for an overflow yet."""
        self.scales_rates = self.scheduler if isinstance(self.scheduler, ScalesRates) else None
        """The schedule, if decisions of the run can scale its rates."""
        options = self.run.cfg.logger
        self.needs_norm = bool(options.log_interval or options.log_first_step or options.log_on_each_epoch)
        """Whether the log needs the gradient norm of each step."""
        train, checkpoint = self.run.cfg.train, self.run.cfg.checkpoint
        self.decides_at_every_step = bool(train.exit_interval or checkpoint.non_persistent_save_interval)
        """Whether a save or an exit may be due at a step without any request."""
        sizes = self.run.batch_sizes
        self._step_size = None if sizes is None or sizes.varies else sizes.current_running_global_batch_size
        """Samples of every full step, if constant throughout the run."""
        self.chunks_with_buffers: list[Any] = [one for one in self.model if hasattr(type(one), "zero_grad_buffer")]
        """Chunks that manage their own gradient buffers."""
        self.modes = TrainingModes(self.model)
        self.left_out = LeftOut(self.model)
        self.has_warned_of_gradients = False
        """Whether parameters without a gradient have been looked for."""
        self.has_gradients = False
        """Whether this training's first backward passes are known to have given gradients."""

    def begin(self) -> None:
        """Take the counters and weights as they are for those that the training starts from."""
        self.start, self.versions_at_start = RunStart.now(self.run), _versions(self.model)

    @property
    def trained(self) -> Trained:
        """Its model, optimizer and schedule, as checkpoints see them."""
        return Trained(self.model, self.raw_optimizer, self.scheduler)

    def samples_of(self, batches: StepBatches) -> int:
        """Samples of a step over all ranks; the configured number if the data does not provide it."""
        return batches.num_samples if batches.num_samples is not None else self.run.current_running_global_batch_size

    def schedule_increment(self, batches: StepBatches) -> int:
        """Samples by which the schedule advances: those of a full step, if the configuration defines one."""
        if self._step_size is not None:
            return self._step_size
        if self.run.cfg.train.global_batch_size is None:
            return self.samples_of(batches)
        return self.run.current_running_global_batch_size


def check_callbacks(callbacks: CallbackManager | None) -> None:
    """Refuse (ConfigError) callbacks that read a model as a whole, where a rank has stages of it."""
    for callback in [] if callbacks is None else callbacks.callbacks:
        if getattr(callback, "needs_whole_model", False):
            raise ConfigError(
                f"{type(callback).__name__} reads the whole model, of which a rank of a pipeline has some layers only; "
                f"leave it out, and use the exported model in one process (onstep checkpoint export)."
            )


def warn_of_parameters_left_out(job: Job) -> None:
    """Warn, on rank 0, of trainable parameters that the optimizer does not have; again when others are missing."""
    job.left_out.warn(job.optimizer.param_groups, is_main=job.run.world.is_main)


def warn_of_wrapper(job: Job) -> None:
    """Warn, on rank 0, of a model that seems to exchange no gradients, or in an order that depends on the process."""
    run = job.run
    ranks = run.world.data.size
    if ranks == 1 or not run.world.is_main or is_staged(job.model):
        return
    if all(is_bare(chunk) for chunk in job.model):
        logger.warning(
            "the model is not wrapped for data parallelism, so each of the %d ranks trains a model of its own, unless "
            "your own code averages gradients; wrap it with onstep.distributed.data_parallel, or pass world=World() to "
            "GlobalState to train each rank by itself",
            ranks,
        )
    elif ranks > 2 and run.checkpoints is not None and not all(map(has_fixed_buckets, job.model)):
        logger.warning(
            "the model is wrapped in torch's DistributedDataParallel, which changes its gradient buckets after the "
            "first step of a process: on %d ranks, a resumed run sums in another order and is not the same to the bit; "
            "wrap it with onstep.distributed.data_parallel, or pass find_unused_parameters=True",
            ranks,
        )


def warn_of_missing_gradients(job: Job) -> None:
    """Warn once, on rank 0, of trainable parameters that the last step gave no gradient: no loss depends on them.

    Says nothing where no parameter has one: gradients are then kept elsewhere, or were cleared after the step.
    """
    if job.has_warned_of_gradients or not job.run.world.is_main:
        return
    job.has_warned_of_gradients = True
    roles = trainable_parameters(job.model)
    names = [role.name for param, role in roles.items() if param.grad is None]
    if 0 < len(names) < len(roles):
        logger.warning(
            "%d trainable parameters have no gradient after step %d, so they are not trained: %s; use them in "
            "forward, or set requires_grad=False",
            len(names),
            job.run.train_state.step,
            first_of(names),
        )


def check_for_gradients(job: Job) -> None:
    """Check after the first backward passes of this process that a parameter has a gradient. Collective.

    Gradients in buffers of a chunk, or consumed by a hook of their parameter during backward, and weights that a
    user's step has updated itself are not missed.

    Raises:
        ConfigError: on all ranks, if there is none on any: nothing would be trained.
    """
    parameters = list(trainable_parameters(job.model))
    is_found = bool(job.chunks_with_buffers) or not parameters or any(map(_has_gradient, parameters))
    optimizer = getattr(job.raw_optimizer, "optimizer", job.raw_optimizer)
    has_updated = bool(getattr(optimizer, "state", None)) or _versions(job.model) != job.versions_at_start
    job.has_gradients = True
    if not any(row[0] for row in job.run.world.gather_numbers([float(is_found or has_updated)])):
        raise ConfigError(
            "no parameter has a gradient after the first backward pass, so nothing would be trained: the loss is not "
            "connected to the model (created again by torch.tensor(loss.item(), requires_grad=True), or by "
            ".detach().requires_grad_()), training_step does not call backward(), or it clears the gradients after it; "
            "return the loss as it is computed from the model's outputs, and leave its gradients in place"
        )


def _has_gradient(parameter: nn.Parameter) -> bool:
    names = ("grad", "main_grad", "_post_accumulate_grad_hooks", "_backward_hooks")
    return any(getattr(parameter, name, None) is not None for name in names)


def _versions(model: list[nn.Module]) -> list[int]:
    """Torch's counts of the in-place changes of weights."""
    return [parameter._version for chunk in model for parameter in chunk.parameters()]


def drive(optimizer: Any, model: list[nn.Module], run: Run) -> StepOptimizer:
    """The optimizer interface that the loop drives; adds the run's loss scaler to optimizers without one.

    Raises:
        ConfigError: if it has no `step()`.
    """
    return as_step_optimizer(optimizer, model, run.cfg.optimizer, device=run.world.device, scaler=run.foreign_scaler)
