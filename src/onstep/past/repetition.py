"""Provides `rewind`: repeats a run to a step of its past, and holds it there for its caller."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from onstep.callbacks import DefaultMetrics
from onstep.config import ConfigContainer
from onstep.config.keys import own_copy
from onstep.distributed import World
from onstep.errors import ConfigError, DataError
from onstep.models import ModelHook
from onstep.past.code import listen_to_evaluations, own_callbacks, own_functions
from onstep.past.comparison import Comparison
from onstep.past.configuration import repeating
from onstep.past.messages import warnings_kept
from onstep.past.metrics import SWITCHES, Log
from onstep.past.observer import attach
from onstep.past.place import Plan, copied, plan_rewind
from onstep.past.rewinding import Past
from onstep.past.turns import Turns
from onstep.training.opening import claim_for_all
from onstep.training.pretrain import configured_run, train_configured
from onstep.training.protocols import ForwardStep
from onstep.training.runs.claims import Claim
from onstep.training.runs.hold import Hold
from onstep.training.runs.identity import Identify, Identity, compare, configured_identity
from onstep.training.runs.pinned_data import pin_datasets
from onstep.training.runs.run_dir import RunDir
from onstep.training.stages.forward_step import forward_step

AroundStep = Callable[[int], AbstractContextManager[object]]
"""Gives the context of a repeated step, by its number."""


class Repetition:
    """A training in a thread that repeats a run in a temporary copy, and is held for its caller.

    Args:
        plan: the step, and the checkpoint to begin with.
        check: compares the identity of what is trained with the run's, on rank 0; returns notes.
        log: metrics to keep of each repeated step.
        around_step: see `rewind`.
    """

    past: Past

    def __init__(
        self,
        plan: Plan,
        check: Callable[[Identity], Sequence[str]],
        log: Sequence[str] = (),
        around_step: AroundStep | None = None,
    ) -> None:
        self.plan = plan
        self._check = check
        self._log = list(log)
        self._around_step = around_step
        self._turns = Turns()
        self.comparison = Comparison(plan)
        self.messages: list[str] = []
        """What the repeated run warns of."""

    def config(self, directory: Path, *, evaluates: bool) -> ConfigContainer:
        """The configuration of the run for its copy in a directory."""
        config = own_copy(self.plan.config)
        repeating(config, directory, saves=bool(self.plan.rollbacks), evaluates=evaluates)
        for key in filter(None, map(SWITCHES.get, self._log)):
            section, _, name = key.partition(".")
            setattr(getattr(config, section), name, True)
        return config

    def attach(self, run: Any) -> None:
        """Observe a run that is not open yet."""
        watch = attach(run)
        watch.turns = self._turns
        watch.wanted, watch.branch = self.plan.step, self.plan.branch
        watch.on_rollback = self.comparison.go_back
        run.record.listeners.add(self.comparison.hear)
        if self._around_step is not None:
            watch.around_step, watch.holds_before_update = self._around_step, False
        self.past = Past(self.plan, watch, self.comparison, Log(self._log) if self._log else None)
        self.past.warnings = self.messages

    def claim(self, config: ConfigContainer, world: World, identify: Identify) -> tuple[Claim | None, Hold | None]:
        """Claim the temporary copy, once what is trained is known to be that of the run. Collective."""
        self.comparison.num_ranks = world.size

        def claimed(config: ConfigContainer, identify: Identify | None) -> tuple[Claim, None]:
            assert identify is not None
            identity = identify(config)
            notes = tuple(self._check(identity))
            directory = RunDir(Path(config.run.output_dir) / str(config.run.name), "onstep")
            return Claim(directory, config, identity=identity.digests, notes=notes, start=self.plan.start), None

        return claim_for_all(config, world, identify, claimed)

    @contextmanager
    def held(self, train: Callable[[], object]) -> Iterator[Past]:
        """Start the training, and hold it at the step until the end of the block. Collective.

        Raises:
            ConfigError: if it ends before.
        """
        with warnings_kept(self.messages):
            try:
                self._turns.start(train)
                if not self._turns.is_held:
                    raise ConfigError(f"{self.plan.directory} ended before step {self.plan.step} when it was repeated.")
                device = self.past.job.run.world.device
                if torch.cuda.is_available() and device.type == "cuda":
                    torch.cuda.set_device(device)
                yield self.past
            finally:
                self._turns.close()


@contextmanager
def rewind(
    run: str | Path,
    step: int,
    *,
    callbacks: Sequence[object] = (),
    log: Sequence[str] = (),
    around_step: AroundStep | None = None,
    forward_step_func: ForwardStep | None = None,
    pre_wrap_hooks: Sequence[ModelHook] | None = None,
    plan: Plan | None = None,
) -> Iterator[Past]:
    """Repeat a run in memory from its nearest verified checkpoint to a step, and hold it there. Collective.

    Nothing in the run's directory is written, so a run that is still training can be rewound. The training runs in a
    thread that is held while the caller looks; the end of the block ends it. The global random generators are those of
    the run from then on.

    Args:
        run: the directory of a run of `pretrain`, `finetune` or the command line; of a Trainer: `Trainer.rewind`.
        step: the step to hold at, right before its update; it counts from 1.
        callbacks: called as those of the run are, in any convention. The run's own are made again, unless one of the
            same class is given.
        log: metrics that `past.log` has of each repeated step: `onstep.past.metrics.KNOWN`.
        around_step: called with the number of each repeated step; its context is entered around the step's forward and
            backward passes and its update. The rewind then holds at the end of the step.
        forward_step_func: that of the run, if its run.json does not tell.
        pre_wrap_hooks: likewise.
        plan: what `plan_rewind` has found; None calls it.

    Raises:
        ConfigError: if there is no such step, or the run cannot be repeated from what its directory holds.
        DataError: if its data has changed.
    """
    plan = plan_rewind(run, step) if plan is None else plan
    if plan.is_of_trainer:
        raise ConfigError(
            f"{plan.directory} is a run of a Trainer, whose model and data are in its script: onstep rewind "
            f"{plan.directory} {plan.step} --script train.py [ARGS], or trainer.rewind({plan.step}) in the script."
        )
    if plan.config.parallel.pipeline_model_parallel_size > 1:
        raise ConfigError(
            f"{plan.directory} is a run on the stages of a pipeline, which cannot be repeated step by step; continue a "
            f"checkpoint of it with parallel.pipeline_model_parallel_size=1."
        )
    repetition = Repetition(plan, lambda identity: _checked(plan, identity), log, around_step)
    with ExitStack() as stack:
        directory = stack.enter_context(copied(plan))
        own = own_callbacks(plan.run_json, callbacks)
        config = repetition.config(directory, evaluates=listen_to_evaluations([*own, *callbacks]))
        if forward_step_func is None:
            found = own_functions(plan.run_json, "forward_step", "forward_step_func")
            forward_step_func = found[0] if found else forward_step
        if pre_wrap_hooks is None:
            pre_wrap_hooks = own_functions(plan.run_json, "pre_wrap_hooks", "pre_wrap_hooks")
        hooks = pre_wrap_hooks
        defaults = [DefaultMetrics()] if plan.config.run.default_callbacks else []
        state, manager = configured_run(config, forward_step_func, [*defaults, *own, *callbacks])
        repetition.attach(state)

        def claim(config: ConfigContainer, world: World) -> tuple[Claim | None, Hold | None]:
            pin_datasets(config, world)
            return repetition.claim(config, world, configured_identity)

        yield stack.enter_context(repetition.held(lambda: train_configured(state, manager, hooks, claim)))


def _checked(plan: Plan, identity: Identity) -> Sequence[str]:
    """Notes about the data.

    Raises:
        DataError: if it is not that of the run.
    """
    found = compare(plan.run_json.get("identity"), identity, plan.directory)
    if found.changed:
        raise DataError(f"{plan.directory} was trained on other files: {found.changed}. Restore them to rewind it.")
    return found.notes
