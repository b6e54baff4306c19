"""Sets up one call of the Trainer, and tears it down afterwards."""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Protocol

from torch import nn

from onstep.config import ConfigContainer
from onstep.config.lengths import train_iters
from onstep.distributed import World, check_ranks, keep_world, open_world, world_size_from_environment
from onstep.events import Control, Dispatcher
from onstep.models import Transformer
from onstep.models.fused_loss import check_fused_loss
from onstep.models.hf.causal_loss import causal_loss_in_chunks
from onstep.models.offloading import check_offloading
from onstep.trackers.report_to import attach_trackers
from onstep.trainer.call import Resume, Session
from onstep.trainer.computing.forward_precision import autocast_in_forward
from onstep.trainer.computing.model_options import compiled, memory_options, model_options, torch_options
from onstep.trainer.computing.random_numbers import draws_each_epoch
from onstep.trainer.dataloaders import (
    ColumnFilter,
    collator,
    num_samples_of,
    train_loader,
)
from onstep.trainer.entry_point import TrainerEntryPoint
from onstep.trainer.feature import TrainerFeature
from onstep.trainer.forward_step import forward_step_of
from onstep.trainer.idle_arguments import name_idle_arguments
from onstep.trainer.loaders.users_data import (
    UsersData,
    count_examples,
    count_micro_batches,
    decides_data,
    users_data,
    whole_epochs,
)
from onstep.trainer.loop_methods import LoopMethods
from onstep.trainer.loss_convention import Labels, label_parameters, shifts_labels
from onstep.trainer.methods import TrainerMethods
from onstep.trainer.methods.callbacks import adopt_state, shown_steps
from onstep.trainer.optimizers import (
    Length,
    known_optimizers,
    make_optimizers,
    use_evaluation_weights,
)
from onstep.trainer.output_dir.claim import acquire_dir
from onstep.trainer.output_dir.files import recall_history
from onstep.trainer.overrides import overrides
from onstep.trainer.own_arguments import config_of, shown_arguments
from onstep.trainer.reporting.special_tokens import align_special_tokens
from onstep.trainer.reporting.tokenizer_record import record_tokenizer
from onstep.trainer.shard_checks import check_shards
from onstep.trainer.stages import TrainerStages
from onstep.trainer.training_checks import check_length
from onstep.training import GlobalState
from onstep.training.features import SETUP
from onstep.training.lifecycle.determinism import Determinism
from onstep.training.lifecycle.endings import Endings
from onstep.training.opening import open_run
from onstep.training.protocols import Trained
from onstep.training.run import Run
from onstep.training.runs.claims import Claim
from onstep.training.runs.facts import facts_of
from onstep.training.runs.hold import Hold
from onstep.training.setup.model_and_data import idle_parameters
from onstep.training.setup.placement import compiled_parts, is_divided, place
from onstep.training.setup.setup import (
    DATA_TIMER,
    MODEL_TIMER,
    count_steps,
    end_set_up,
    let_callbacks_give_weights,
    load_checkpoint,
    seed_everything,
)
from onstep.training.setup.weight_types import set_weight_types
from onstep.training.stages.job import Job
from onstep.training.watchdog.termination import reports_before_sigterm
from onstep.training.watchdog.watchdog import Watching


class Repeated(Protocol):
    """How a session repeats a run, in place of starting or continuing one."""

    def adapt(self, config: ConfigContainer) -> ConfigContainer:
        """The configuration of the run, in place of that of the Trainer's arguments."""
        ...

    def attach(self, run: Run) -> None:
        """Observe the run before it is opened."""
        ...

    def claim(self, config: ConfigContainer, world: World) -> tuple[Claim | None, Hold | None]:
        """The directory of the repeated run. Collective."""
        ...


@contextmanager
def training_session(
    trainer: TrainerMethods,
    resume_from_checkpoint: Resume = None,
    ignore_keys: list[str] | None = None,
    repeated: Repeated | None = None,
) -> Iterator[Session]:
    """Set up the ranks, the run's directory, the model, optimizer, scheduler and data. Collective."""
    size = trainer.args.world_size
    if trainer.model is not None:
        trainer.start_of_training.remember()
    data = _users_data(trainer, size)
    num_samples = num_samples_of(trainer.train_dataset) if data is None else data.num_samples
    args = trainer.args if data is None else whole_epochs(trainer.args)
    config = config_of(args, num_samples=num_samples, world_size=size, for_training=True)
    resume = resume_from_checkpoint
    if resume is None:
        resume = trainer.args.resume_from_checkpoint
    elif isinstance(resume, bool):
        config.checkpoint.resume, config.checkpoint.load = resume, None
    else:
        config.checkpoint.load, config.checkpoint.exit_on_missing_checkpoint = os.fspath(resume), True
    if repeated is not None:
        config = repeated.adapt(config)
    check_shards(trainer, config)
    entry_point = TrainerEntryPoint(trainer=trainer, processing_class=trainer.processing_class)

    def claim_run(config: ConfigContainer, world: World) -> tuple[Claim | None, Hold | None]:
        if trainer.model is None:
            trainer.model = trainer.start_of_training.model_made(trainer.model_of_trial, config.rng.seed)
        if repeated is None:
            or_starts = resume_from_checkpoint is None
            claim, hold = acquire_dir(trainer, config, world, resume, or_starts=or_starts)
        else:
            claim, hold = repeated.claim(config, world)
        run.args = shown_arguments(trainer.args, None if claim is None else str(claim.directory.path))
        return claim, hold

    run = GlobalState(cfg=config, world=World(), entry_point=entry_point)
    if repeated is not None:
        repeated.attach(run)
    with (
        open_run(run, trainer.callback_manager, ranks_of, claim_run, accepts_finished=True) as opened,
        _session(trainer, run, opened.notify, trains=True) as session,
    ):
        session.ignore_keys = ignore_keys

        def build() -> None:
            _build_training(trainer, session, num_samples, data)
            end_set_up(run, session.notify, tf32="tf32=True", bf16="bf16=True")

        session.build = build
        yield session


def job_of(trainer: TrainerMethods, session: Session) -> Job:
    """The training of a session, which is built first."""
    assert session.build is not None
    session.build()
    assert session.optimizer is not None
    return Job.of(
        session.state,
        session.forward_step,
        session.model,
        session.optimizer,
        session.scheduler,
        session.train_data,
        trainer.callback_manager,
    )


@contextmanager
def evaluation_session(trainer: TrainerMethods) -> Iterator[Session]:
    """Set up an evaluation; inside a run, for a callback that evaluates, reuse that run's objects. Collective."""
    use_evaluation_weights(trainer.optimizer)
    if trainer.session is not None:
        yield trainer.session
        return
    config = config_of(trainer.args, num_samples=None, world_size=trainer.args.world_size, for_training=False)
    attach_trackers(trainer.callback_manager, config)
    before = trainer.global_state
    directory = None if before is None else before.run_dir
    entry_point = TrainerEntryPoint(trainer=trainer, processing_class=trainer.processing_class)
    state = GlobalState(cfg=config, world=World(), run_dir=directory, entry_point=entry_point)
    state.args = shown_arguments(trainer.args, None if directory is None else str(directory.path))
    with state.features.open(SETUP, state, state.world), ranks_of(config) as world:
        state.world, state.control = world, Control(rank=world.rank)
        notify = Dispatcher(trainer.callback_manager, state, [], *known_optimizers(trainer))
        entry_point.fire = notify.fire
        if before is None:
            count_steps(state, None)
            state.bridge_trackers.join(trainer.callback_manager)
        else:  # an evaluation shows the progress of the preceding training, and adds to its trackers
            entry_point.train_dataloader = before.entry_point.train_dataloader
            state.train_state, state.info = before.train_state, before.info
            state.bridge_trackers = before.bridge_trackers
            state.bridge_trackers.recording = state
        adopt_state(trainer.given_state, state)
        rows = (Watching, Endings, Determinism)
        with (
            reports_before_sigterm(state),  # above the watchdog, which it outlives
            state.features.open(rows, state, world),
            _session(trainer, state, notify) as session,
        ):
            session.notify.on_init_end()
            yield session


@contextmanager
def ranks_of(config: ConfigContainer) -> Iterator[World]:
    """The ranks. A group of one is closed at once; one of several is kept for the next call, until the process ends."""
    sizes = config.parallel_sizes(world_size_from_environment())
    world = open_world(config.dist, sizes, partial(facts_of, config))
    if world.size > 1:
        keep_world(world)
    try:
        yield world
    except SystemExit:
        raise
    except BaseException:
        if world.size > 1:  # the other ranks may be elsewhere, also where the script handles this error
            atexit.register(world.abandon)
        raise
    finally:
        if world.size == 1:
            world.close()


@contextmanager
def _session(
    trainer: TrainerMethods, state: GlobalState, notify: Dispatcher, *, trains: bool = False
) -> Iterator[Session]:
    trainer.global_state, trainer.given_state = state, None
    if trains or trainer.model is None:
        seed_everything(state.cfg.rng.seed)
    started = time.perf_counter()
    with state.timers(MODEL_TIMER).measure():
        if trainer.model is None:
            trainer.model = trainer.model_of_trial()
        module = trainer.model
        if state.world.sizes.dp_shard > 1:
            from onstep.distributed.fully_sharded import make_room  # importing DTensor costs 0.7 s

            make_room(module, state.world)
        parts = [module]
        if state.world.sizes.pp > 1:
            stages = TrainerStages.of(trainer, state.cfg, state.world)
            parts = stages.chunks
            if not trains:
                stages.free_others()
        check_ranks(parts, state.world)
        check_offloading(state.cfg.model, state.world.device)
        check_fused_loss(state.cfg.model, state.world.device)
        if trains and state.cfg.optimizer.params_dtype != "float32":  # else weights stay as the user loaded them
            set_weight_types(parts, state.cfg)
        if trains:
            align_special_tokens(module, trainer.processing_class, logs=state.world.is_main)
        state.flops_per_token = 6.0 * _active_parameters(module)
        module = parts[-1]
        divides = trains and is_divided(state.cfg, state.world)  # which moves its blocks one by one
        if not divides and trainer.place_model_on_device and trainer.args.place_model_on_device is not False:
            for part in parts:
                trainer._move_model_to_device(part, state.world.device)
    notify.model = parts
    preparation_seconds = time.perf_counter() - started
    names = trainer.args.label_names if trainer.stated_label_names is None else trainer.stated_label_names
    labels = Labels(names, found=label_parameters(module), shifted=shifts_labels(module))
    forward_step = forward_step_of(trainer, module, labels, state)
    session = Session(state, module, parts, forward_step, labels, collator(trainer), notify, trains=trains)
    session.parts = parts
    session.preparation_seconds = preparation_seconds
    trainer.session = session
    casts_in_forward = trainer.follows_transformers and state.cfg.mixed_precision is not None
    try:
        with (
            torch_options(trainer.args),
            _options(trainer, state, parts, trains=trains, casts=casts_in_forward),
            session.compiled,
            state.features.open((TrainerFeature, LoopMethods), state, state.world),
        ):
            if not trains:
                session.compiled.enter_context(compiled(state.cfg.train, parts))
            yield session
    finally:
        trainer.session = None
        if trains:
            trainer.eval_loaders.close()
        session.release()


@contextmanager
def _options(
    trainer: TrainerMethods, state: GlobalState, parts: list[nn.Module], *, trains: bool, casts: bool
) -> Iterator[None]:
    """Context in which a module, or each of its stages, computes as the arguments say."""
    with ExitStack() as stack:
        for part in parts:
            stack.enter_context(model_options(trainer, part, trains=trains))
            stack.enter_context(causal_loss_in_chunks(part, state.cfg.model))
            stack.enter_context(memory_options(part, state.cfg.model) if trains else nullcontext())
            stack.enter_context(autocast_in_forward(part, state) if casts else nullcontext())
        yield


def _users_data(trainer: TrainerMethods, size: int) -> UsersData | None:
    """What the user's methods decide that is read; they run with the model in place and the ranks connected."""
    if not decides_data(trainer):
        return None
    if trainer.model is None:
        trainer.model = trainer.start_of_training.model_made(trainer.model_of_trial, trainer.args.seed)
    with ranks_of(config_of(trainer.args, num_samples=None, world_size=size, for_training=False)):
        data = users_data(trainer)
    check_length(data.num_samples, trainer.args)
    return data


def _build_training(trainer: TrainerMethods, session: Session, num_samples: int | None, data: UsersData | None) -> None:
    state, config, notify = session.state, session.state.cfg, session.notify
    if state.world.is_main:
        name_idle_arguments(trainer, session)
    collates_itself = overrides(trainer, "get_train_dataloader") or overrides(trainer, "_get_dataloader")
    if isinstance(session.collate, ColumnFilter) and not collates_itself:
        session.collate.check(trainer.train_dataset)
    with state.timers(MODEL_TIMER).measure(barrier=True):
        session.model = notify.model = _wrapped(trainer, session)
        parts = compiled_parts(session.model[0], config, state.world) if config.train.torch_compile else []
        session.compiled.enter_context(compiled(config.train, parts))
        iters = train_iters(config, num_samples, world_size=state.world.data.size)
        trained = session.model[0] if trainer.stages is None else trainer.stages.module
        made = make_optimizers(trainer, trained, config, Length(iters, state.world.data.size, num_samples))
        session.optimizer, session.scheduler = notify.optimizer, notify.scheduler = made
        if trainer.stages is not None:
            trainer.stages.free_others()
    load_checkpoint(state, Trained(session.model, session.optimizer, session.scheduler))
    let_callbacks_give_weights(state, notify)
    recall_history(state)
    notify.on_data_init_start()
    with state.timers(DATA_TIMER).measure(barrier=True):
        if data is None:
            read = train_loader(trainer.train_dataset, session.collate, config, state.world)
            session.train_data = draws_each_epoch(read)
        else:
            session.train_data = draws_each_epoch(data.open(config, state.world), data.loader)
    state.entry_point.train_dataloader = session.train_data if data is None else data.loader
    state.train_state.do_train = True
    state.train_state.do_valid = trainer.eval_dataset is not None and config.validation.eval_iters != 0
    count_steps(state, session.train_data)
    count_examples(trainer, state, data)
    if trainer.follows_transformers:
        count_micro_batches(state, session.train_data)
    state.info.shown_steps = shown_steps(trainer.args, state.info.max_steps)
    record_tokenizer(state, session.module, trainer.data_collator, trainer.eval_dataset, trainer.train_dataset)
    trainer.start_of_training.apply(config.rng.seed, state.world.data.rank, on_every_rank=trainer.follows_transformers)


def _wrapped(trainer: TrainerMethods, session: Session) -> list[nn.Module]:
    """The module as the loop trains it: as the user's `_wrap_model` wraps it, else for data parallelism. Collective.

    Of a pipeline, the stages of this rank.
    """
    wrapped = trainer._wrap_model(session.module)
    if wrapped is not session.module:
        return [wrapped]
    config = session.state.cfg
    ddp = replace(config.ddp, find_unused_parameters=True) if _calls_model_often(trainer, session.module) else None
    return place(session.parts, session.state.world, config, ddp=ddp, compiles=False, moves=False)


def _calls_model_often(trainer: TrainerMethods, module: nn.Module) -> bool:
    """Whether a loss of the user's may call the model several times before its backward pass, or leave parts of it out.

    As in Hugging Face's Trainer, models of transformers are called once unless the arguments say otherwise.
    """
    is_open = trainer.args.ddp_find_unused_parameters is None and overrides(trainer, "compute_loss")
    return is_open and not any(one.__name__ == "PreTrainedModel" for one in type(module).__mro__)


def _active_parameters(module: nn.Module) -> int:
    """Number of parameters that a token uses, outside of embeddings."""
    embeddings = {id(m.weight) for m in module.modules() if isinstance(m, nn.Embedding)}
    total = sum(p.numel() for p in module.parameters() if id(p) not in embeddings)
    return total - idle_parameters(module.config) if isinstance(module, Transformer) else total
