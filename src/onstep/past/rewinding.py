"""Provides `rewind`: repeats a run to a step of its past, and holds it there for its caller."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from onstep.callbacks import DefaultMetrics
from onstep.config import ConfigContainer
from onstep.config.keys import own_copy
from onstep.data import Batch
from onstep.distributed import World
from onstep.errors import ConfigError, DataError
from onstep.models import ModelHook
from onstep.past.comparison import Comparison
from onstep.past.configuration import repeating
from onstep.past.observer import END, UPDATE, Watch, attach
from onstep.past.place import Plan, copied, plan_rewind
from onstep.training.compute.step import Step
from onstep.training.opening import claim_for_all
from onstep.training.pretrain import configured_run, train_configured
from onstep.training.protocols import ForwardStep
from onstep.training.runs.claims import Claim
from onstep.training.runs.hold import Hold
from onstep.training.runs.identity import Identify, compare, configured_identity
from onstep.training.runs.pinned_data import pin_datasets
from onstep.training.runs.run_dir import RunDir
from onstep.training.stages.forward_step import forward_step
from onstep.training.stages.job import Job


class Past:
    """A repeated run, held at a step: its gradients are ready, and its weights are those that computed them.

    The gradients are as the optimizer receives them: unscaled, and clipped if the run clips. What the caller computes
    with the model does not change the run as long as weights and `gradients` stay as they are; `forward` also leaves
    the random generators alone.
    """

    def __init__(self, plan: Plan, watch: Watch, comparison: Comparison) -> None:
        self.plan = plan
        self.comparison = comparison
        """What the repeated steps have logged, beside the record."""
        self.warnings: list[str] = []
        """What the repeated run warned of."""
        self.seconds = 0.0
        """The time from the first repeated step to this one; without loading."""
        self._watch = watch

    @property
    def job(self) -> Job:
        """The objects of the training: the run, its optimizer, its schedule."""
        return self._watch.job

    @property
    def current(self) -> Step:
        """The step that is held: its micro-batches, their losses, its gradient norm."""
        return self._watch.step

    @property
    def step(self) -> int:
        """The number of the step that is held."""
        return self.current.number

    @property
    def model(self) -> nn.Module:
        """The model, as the forward step is called with it."""
        return self.job.model[0]

    @property
    def batches(self) -> list[Batch]:
        """The step's micro-batches on this rank."""
        return self.current.micro_batches

    @property
    def batch(self) -> Batch:
        """The step's micro-batch.

        Raises:
            ConfigError: if the step has several; `batches` has them all.
        """
        if len(self.batches) != 1:
            raise ConfigError(f"step {self.step} has {len(self.batches)} micro-batches; use past.batches.")
        return self.batches[0]

    @property
    def gradients(self) -> dict[str, Tensor]:
        """The gradients by name of their parameter, as the optimizer receives them."""
        return {name: one.grad for name, one in self.model.named_parameters() if one.grad is not None}

    @property
    def loss(self) -> float:
        """The step's loss over all micro-batches and ranks."""
        return float(self.current.total.value())

    @property
    def grad_norm(self) -> float | None:
        """The norm of the step's gradients before clipping; None if float16 overflowed."""
        norm = self.current.grad_norm
        return None if norm is None else float(norm)

    def next(self) -> Past:
        """Apply the update and continue to the same place of the next step.

        Raises:
            ConfigError: if the run ends before.
        """
        self._let_go_on(f"there is no step after {self.step}: the run ended there.")
        return self

    def finish_step(self) -> Past:
        """Apply the update and stay at the end of this step; `model` then has the weights after it."""
        if self._watch.turns.place == UPDATE:
            self._watch.holds_at_end = True
            self._let_go_on(f"step {self.step} ended the run.")
        return self

    @property
    def is_finished(self) -> bool:
        """Whether the update of the step has been applied."""
        return self._watch.turns.place == END

    def _let_go_on(self, otherwise: str) -> None:
        if not self._watch.turns.is_held:
            raise ConfigError("the rewind is closed; use past inside its `with` block.")
        begin = time.perf_counter()
        self._watch.turns.go_on()
        self.seconds += time.perf_counter() - begin
        if not self._watch.turns.is_held:
            raise ConfigError(otherwise)


@contextmanager
def rewind(
    run: str | Path,
    step: int,
    *,
    callbacks: Sequence[object] = (),
    forward_step_func: ForwardStep = forward_step,
    pre_wrap_hooks: Sequence[ModelHook] = (),
    plan: Plan | None = None,
) -> Iterator[Past]:
    """Repeat a run in memory from its nearest verified checkpoint to a step, and hold it there. Collective.

    Nothing in the run's directory is written, so a run that is still training can be rewound. The training runs in a
    thread that is held while the caller looks; the end of the block ends it. The global random generators are those of
    the run from then on.

    Args:
        run: the directory of a run of `pretrain`, `finetune` or the command line.
        step: the step to hold at, right before its update; it counts from 1.
        callbacks: called as those of the run are, in any convention.
        forward_step_func: that of the run.
        pre_wrap_hooks: those of the run.
        plan: what `plan_rewind` has found, if it is known.

    Raises:
        ConfigError: if there is no such step, or the run cannot be repeated from what its directory holds.
        DataError: if its data has changed.
    """
    plan = plan_rewind(run, step) if plan is None else plan
    is_main = os.environ.get("RANK", "0") == "0"
    with ExitStack() as stack:
        directory = stack.enter_context(copied(plan, is_main=is_main))
        config = own_copy(plan.config)
        repeating(config, directory, saves=bool(plan.rollbacks), evaluates=bool(callbacks))
        defaults = [DefaultMetrics()] if plan.config.run.default_callbacks else []
        state, manager = configured_run(config, forward_step_func, [*defaults, *callbacks])
        comparison, watch = Comparison(plan), attach(state)
        watch.wanted, watch.branch = plan.step, plan.branch
        watch.on_rollback = comparison.go_back
        state.record.listeners.add(comparison.hear)
        past = Past(plan, watch, comparison)
        stack.enter_context(_warnings_kept(past.warnings))
        stack.callback(watch.turns.close)

        def claim(config: ConfigContainer, world: World) -> tuple[Claim | None, Hold | None]:
            comparison.num_ranks = world.size
            pin_datasets(config, world)
            return claim_for_all(
                config, world, configured_identity, lambda one, identify: _claimed(plan, one, identify)
            )

        watch.turns.start(lambda: train_configured(state, manager, pre_wrap_hooks, claim))
        if not watch.turns.is_held:
            raise ConfigError(f"{plan.directory} ended before step {plan.step} when it was repeated.")
        if torch.cuda.is_available() and state.world.device.type == "cuda":
            torch.cuda.set_device(state.world.device)
        yield past


def _claimed(plan: Plan, config: ConfigContainer, identify: Identify | None) -> tuple[Claim, None]:
    """The claim of the temporary copy, once the data is known to be that of the run.

    Raises:
        DataError: if it is not.
    """
    current = (identify or configured_identity)(config)
    found = compare(plan.run_json.get("identity"), current, plan.directory)
    if found.changed:
        raise DataError(f"{plan.directory} was trained on other files: {found.changed}. Restore them to rewind it.")
    directory = RunDir(Path(config.run.output_dir) / str(config.run.name), "onstep")
    return Claim(directory, config, identity=current.digests, notes=found.notes, start=plan.start), None


class _Kept(logging.Handler):
    """Keeps messages in a list."""

    def __init__(self, messages: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._messages = messages

    def emit(self, record: logging.LogRecord) -> None:
        self._messages.append(record.getMessage())


@contextmanager
def _warnings_kept(messages: list[str]) -> Iterator[None]:
    """Keep what Onstep logs instead of showing it: it is about the temporary copy."""
    log, handler = logging.getLogger("onstep"), _Kept(messages)
    before = log.propagate
    others = log.handlers[:]
    log.handlers[:], log.propagate = [handler], False
    try:
        yield
    finally:
        log.handlers[:], log.propagate = others, before
