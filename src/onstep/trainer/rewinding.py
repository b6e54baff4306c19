"""Repeats a run of a Trainer to a step of its past, with the model and the data that the Trainer has."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from onstep.callbacks import DefaultMetrics
from onstep.config import ChangeClass, ConfigContainer
from onstep.config.differences import changes, of_kind
from onstep.config.hf.argument import FOLLOW_METRIC
from onstep.distributed import World
from onstep.errors import ConfigError, DataError
from onstep.files.bounded_reading import read_json
from onstep.past.code import listen_to_evaluations
from onstep.past.place import Plan, copied, plan_rewind
from onstep.past.repetition import AroundStep, Repetition
from onstep.past.rewinding import Past
from onstep.trainer.methods import TrainerMethods
from onstep.trainer.output_dir.claim import in_words
from onstep.trainer.output_dir.identity import ARCHITECTURE, trainer_identity
from onstep.trainer.session import Repeated, job_of, training_session
from onstep.trainer.training_checks import check_training
from onstep.training.run import Run
from onstep.training.run_job import run_job
from onstep.training.runs.claims import Claim
from onstep.training.runs.hold import Hold
from onstep.training.runs.identity import IDENTITY_FILE, Identity, compare


@contextmanager
def rewound(
    trainer: TrainerMethods,
    run: str | Path,
    step: int,
    *,
    callbacks: Sequence[object] = (),
    log: Sequence[str] = (),
    around_step: AroundStep | None = None,
    plan: Plan | None = None,
) -> Iterator[Past]:
    """Repeat a run with the model, data and code of a Trainer, and hold it at a step. Collective.

    The run's own arguments are used. Afterwards the Trainer and its model are as before.

    Args:
        trainer: is not in a run.
        run: the directory of the run.
        step: see `onstep.rewind`, as for the others.

    Raises:
        ConfigError: if there is no such step, or the Trainer has another model than the run.
        DataError: if it has other data.
    """
    plan = plan_rewind(run, step) if plan is None else plan
    if not plan.is_of_trainer:
        raise ConfigError(
            f"{plan.directory} is not a run of a Trainer; rewind it with onstep.rewind, without a script."
        )
    checked = _Check(plan)
    repetition = Repetition(plan, checked.notes_on, log, around_step)
    with ExitStack() as stack:
        directory = stack.enter_context(copied(plan))
        stack.enter_context(_kept(trainer))
        users = _users_callbacks(trainer, callbacks)
        trainer.callback_manager.replace([*users, *callbacks])
        trainer.args = copy.copy(trainer.args)
        trainer.args.output_dir = trainer.args.logging_dir = str(directory)
        trainer.args.report_to, trainer.args.push_to_hub = [], False
        repeated = _RepeatedRun(trainer, repetition, directory, listen_to_evaluations([*users, *callbacks]))
        if trainer.model_init is not None:
            trainer.model = None

        def train() -> None:
            with training_session(trainer, repeated=repeated) as session:
                run_job(job_of(trainer, session))

        with repetition.held(train) as past:
            repetition.comparison.differences += checked.differences
            past.dataset = trainer.train_dataset
            yield past


@dataclass
class _RepeatedRun(Repeated):
    """How a Trainer's session repeats a run, in place of starting one."""

    trainer: TrainerMethods
    repetition: Repetition
    directory: Path
    has_listeners: bool
    """Whether callbacks listen to evaluations."""

    def adapt(self, config: ConfigContainer) -> ConfigContainer:
        plan = self.repetition.plan
        is_followed = plan.config.to_dict().get("trainer", {}).get("lr_scheduler_type") in FOLLOW_METRIC
        own = self.repetition.config(self.directory, evaluates=self.has_listeners or is_followed)
        moved = of_kind(changes(plan.config, config), ChangeClass.TRAJECTORY)
        if moved and self.repetition.plan.num_ranks == World().size:
            self.repetition.messages.append(
                f"the script's arguments are not those of the run, which are used: {in_words(moved)}"
            )
        return own

    def attach(self, run: Run) -> None:
        self.repetition.attach(run)

    def claim(self, config: ConfigContainer, world: World) -> tuple[Claim | None, Hold | None]:
        return self.repetition.claim(config, world, lambda _: trainer_identity(self.trainer))


class _Check:
    """Compares what a Trainer would train with what the run was trained on."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self.differences: list[str] = []
        """Of the code, which may differ without any effect."""

    def notes_on(self, identity: Identity) -> Sequence[str]:
        """Nothing, if the model and the data are those of the run.

        Raises:
            DataError: for other data.
            ConfigError: for another model.
        """
        plan, recorded = self._plan, self._plan.run_json.get("identity")
        of_data = compare(recorded, identity, plan.directory, without=("code", "weights", "eval_data"))
        if of_data.changed:
            raise DataError(
                f"{plan.directory} was trained on other data than this script gives: {of_data.changed}. Run the script "
                f"with the data and the arguments of the run."
            )
        of_weights = compare(recorded, identity, plan.directory, without=("code", "train_data", "eval_data"))
        if of_weights.changed and (plan.start is None or self._is_other_model(identity)):
            raise ConfigError(
                f"{plan.directory} trained another model than this script makes: {of_weights.changed}. Run the script "
                f"with the arguments of the run"
                + ("." if plan.start is not None else ", or rewind a step after its first checkpoint.")
            )
        of_code = compare(recorded, identity, plan.directory, without=("train_data", "weights", "eval_data"))
        self.differences += [of_code.changed] if of_code.changed else []
        return ()

    def _is_other_model(self, identity: Identity) -> bool:
        """Whether more than the values of the weights differ."""
        try:
            recorded = read_json(self._plan.directory / IDENTITY_FILE)
        except (OSError, DataError):
            return False
        weights = recorded.get("weights") if isinstance(recorded, dict) else None
        files = weights.get("files") if isinstance(weights, dict) else None
        own = identity.parts["weights"].files if "weights" in identity.parts else {}
        return isinstance(files, dict) and files.get(ARCHITECTURE) != own.get(ARCHITECTURE)


def _users_callbacks(trainer: TrainerMethods, given: Sequence[object]) -> list[object]:
    """The Trainer's callbacks without those that report, and those that are given in place of them."""
    kinds = tuple(type(one) for one in given)
    return [
        one
        for one in trainer.callback_manager.callbacks
        if type(one) not in kinds and (isinstance(one, DefaultMetrics) or not _reports(one))
    ]


def _reports(callback: object) -> bool:
    module = type(callback).__module__
    return module.startswith(("onstep.", "transformers.integrations")) and not module.startswith("onstep.integrations.")


@contextmanager
def _kept(trainer: TrainerMethods) -> Iterator[None]:
    """Restore the Trainer, its model and the optimizer that it was given at the end."""
    attributes, callbacks = dict(vars(trainer)), trainer.callback_manager.callbacks
    with ExitStack() as stack:
        stack.callback(trainer.callback_manager.replace, callbacks)
        stack.callback(vars(trainer).update, attributes)
        stack.callback(vars(trainer).clear)
        check_training(trainer)
        if trainer.model_init is None and trainer.model is not None:
            stack.callback(_weights_kept(trainer.model))
        for given in (trainer.optimizer, trainer.lr_scheduler):
            if _has_state(given):
                stack.callback(given.load_state_dict, copy.deepcopy(given.state_dict()))
        yield


def _has_state(one: Any) -> bool:
    return hasattr(one, "state_dict") and hasattr(one, "load_state_dict")


def _weights_kept(model: nn.Module) -> Callable[[], None]:
    """A function that gives the model the weights, buffers and modes that it has now."""
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    copies: dict[str, Tensor] = {name: one.detach().to("cpu", copy=True) for name, one in named.items()}
    modes = {module: module.training for module in model.modules()}

    def restore() -> None:
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        with torch.no_grad():
            for name, one in copies.items():
                if name in tensors:
                    tensors[name].copy_(one)
        for parameter in model.parameters():
            parameter.grad = None
        for module, trains in modes.items():
            module.training = trains

    return restore
