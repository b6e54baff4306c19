"""Provides `rewind`: repeats a run to a step of its past, and holds it there for its caller."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from onstep.callbacks import DefaultMetrics
from onstep.checkpoint import RngState
from onstep.config import ConfigContainer
from onstep.config.keys import own_copy
from onstep.data import Batch
from onstep.distributed import World, no_sync
from onstep.errors import ConfigError, DataError
from onstep.models import ModelHook
from onstep.past.code import listen_to_evaluations, own_callbacks, own_functions
from onstep.past.comparison import Comparison
from onstep.past.configuration import repeating
from onstep.past.layers import Means, Weights, norms_by_layer
from onstep.past.messages import warnings_kept
from onstep.past.metrics import SWITCHES, Log
from onstep.past.observer import END, UPDATE, UPDATED, Watch, attach
from onstep.past.place import Plan, copied, plan_rewind
from onstep.past.samples import Sample, SampleLosses, tokens_of, undisturbed
from onstep.past.sources import Sources
from onstep.past.unusual import Seen, mark
from onstep.training.compute.loss_sums import at_least_one
from onstep.training.compute.rows import rows_of
from onstep.training.compute.step import MicroBatches, Step
from onstep.training.opening import claim_for_all
from onstep.training.pretrain import configured_run, train_configured
from onstep.training.protocols import ForwardStep, StateDict
from onstep.training.runs.claims import Claim
from onstep.training.runs.decisions import DecisionLog
from onstep.training.runs.hold import Hold
from onstep.training.runs.identity import Identify, compare, configured_identity
from onstep.training.runs.pinned_data import pin_datasets
from onstep.training.runs.run_dir import RunDir
from onstep.training.stages.forward_backward import BufferGuard, forward_of
from onstep.training.stages.forward_step import forward_step
from onstep.training.stages.job import Job


class Past:
    """A repeated run, held at a step: its gradients are ready, and its weights are those that computed them.

    The gradients are as the optimizer receives them: unscaled, and clipped if the run clips. What the caller computes
    with the model does not change the run as long as weights and `gradients` stay as they are; `forward` also leaves
    the random generators alone.
    """

    def __init__(self, plan: Plan, watch: Watch, comparison: Comparison, log: Log | None = None) -> None:
        self.plan = plan
        self.comparison = comparison
        """What the repeated steps have logged, beside the record."""
        self.warnings: list[str] = []
        """What the repeated run warned of."""
        self.seconds = 0.0
        """The time from the first repeated step to this one; without loading."""
        self.seen = Seen()
        self.means = Means(10)
        """Norms of the layers in the last steps before the one that is held."""
        self._watch = watch
        self._weights: Weights | None = None
        self.log = log
        """Metrics of each repeated step, up to the one that is held; None unless asked for."""
        watch.tell = self._hear

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

    @property
    def random_state(self) -> StateDict:
        """The random generators right before the step's first forward pass."""
        return self._watch.random_state

    @property
    def branch(self) -> int:
        """The number of rollbacks that the run has done before the step."""
        return self.job.run.features.room(DecisionLog).branch

    def take_buffers(self) -> BufferGuard:
        """The model's buffers right before the step's first forward pass, which later steps do not replace."""
        buffers, self._watch.buffers = self._watch.buffers, None
        assert buffers is not None
        return buffers

    def release(self) -> None:
        """Hold at no further step: the caller trains on with the objects of the job."""
        self._watch.wanted, self._watch.tell = sys.maxsize, lambda place, step: None

    def forward(self) -> Tensor:
        """The step's mean loss on this rank, 0-d, computed again with the random state of its first forward pass.

        With the weights of the held step it equals the loss that the step had; a graph is built unless gradients are
        off. Random generators and buffers are as before.
        """
        job, micros = self.job, []
        iterator = MicroBatches(self.current.batches, job.run.world.device)
        with undisturbed(job), no_sync(job.model):
            RngState(job.run.world.device).load_state_dict(self._watch.random_state)
            forward = forward_of(job)
            for number in range(len(iterator)):
                batch = iterator.stage(number)
                micros.append(forward(iterator, batch, self.current.batches.is_filler[number]))
        sums = [one.loss * one.weight if one.kind == "mean" else one.loss for one in micros]
        weight = sum((one.weight for one in micros[1:]), micros[0].weight)
        return sum(sums[1:], sums[0]) / (1 if micros[0].kind == "share" else at_least_one(weight))

    def samples(self, *, with_gradients: bool = True) -> list[Sample]:
        """The samples of the step, those of all ranks, each with its loss and the norm of its gradient. Collective.

        Needs the memory of one gradient beside that of the training.
        """
        job = self.job
        batches = [
            row
            for number, batch in enumerate(self.batches)
            if not self.current.batches.is_filler[number]
            for row in rows_of(batch)
        ]
        found = SampleLosses(job, self.current, self._watch.random_state).measure(with_gradients=with_gradients)
        tokenizer = getattr(job.run, "tokenizer", None)
        if tokenizer is not None and (dataset := getattr(job.reader, "dataset", None)) is not None:
            known = [one for one in found if one.index is not None]
            counts = [max(len(one.documents), 1) for one in known]
            sources = Sources(job.run.cfg.dataset, dataset, tokenizer)
            for sample, places in zip(known, sources.places([one.index or 0 for one in known], counts), strict=True):
                sample.place = next(iter(places), None)
                for document, place in zip(sample.documents, places, strict=False):
                    document.place = place
        for sample, batch in zip(found, batches, strict=True):
            if tokenizer is not None and (tokens := tokens_of(batch)) is not None:
                sample.text = tokenizer.decode(tokens[0].tolist())
        mark(found, batches, self.seen)
        return [sample for rank in job.run.world.gather(found) for sample in rank]

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

    def _hear(self, place: str, step: Step) -> None:
        """Note what is measured of each repeated step, and the norms of the last ones before the wanted step."""
        is_near = self._watch.wanted - self.means.most <= step.number < self._watch.wanted
        if place == UPDATE and self.log is not None:
            self.log.add(self.job, step)
        if place == UPDATE and is_near:
            self._weights = Weights(self.model)
            self.means.gradients.append(norms_by_layer(self.gradients.items()))
        elif place == UPDATED:
            self.seen.add(step)
            if self._weights is not None:
                self.means.updates.append(self._weights.update_norms())
                self._weights = None

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
    log: Sequence[str] = (),
    around_step: Callable[[int], AbstractContextManager[object]] | None = None,
    forward_step_func: ForwardStep | None = None,
    pre_wrap_hooks: Sequence[ModelHook] | None = None,
    plan: Plan | None = None,
) -> Iterator[Past]:
    """Repeat a run in memory from its nearest verified checkpoint to a step, and hold it there. Collective.

    Nothing in the run's directory is written, so a run that is still training can be rewound. The training runs in a
    thread that is held while the caller looks; the end of the block ends it. The global random generators are those of
    the run from then on.

    Args:
        run: the directory of a run of `pretrain`, `finetune` or the command line.
        step: the step to hold at, right before its update; it counts from 1.
        callbacks: called as those of the run are, in any convention. The run's own are made again, unless one of the
            same class is given.
        log: metrics that `past.log` has of each repeated step: `onstep.past.metrics.KNOWN`.
        around_step: called with the number of each repeated step; its context is entered around the step's forward and
            backward passes and its update. The rewind then holds at the end of the step.
        forward_step_func: that of the run, if its run.json does not tell.
        pre_wrap_hooks: likewise.
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
        own = own_callbacks(plan.run_json, callbacks)
        repeating(config, directory, saves=bool(plan.rollbacks), evaluates=listen_to_evaluations([*own, *callbacks]))
        for key in filter(None, map(SWITCHES.get, log)):
            section, _, name = key.partition(".")
            setattr(getattr(config, section), name, True)
        if forward_step_func is None:
            found = own_functions(plan.run_json, "forward_step", "forward_step_func")
            forward_step_func = found[0] if found else forward_step
        if pre_wrap_hooks is None:
            pre_wrap_hooks = own_functions(plan.run_json, "pre_wrap_hooks", "pre_wrap_hooks")
        hooks = pre_wrap_hooks
        defaults = [DefaultMetrics()] if plan.config.run.default_callbacks else []
        state, manager = configured_run(config, forward_step_func, [*defaults, *own, *callbacks])
        comparison, watch = Comparison(plan), attach(state)
        watch.wanted, watch.branch = plan.step, plan.branch
        watch.on_rollback = comparison.go_back
        state.record.listeners.add(comparison.hear)
        if around_step is not None:
            watch.around_step, watch.holds_before_update = around_step, False
        past = Past(plan, watch, comparison, Log(list(log)) if log else None)
        stack.enter_context(warnings_kept(past.warnings))
        stack.callback(watch.turns.close)

        def claim(config: ConfigContainer, world: World) -> tuple[Claim | None, Hold | None]:
            comparison.num_ranks = world.size
            pin_datasets(config, world)
            return claim_for_all(
                config, world, configured_identity, lambda one, identify: _claimed(plan, one, identify)
            )

        watch.turns.start(lambda: train_configured(state, manager, hooks, claim))
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
