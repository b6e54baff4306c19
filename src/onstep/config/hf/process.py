"""Gives `TrainingArguments` the properties of its process: rank, device, log level, and who goes first."""

from __future__ import annotations

import functools
import importlib
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from enum import Enum
from typing import TYPE_CHECKING, Any

from onstep.config.hf.accelerate_state import partial_state
from onstep.config.hf.argument import LOG_LEVELS
from onstep.config.hf.sharding import parallel_section, written_names
from onstep.config.parallel_sizes import ParallelSizes
from onstep.errors import ConfigError
from onstep.files.bounded_reading import integer_from_environment

logger: logging.Logger = logging.getLogger(__name__)


class ParallelMode(Enum):
    """Hugging Face's names of how a run is spread; Onstep's are NOT_PARALLEL and DISTRIBUTED."""

    NOT_PARALLEL = "not_parallel"
    NOT_DISTRIBUTED = "not_distributed"
    DISTRIBUTED = "distributed"
    SAGEMAKER_MODEL_PARALLEL = "sagemaker_model_parallel"
    SAGEMAKER_DATA_PARALLEL = "sagemaker_data_parallel"
    TPU = "tpu"


REFUSED_ATTRIBUTES = {
    "distributed_state": "it is an object of accelerate, which is not installed: pip install accelerate",
    "hf_deepspeed_config": "there is no DeepSpeed",
    "xla_fsdp_config": "there is no XLA",
}
"""Attributes of Hugging Face's arguments that these do not have, and the reason or the remedy."""


class ProcessArguments:
    """The properties of Hugging Face's `TrainingArguments` that tell processes apart."""

    if TYPE_CHECKING:
        per_device_train_batch_size: int
        per_device_eval_batch_size: int
        use_cpu: bool
        fsdp: Any
        fsdp_config: Any
        ddp_timeout: int
        log_on_each_node: bool
        save_on_each_node: bool
        log_level: str
        log_level_replica: str

    else:  # not for type checkers, to which every name would be an attribute

        def __getattr__(self, name: str) -> Any:
            if name in REFUSED_ATTRIBUTES:
                raise AttributeError(f"TrainingArguments has no {name}: {REFUSED_ATTRIBUTES[name]}.")
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    framework = "pt"
    default_optim = "adamw_torch_fused"
    """The default of `optim`."""

    @property
    def fsdp_plugin_args(self) -> dict[str, Any] | None:
        """`fsdp_config` for accelerate's plugin; None if the model is not sharded."""
        return {"fsdp_version": 2, **self.fsdp_config} if self.fsdp else None

    @property
    def distributed_state(self) -> Any:
        """accelerate's `PartialState`, which has the ranks and the device of these arguments. Imports accelerate."""
        try:
            return partial_state(self, imports=True)
        except ModuleNotFoundError as error:
            raise AttributeError(str(error)) from error

    @property
    def deepspeed_plugin(self) -> None:
        """None: there is no DeepSpeed."""
        return None

    @deepspeed_plugin.setter
    def deepspeed_plugin(self, plugin: object) -> None:
        if plugin is not None:
            raise ConfigError(
                f"TrainingArguments.deepspeed_plugin={type(plugin).__name__} is not supported: there is no DeepSpeed; "
                f"start data parallelism with torchrun, without it."
            )

    @property
    def _no_sync_in_gradient_accumulation(self) -> bool:
        return True

    @property
    def train_batch_size(self) -> int:
        """Samples of one forward pass on this rank."""
        return self.per_device_train_batch_size

    @property
    def eval_batch_size(self) -> int:
        """Samples of one evaluation batch on this rank."""
        return self.per_device_eval_batch_size

    @property
    def parallel_sizes(self) -> ParallelSizes:
        """How many of the run's processes work together along each axis.

        The processes are those of its process group, or else of `WORLD_SIZE`.
        """
        group = _process_group()
        number = integer_from_environment("WORLD_SIZE", 1) if group is None else int(group.get_world_size())
        section = parallel_section(self)
        return ParallelSizes(dp_replicate=number) if section is None else section.sizes(number, written_names(self))

    @property
    def world_size(self) -> int:
        """Processes of the run with samples of their own: all, unless some divide the model among them."""
        return self.parallel_sizes.data

    @property
    def data_index(self) -> int:
        """The number of this process among the `world_size` with samples of their own; shared by those without."""
        return self.parallel_sizes.data_rank(self.process_index)

    @property
    def process_index(self) -> int:
        """Rank of this process, in its process group or else from `RANK`."""
        group = _process_group()
        return integer_from_environment("RANK", 0) if group is None else int(group.get_rank())

    @property
    def local_process_index(self) -> int:
        """Rank of this process on its machine (`LOCAL_RANK`)."""
        return integer_from_environment("LOCAL_RANK", 0)

    @property
    def device(self) -> Any:
        """Where this rank trains: `torch.device("cpu")`, or the GPU of its local rank. Imports torch."""
        torch: Any = importlib.import_module("torch")
        if self.use_cpu or not torch.cuda.is_available():
            return torch.device("cpu")
        return torch.device("cuda", self.local_process_index)

    _setup_devices = device

    @property
    def n_gpu(self) -> int:
        """GPUs of this process: 0 or 1."""
        return 0 if self.device.type == "cpu" else 1

    @property
    def _n_gpu(self) -> int:
        return self.n_gpu

    @_n_gpu.setter
    def _n_gpu(self, number: int) -> None:
        if number > 1:
            raise ConfigError(
                f"TrainingArguments._n_gpu={number} must be 0 or 1: a process trains on one GPU; for more, start the "
                f"script with torchrun --nproc-per-node {number}."
            )

    @property
    def parallel_mode(self) -> ParallelMode:
        """DISTRIBUTED with more than one process, else NOT_PARALLEL."""
        return ParallelMode.DISTRIBUTED if self.parallel_sizes.ranks > 1 else ParallelMode.NOT_PARALLEL

    @property
    def place_model_on_device(self) -> bool | None:
        """Whether the Trainer moves the model to `device`: not if a subclass overrides it with False."""
        return None

    @property
    def ddp_timeout_delta(self) -> timedelta:
        """`ddp_timeout` as `torch.distributed` expects it."""
        return timedelta(seconds=self.ddp_timeout)

    @property
    def should_log(self) -> bool:
        """Whether this process reports: the first of each machine, or of all with `log_on_each_node=False`."""
        return (self.local_process_index if self.log_on_each_node else self.process_index) == 0

    @property
    def should_save(self) -> bool:
        """Whether this process writes the weights: the first of all, or of each machine with `save_on_each_node`."""
        return (self.local_process_index if self.save_on_each_node else self.process_index) == 0

    def get_process_log_level(self) -> int:
        """The level of `logging` that `log_level`, or on other ranks `log_level_replica`, names.

        'passive' is the level of the logger "transformers" where one is set, else that of Onstep's.
        """
        level = LOG_LEVELS[self.log_level if self.should_log else self.log_level_replica]
        if level is not None:
            return level
        return logging.getLogger("transformers").level or logging.getLogger("onstep").getEffectiveLevel()

    @contextmanager
    def main_process_first(self, local: bool = True, desc: str = "work") -> Iterator[None]:
        """Run the block on the main process first; the other ranks wait until it has left the block. Collective.

        Args:
            local: the main process is the first of each machine; False: the first of all.
            desc: what the block does, for the log.
        """
        if self.parallel_sizes.ranks == 1:
            yield
            return
        is_main = (self.local_process_index if local else self.process_index) == 0
        if not is_main:
            logger.debug("rank %d waits for %s on the main process", self.process_index, desc)
            self._meet(is_main, local)
        try:
            yield
        finally:
            if is_main:
                self._meet(is_main, local)

    def _meet(self, is_main: bool, local: bool) -> None:
        """Wait for the main process, or release those that wait."""
        group = _process_group()
        if group is not None:
            group.barrier()
            return
        # before the run there is no process group, and one made here would decide the run's backend and device
        store = _store(self.ddp_timeout)
        node = os.environ.get("GROUP_RANK", "0") if local else "all"
        number = store.add(f"main_process_first/{node}/rank{self.process_index}", 1)
        key = f"main_process_first/{node}/{number}"
        if is_main:
            store.set(key, "done")
        else:
            store.wait([key], self.ddp_timeout_delta)


def _process_group() -> Any:
    """`torch.distributed` if it has a process group; torch is not imported for that."""
    distributed: Any = sys.modules.get("torch.distributed")
    is_open = distributed is not None and distributed.is_available() and distributed.is_initialized()
    return distributed if is_open else None


@functools.cache
def _store(timeout_seconds: int) -> Any:
    """The store of torchrun's rendezvous, kept open: the process of rank 0 may be its server. Collective."""
    distributed: Any = importlib.import_module("torch.distributed")
    store, _, _ = next(iter(distributed.rendezvous("env://", timeout=timedelta(seconds=timeout_seconds))))
    return distributed.PrefixStore("onstep", store)
