"""Holds a Trainer's constructor arguments, and computes its loss."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from weakref import ref

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from onstep.callbacks import add_control
from onstep.config import ConfigContainer, TrainingArguments, merge
from onstep.data import Batch, default_data_collator
from onstep.data.loaders.collate import Collate
from onstep.data.loaders.kept_loaders import KeptLoaders
from onstep.errors import ConfigError
from onstep.events import CallbackManager
from onstep.originals import is_exchanged
from onstep.record.kinds import Metrics
from onstep.trainer.computing.attributes import set_attributes
from onstep.trainer.computing.batch_size_search import Search
from onstep.trainer.computing.fused_loss import FusedLoss
from onstep.trainer.computing.label_smoothing import LabelSmoother, smoothed_loss
from onstep.trainer.computing.random_numbers import StartOfTraining
from onstep.trainer.computing.refused_attributes import missing_attribute
from onstep.trainer.default_callbacks import default_callbacks as defaults_of
from onstep.trainer.default_callbacks import with_defaults
from onstep.trainer.distributed_env import join_environment
from onstep.trainer.loss_convention import MAPPING, NUM_ITEMS, accepts_num_items, called, of_model
from onstep.trainer.model_step import EvaluationWeighting, function_loss, model_loss
from onstep.trainer.own_arguments import own_arguments
from onstep.trainer.parameter_groups import OptimizerGroups, with_factories
from onstep.trainer.predictions import EvalPrediction
from onstep.trainer.reporting.argument_errors import errors_name_arguments
from onstep.trainer.reporting.memory_metrics import MemoryMetrics
from onstep.trainer.takeover import current_takeover
from onstep.training import GlobalState
from onstep.training.runs.identity import Identity
from onstep.training.runs.run_dir import RunDir

_CHECKPOINTS = "a function (rank, module) that makes the module recompute its activations"


class BaseTrainer:
    """Stores what the user passed; `Trainer` trains and evaluates with it."""

    neftune_noise_alpha: float | None
    _evaluation_weighting: EvaluationWeighting = "samples"
    """Of the losses of an evaluation in an unmodified script, as in Hugging Face's Trainer of this name."""
    loss_is_scaled_for_ga: bool | None = None
    """What your own `compute_loss` returns: True means a share of the step's loss, already divided by
    `num_items_in_batch`; False means the mean of its micro-batch; None detects it from the code."""

    @errors_name_arguments
    def __init__(
        self,
        model: nn.Module | None = None,
        args: TrainingArguments | Mapping[str, Any] | None = None,
        data_collator: Collate | None = None,
        train_dataset: object = None,
        eval_dataset: object = None,
        processing_class: object = None,
        model_init: Callable[..., nn.Module] | None = None,
        compute_loss_func: Callable[..., Tensor] | None = None,
        compute_metrics: Callable[[EvalPrediction], Metrics] | None = None,
        callbacks: Sequence[object] | CallbackManager | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        optimizer_cls_and_kwargs: tuple[type, dict[str, object]] | None = None,
        preprocess_logits_for_metrics: Callable[..., object] | None = None,
        *,
        tokenizer: object = None,
        default_callbacks: bool = True,
        optimizer_factory: Callable[..., Any] | None = None,
        lr_scheduler_factory: Callable[..., Any] | None = None,
        optimizer_groups: OptimizerGroups | None = None,
        fused_loss_factory: Callable[[nn.Module], Callable[..., Tensor]] | None = None,
        enable_activation_checkpoint_fn: Callable[[int, nn.Module], object] | None = None,
        distributed_env: object = None,
    ) -> None:
        before = set(vars(self))
        _check_model(model, model_init)
        if tokenizer is not None and processing_class not in (None, tokenizer):
            raise ConfigError("Pass the tokenizer as processing_class alone; tokenizer is its name in transformers 4.")
        processing_class = tokenizer if processing_class is None else processing_class
        _check_callable("data_collator", data_collator, "an instance, such as DataCollatorWithPadding(tokenizer)", 1)
        _check_callable("compute_metrics", compute_metrics, "a function of an EvalPrediction that returns a dict", 1)
        _check_callable(
            "preprocess_logits_for_metrics", preprocess_logits_for_metrics, "a function (logits, labels)", 2
        )
        _check_callable("compute_loss_func", compute_loss_func, "a function of (outputs, labels)", 2)
        _check_callable("enable_activation_checkpoint_fn", enable_activation_checkpoint_fn, _CHECKPOINTS, 2)
        optimizers = with_factories(optimizers, optimizer_cls_and_kwargs, optimizer_factory, lr_scheduler_factory)
        _check_optimizers(optimizers)
        self.args = own_arguments(args)
        if distributed_env is not None:
            self.args = join_environment(distributed_env, self.args)
        self.distributed_env = self.dist = distributed_env
        self.follows_transformers = is_exchanged()
        """Whether random numbers are drawn, and numbers recorded, as by Hugging Face's: in unmodified scripts."""
        if (takeover := current_takeover()) is not None:
            takeover.redirect(self.args)
        self.start_of_training = StartOfTraining(self.args.seed)
        self.model = model
        self.model_init = model_init
        self.has_own_collator = data_collator is not None
        self.data_collator: Collate = data_collator or default_collator(processing_class)
        self.train_dataset = train_dataset
        self.eval_dataset = eval_dataset
        self.processing_class = processing_class
        self.compute_loss_func = compute_loss_func
        self._known_function: tuple[object, bool] = (None, False)
        """The cached result of `accepts_num_items`, so that it does not run for every micro-batch."""
        self._known_model: tuple[ref[nn.Module], bool] | None = None
        """Likewise for a model that returns a share."""
        self.compute_metrics = compute_metrics
        self.preprocess_logits_for_metrics = preprocess_logits_for_metrics
        self.optimizer, self.lr_scheduler = optimizers
        self.optimizer_factory, self.lr_scheduler_factory = optimizer_factory, lr_scheduler_factory
        self.optimizer_groups = optimizer_groups
        self.fused_loss_factory = fused_loss_factory
        self.fused_loss = None if fused_loss_factory is None else FusedLoss(fused_loss_factory)
        self.enable_activation_checkpoint_fn = enable_activation_checkpoint_fn
        self.previous: tuple[object, object] = (None, None)
        """Optimizer and scheduler of the last training."""
        self.put_back: dict[str, object] = {}
        """What the next training puts back in the place of those that the last one made."""
        self.optimizer_cls_and_kwargs = optimizer_cls_and_kwargs
        self.memory = MemoryMetrics(enabled=not self.args.skip_memory_metrics)
        """Measures the memory of its calls, with `skip_memory_metrics=False`."""
        with self.memory.measured("init"):
            configured = ConfigContainer()
            merge(configured, self.args.config_overrides or {})
            has_defaults = default_callbacks and configured.run.default_callbacks
            shows_bars = not self.args.disable_tqdm
            defaults = defaults_of(configured, shows_bars=shows_bars) if has_defaults else []
            self.callback_manager = with_defaults(callbacks, defaults)
            if self.args.control or configured.run.control:
                add_control(self.callback_manager)
        self.global_state: GlobalState | None = None
        """State of the current or most recent run."""
        self.session: Any = None
        """The session of the current run; None outside of one."""
        self.eval_loaders = KeptLoaders()
        """Evaluation loaders whose workers stay for the next evaluation, at most until a training ends."""
        self.owned_dirs: dict[Path, tuple[RunDir, Identity]] = {}
        """Run directories that this Trainer claimed, by requested path, and what it learned from there."""
        self.batch_size_search: Search | None = None
        """What `auto_find_batch_size` has found."""
        self.stages: Any = None
        """The stages of the model on this rank (`TrainerStages`), once a pipeline has cut it."""
        self.num_averaged_ranks = 1
        """Ranks that a share of the step's loss is averaged over, in an overridden `training_step`."""
        self.stated_loss_kwargs: bool | None = None
        """The value that a subclass assigned to `model_accepts_loss_kwargs`."""
        self.label_smoother: LabelSmoother | None = None
        """The loss with `label_smoothing_factor`; None without it."""
        set_attributes(self)
        if self.fused_loss is not None and (compute_loss_func is not None or self.label_smoother is not None):
            other = "label_smoothing_factor" if compute_loss_func is None else "compute_loss_func"
            raise ConfigError(f"fused_loss_factory and {other} both define the loss; pass one of them.")
        self.has_fired_on_save = False
        """Whether an override has saved a checkpoint, which fires `on_save`, and may now fire it itself."""
        methods: Any = self
        if self.args.push_to_hub:
            methods.open_hub()
        self._validate_args()
        self.library_attributes = frozenset(vars(self)) - before
        """Names of the attributes that are not a user's own."""
        methods._own_handler.fire_init_end()

    @property
    def tokenizer(self) -> object:
        """`processing_class` under its name in transformers 4."""
        return self.processing_class

    @tokenizer.setter
    def tokenizer(self, tokenizer: object) -> None:
        self.processing_class = tokenizer

    def _validate_args(self) -> None:
        """Called at the end of the constructor; the checks of the arguments are made without it."""

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Batch,
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """The loss of a micro-batch, and the outputs if requested; override it for a custom loss.

        An override that uses `num_items_in_batch` (the labels of the whole step over all ranks) returns its share of
        the step's loss; one that does not returns a mean, weighted by the micro-batch's labels or samples. If its code
        does not show which, set `loss_is_scaled_for_ga`.

        Args:
            inputs: one micro-batch on the device, as the collator returned it: a mapping (the model's keywords), a
                tuple (its positional arguments) or a tensor.
            model: the module, called with `inputs`.
            return_outputs: whether the model's outputs are returned beside the loss.
        """
        function = self.compute_loss_func
        further: dict[str, object] = {NUM_ITEMS: num_items_in_batch}
        if self.fused_loss is not None:
            loss, outputs = self.fused_loss(model, inputs, num_items_in_batch, returns_logits=return_outputs)
        elif function is not None:
            loss, outputs = function_loss(function, model, inputs, further if self._accepts_items(function) else {})
        elif self.label_smoother is not None and isinstance(inputs, MAPPING) and "labels" in inputs:
            loss, outputs = smoothed_loss(self.label_smoother, model, inputs, further)
        else:
            is_wanted = num_items_in_batch is not None and self._gives_share(model)
            loss, outputs = model_loss(model, inputs, further if is_wanted else {})
        if self.num_averaged_ranks > 1 and num_items_in_batch is not None:
            loss = loss * self.num_averaged_ranks
        return (loss, outputs) if return_outputs else loss

    def _accepts_items(self, function: Callable[..., object]) -> bool:
        if self._known_function[0] is not function:
            self._known_function = function, accepts_num_items(function)
        return self._known_function[1]

    def _prepare_context_parallel_inputs(
        self, model: nn.Module, inputs: Batch
    ) -> tuple[Callable[[], AbstractContextManager[object]], Batch]:
        """What makes the context of a micro-batch's passes, and its inputs: sequences are not split here."""
        return nullcontext, inputs

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if hasattr(type(self), name):  # a property whose own code lacks an attribute: its error, not this one
                return object.__getattribute__(self, name)
            raise missing_attribute(self, name)

    def is_local_process_zero(self) -> bool:
        """Whether this is the first rank of its machine."""
        return self.args.local_process_index == 0

    def is_world_process_zero(self) -> bool:
        """Whether this is rank 0."""
        return self.args.process_index == 0

    def _gives_share(self, model: nn.Module) -> bool:
        if self.stated_loss_kwargs is not None:
            return self.stated_loss_kwargs
        known = self._known_model
        if known is None or known[0]() is not model:
            known = self._known_model = ref(model), of_model(model) == "share"
        return known[1]


def default_collator(processing_class: Any) -> Collate:
    """The collator that suits a processing class: one that pads, for a tokenizer."""
    if hasattr(processing_class, "pad") and hasattr(processing_class, "padding_side"):
        from transformers import DataCollatorWithPadding

        padding: object = DataCollatorWithPadding(processing_class)
        return cast(Collate, padding)
    return default_data_collator


def _check_callable(name: str, value: object, example: str, *counts: int) -> None:
    """Check that a function or callable object accepts one of these `counts` of arguments, as it will be called."""
    if value is None:
        return
    if not callable(value) or isinstance(value, type):
        shown = f"the class {value.__name__} itself" if isinstance(value, type) else repr(value)[:80]
        raise ConfigError(f"{name} must be a function or another callable object, got {shown}; pass {example}")
    try:
        signature = inspect.signature(called(value))
    except (TypeError, ValueError):  # of some builtins
        return
    if not any(_accepts(signature, count) for count in counts):
        author = getattr(value, "__qualname__", type(value).__name__)
        rule = " or ".join(map(str, counts))
        raise ConfigError(
            f"{name} is called with {rule} positional argument{'s' if counts[-1] > 1 else ''}, got {author}"
            f"{signature}; pass {example}"
        )


def _accepts(signature: inspect.Signature, count: int) -> bool:
    by_name = {"compute_result", NUM_ITEMS} & signature.parameters.keys()
    for named in ((), by_name):  # both are passed by name, and may be required
        try:
            signature.bind(*range(count), **dict.fromkeys(named))
        except TypeError:
            continue
        return True
    return False


def _check_optimizers(optimizers: tuple[object, object]) -> None:
    """Check that `optimizers` is (optimizer, scheduler), of objects, factories or None."""
    if not isinstance(optimizers, (tuple, list)) or len(optimizers) != 2:
        raise ConfigError(
            f"optimizers must be a pair (optimizer, scheduler), got a {type(optimizers).__name__}; pass "
            f"optimizers=(optimizer, None) for the configured schedule"
        )
    optimizer, scheduler = optimizers
    if isinstance(optimizer, LRScheduler) or isinstance(scheduler, Optimizer):
        raise ConfigError(
            f"optimizers must be (optimizer, scheduler) in this order, got ({type(optimizer).__name__}, "
            f"{type(scheduler).__name__})"
        )
    for name, value in (("optimizer", optimizer), ("scheduler", scheduler)):
        if value is not None and not hasattr(value, "step") and not callable(value):
            raise ConfigError(
                f"the {name} in optimizers must be one object or a factory, got {str(value)[:80]!r}; for several "
                f"learning rates, give one optimizer several parameter groups; select one by its name with "
                f"TrainingArguments(optim=...) and lr_scheduler_type=..."
            )


def _check_model(model: nn.Module | None, model_init: object) -> None:
    if (model is None) == (model_init is None):
        raise ConfigError("Trainer requires exactly one of model and model_init; pass the other as None.")
    if model is not None and not isinstance(model, nn.Module):
        if isinstance(model, type) and issubclass(model, nn.Module):
            raise ConfigError(
                f"model must be a torch.nn.Module, got the class {model.__name__} itself; pass an instance of it, "
                f"{model.__name__}(...), or the class as model_init"
            )
        kind = model.__name__ if isinstance(model, type) else type(model).__name__
        raise ConfigError(f"model must be a torch.nn.Module, got {kind}; pass a function that makes one as model_init.")
    if model_init is not None and not callable(model_init):
        raise ConfigError(f"model_init must be a function that returns a model, got {type(model_init).__name__}.")
    if isinstance(model_init, nn.Module):
        raise ConfigError(
            f"model_init must be a function that returns a model, got a model, {type(model_init).__name__}; pass it as "
            f"model"
        )
    if not isinstance(model_init, type):
        _check_callable(
            "model_init", model_init, "a function of no argument, or of a trial, that returns a model", 0, 1
        )
