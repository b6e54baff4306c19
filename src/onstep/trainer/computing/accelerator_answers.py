"""Answers what `accelerate.Accelerator` tells about plugins, loaders and processes, for the Trainer's own."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from types import SimpleNamespace
from typing import Any

from onstep.config.hf.sharding import sharding_keys
from onstep.errors import ConfigError


class AcceleratorAnswers:
    """Attributes and methods of `accelerate.Accelerator` whose answers follow from how Onstep trains.

    There is no DeepSpeed, fp8 or Megatron-LM, so that each of their plugins and handlers is None.
    """

    deepspeed_plugin = deepspeed_plugins = torch_tp_plugin = megatron_lm_plugin = None
    fp8_recipe_handler = te_recipe_handler = ao_recipe_handler = None
    msamp_recipe_handler = autocast_handler = init_handler = profile_handler = scaler_handler = None
    is_composable_parallelism_enabled = fp8_enabled = has_lomo_optimizer = has_fp8_handler = False
    delayed_fp8_autocast = split_batches = use_stateful_dataloader = fork_launched = debug = False
    device_placement = should_save_model = initialized = True
    dispatch_batches: bool | None = None
    project_dir: str | None = None
    logging_dir: str | None = None
    save_iteration = 0
    fp8_backend = "NO"
    gradient_accumulation_steps = 1
    """1, as under Hugging Face's Trainer, which accumulates gradients itself; see
    `trainer.current_gradient_accumulation_steps`."""

    _trainer: Any
    _is_triggered = False
    _even_batches: bool | None = None

    # ---- shards

    @property
    def is_fsdp2(self) -> bool:
        """Whether the model is divided between ranks by torch's `fully_shard`."""
        args = self._trainer.args
        return bool(args.fsdp) or args.parallel_sizes.dp_shard > 1

    @property
    def fsdp_plugin(self) -> Any:
        """accelerate's plugin with what `fsdp_config` says; None if the model is not sharded. Imports accelerate."""
        if not self.is_fsdp2:
            return None
        config = sharding_keys(self._trainer.args)
        plugin = importlib.import_module("accelerate.utils").FullyShardedDataParallelPlugin
        return plugin(
            fsdp_version=2,
            reshard_after_forward=bool(config.get("fsdp.reshard_after_forward", True)),
            cpu_offload=config.get("fsdp.cpu_offload", False),
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=config.get("fsdp.wrap"),
        )

    @property
    def parallelism_config(self) -> Any:
        """The argument of that name, as accelerate's `ParallelismConfig` where accelerate is installed."""
        given = self._trainer.args.parallelism_config
        if not isinstance(given, dict):
            return given
        try:
            return importlib.import_module("accelerate.parallelism_config").ParallelismConfig(**given)
        except ModuleNotFoundError:
            return SimpleNamespace(**{"dp_replicate_size": 1, "dp_shard_size": 1, **given})

    @property
    def torch_device_mesh(self) -> Any:
        """The mesh of the run's ranks, with the axes dp_replicate and dp_shard; None without shards. Collective."""
        is_divided = self.is_fsdp2 or self._trainer.args.parallelism_config is not None
        return self._world().mesh if is_divided else None  # type: ignore[attr-defined]

    device_mesh = torch_device_mesh

    # ---- loaders

    @property
    def dataloader_config(self) -> SimpleNamespace:
        """`accelerator_config` of the arguments, as accelerate has it."""
        values: dict[str, Any] = self._trainer.args.accelerator_config.to_dict()
        values.pop("gradient_accumulation_kwargs", None)
        return SimpleNamespace(**values, data_seed=self._trainer.args.data_seed, use_stateful_dataloader=False)

    @property
    def even_batches(self) -> bool:
        """That of `accelerator_config`; assigning it changes nothing: each sample is trained on once an epoch."""
        return bool(self.dataloader_config.even_batches) if self._even_batches is None else self._even_batches

    @even_batches.setter
    def even_batches(self, value: bool) -> None:
        self._even_batches = value

    @property
    def use_seedable_sampler(self) -> bool:
        """That of `accelerator_config`."""
        return bool(self.dataloader_config.use_seedable_sampler)

    @property
    def non_blocking(self) -> bool:
        """That of `accelerator_config`."""
        return bool(self.dataloader_config.non_blocking)

    def join_uneven_inputs(self, joinables: object, even_batches: bool | None = None) -> AbstractContextManager[object]:
        """An empty context: every rank has equally many micro-batches in a step."""
        return nullcontext()

    def skip_first_batches(self, dataloader: object, num_batches: int = 0) -> Any:
        """A loader without its first batches, as accelerate makes it."""
        return importlib.import_module("accelerate.data_loader").skip_first_batches(dataloader, num_batches)

    # ---- precision

    @property
    def native_amp(self) -> bool:
        """Whether the model computes in bfloat16 or float16."""
        return str(self.mixed_precision) != "no"  # type: ignore[attr-defined]

    def unscale_gradients(self, optimizer: object = None) -> None:
        """Nothing without a loss scale.

        Raises:
            ConfigError: with float16, whose loop removes the scale once all gradients are there.
        """
        if self.scaler is not None:  # type: ignore[attr-defined]
            raise ConfigError(
                "accelerator.unscale_gradients is not supported with fp16: the loop unscales the gradients itself; use "
                "accelerator.clip_grad_norm_, or bf16=True."
            )

    # ---- processes

    @property
    def multi_device(self) -> bool:
        """Whether there are several ranks."""
        return bool(self.use_distributed)  # type: ignore[attr-defined]

    @property
    def backend(self) -> str | None:
        """The backend of the process group; None for one rank without one."""
        distributed = importlib.import_module("torch.distributed")
        return str(distributed.get_backend()) if distributed.is_initialized() else None

    def on_local_main_process(self, function: Callable[..., object]) -> Callable[..., object]:
        """Decorate a function that only the first rank of each machine runs; None on the others."""
        return _only_if(lambda: bool(self.is_local_main_process), function)  # type: ignore[attr-defined]

    def on_last_process(self, function: Callable[..., object]) -> Callable[..., object]:
        """Decorate a function that only the last rank runs; None on the others."""
        return _only_if(lambda: bool(self.is_last_process), function)  # type: ignore[attr-defined]

    def on_process(self, function: Callable[..., object] | None = None, process_index: int | None = None) -> Any:
        """Decorate a function that only this rank runs; None on the others."""
        return _only_on(lambda: self.process_index, process_index, function)  # type: ignore[attr-defined]

    def on_local_process(
        self, function: Callable[..., object] | None = None, local_process_index: int | None = None
    ) -> Any:
        """Decorate a function that only this rank of each machine runs; None on the others."""
        return _only_on(lambda: self.local_process_index, local_process_index, function)  # type: ignore[attr-defined]

    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> AbstractContextManager[Any]:
        """Context with this rank's share of a list, tensor or dictionary, as accelerate divides it."""
        state = self._trainer.args.distributed_state
        share: AbstractContextManager[Any] = state.split_between_processes(inputs, apply_padding=apply_padding)
        return share

    def set_trigger(self) -> None:
        """Note something on this rank, for `check_trigger`."""
        self._is_triggered = True

    def check_trigger(self) -> bool:
        """Whether any rank has called `set_trigger` since the last check. Collective."""
        rows: list[list[float]] = self._world().gather_numbers([float(self._is_triggered)])  # type: ignore[attr-defined]
        self._is_triggered = False
        return any(row[0] for row in rows)

    def end_training(self) -> None:
        """Nothing: trackers and worker processes end with the run."""


def _only_if(condition: Callable[[], bool], function: Callable[..., object]) -> Callable[..., object]:
    @wraps(function)
    def conditional(*args: object, **kwargs: object) -> object:
        return function(*args, **kwargs) if condition() else None

    return conditional


def _only_on(rank: Callable[[], int], wanted: int | None, function: Callable[..., object] | None) -> Any:
    """A decorated function, or the decorator if there is no function yet."""

    def decorate(inner: Callable[..., object]) -> Callable[..., object]:
        return _only_if(lambda: rank() == wanted, inner)

    return decorate if function is None else decorate(function)
