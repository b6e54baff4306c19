"""`trainer.accelerator`: what scripts use of Hugging Face's `Accelerator`, on top of the run's ranks and precision."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar
from weakref import WeakSet

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from onstep.config import DistributedInitConfig
from onstep.distributed import World, keep_world, open_world
from onstep.distributed.buffered import BufferedDataParallel
from onstep.distributed.shards import is_sharded, whole
from onstep.optim import LossScaler, TrainingOptimizer, clip_grad_norm
from onstep.train_state import StateDict
from onstep.trainer.computing.accelerator_answers import AcceleratorAnswers
from onstep.trainer.computing.forward_precision import cast_forward
from onstep.trainer.computing.gathering import gather, gather_rows, pad_to_longest, reduce
from onstep.trainer.computing.gradients import GradientState, ScaledLoss
from onstep.trainer.computing.refused_attributes import ACCELERATOR, CONFIGURE, OTHERWISE
from onstep.training.compute.step import LastStep, Step
from onstep.training.profiling.memory import empty_unused_memory

Given = TypeVar("Given")


class Accelerator(AcceleratorAnswers):
    """The ranks, device and precision of a Trainer under the names of `accelerate.Accelerator`.

    Available before, during and after a run. Methods marked collective must be called on all ranks. Whatever is
    missing raises an AttributeError that names the alternative.

    Args:
        trainer: its arguments say where it will train, until a run has begun.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._opened: World | None = None
        self._prepared: WeakSet[object] = WeakSet()
        self.gradient_state = GradientState(self)

    def __reduce__(self) -> tuple[object, ...]:
        """Know no run in the process that the Trainer is sent to."""
        return type(self), (self._trainer,)

    def __setattr__(self, name: str, value: object) -> None:
        known = getattr(type(self), name, None)
        if isinstance(known, property) and known.fset is None:
            raise AttributeError(f"trainer.accelerator.{name} cannot be set: {CONFIGURE}.")
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        remedy = ACCELERATOR.get(name, OTHERWISE)
        raise AttributeError(f"trainer.accelerator is Onstep's and has no {name!r}; {remedy}.")

    # ---- ranks

    @property
    def state(self) -> Accelerator:
        """Itself, since its attributes are those of `AcceleratorState` too."""
        return self

    @property
    def device(self) -> torch.device:
        """Where this rank trains."""
        world = self._known_world()
        return torch.device(str(self._trainer.args.device)) if world is None else world.device

    @property
    def num_processes(self) -> int:
        """Number of ranks with samples of their own, by which scripts multiply batch sizes."""
        return int(self._trainer.args.world_size)

    @property
    def _num_ranks(self) -> int:
        return int(self._trainer.args.parallel_sizes.ranks)

    @property
    def process_index(self) -> int:
        """This rank."""
        return int(self._trainer.args.process_index)

    @property
    def local_process_index(self) -> int:
        """This rank on its machine."""
        return int(self._trainer.args.local_process_index)

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0."""
        return self.process_index == 0

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is the first rank of its machine."""
        return self.local_process_index == 0

    @property
    def is_last_process(self) -> bool:
        """Whether this is the last rank."""
        return self.process_index == self._num_ranks - 1

    @property
    def use_distributed(self) -> bool:
        """Whether there are several ranks."""
        return self._num_ranks > 1

    @property
    def distributed_type(self) -> str:
        """NO, FSDP, MULTI_CPU or MULTI_GPU: equal to that member of accelerate's `DistributedType`."""
        if not self.use_distributed:
            return "NO"
        if self.is_fsdp2:
            return "FSDP"
        return "MULTI_GPU" if self.device.type == "cuda" else "MULTI_CPU"

    def wait_for_everyone(self) -> None:
        """Wait for all ranks. Collective."""
        self._world().barrier()

    def main_process_first(self) -> AbstractContextManager[None]:
        """Context that rank 0 runs before the others. Collective."""
        first: AbstractContextManager[None] = self._trainer.args.main_process_first(local=False)
        return first

    def local_main_process_first(self) -> AbstractContextManager[None]:
        """Context that the first rank of each machine runs before the others. Collective."""
        first: AbstractContextManager[None] = self._trainer.args.main_process_first(local=True)
        return first

    def on_main_process(self, function: Callable[..., object]) -> Callable[..., object]:
        """Decorate a function that only rank 0 runs; None on the others."""
        return lambda *args, **kwargs: function(*args, **kwargs) if self.is_main_process else None

    def print(self, *args: object, **kwargs: Any) -> None:
        """Print on the first rank of each machine."""
        if self.is_local_main_process:
            print(*args, **kwargs)  # noqa: T201 - what the method is for

    # ---- values of all ranks

    def gather(self, tensor: Given) -> Given:
        """Every rank's tensors, joined along the first axis, on every rank; numbers become a vector. Collective.

        They must have the same shape on all ranks; see `pad_across_processes`. One rank returns its own, unchanged.
        """
        return gather(tensor, self._world())

    def gather_for_metrics(self, input_data: object, use_gather_object: bool = False) -> object:
        """`gather` for the rows of an evaluation: any number on each rank, and none of a filler. Collective.

        Anything but tensors is joined as lists.
        """
        return gather_rows(input_data, self._world(), is_filler=self._is_filler(), as_objects=use_gather_object)

    def reduce(self, tensor: Given, reduction: str = "sum", scale: float = 1.0) -> Given:
        """The sum or mean over all ranks, in new tensors; `scale` has no effect, as in accelerate. Collective."""
        return reduce(tensor, self._world(), reduction)

    def pad_across_processes(self, tensor: Given, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Given:
        """Tensors padded to the longest of all ranks along an axis. Collective."""
        return pad_to_longest(tensor, self._world(), dim=dim, value=pad_index, first=pad_first)

    # ---- objects of a run

    def prepare(self, *objects: object, device_placement: object = None) -> Any:
        """The same objects: the Trainer wraps models and optimizers itself. Loaders are noted: see `is_prepared`."""
        self._prepared.update(one for one in objects if isinstance(one, DataLoader))
        return objects[0] if len(objects) == 1 else objects

    def is_prepared(self, loader: object) -> bool:
        """Whether a loader was passed to `prepare`, so that its batches are to be distributed over the ranks."""
        return loader in self._prepared

    def prepare_model(
        self, model: nn.Module, device_placement: object = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """The model on this rank's device; in an unmodified script, another than the Trainer's gets its precision."""
        trainer = self._trainer
        if trainer.follows_transformers and self.mixed_precision != "no" and model is not trainer.model:
            cast_forward(model, self.autocast)
        return model.to(self.device)

    def prepare_data_loader(self, data_loader: Given, device_placement: object = None) -> Given:
        """`prepare` for one loader."""
        prepared: Given = self.prepare(data_loader)
        return prepared

    def prepare_optimizer(self, optimizer: Given, device_placement: object = None) -> Given:
        """The same optimizer."""
        return optimizer

    def prepare_scheduler(self, scheduler: Given) -> Given:
        """The same scheduler."""
        return scheduler

    def unwrap_model(
        self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> nn.Module:
        """The model without its data-parallel wrapper, and without that of `torch.compile` if asked."""
        compiled = model if isinstance(getattr(model, "_modules", {}).get("_orig_mod"), nn.Module) else None
        inner = model if compiled is None else compiled.get_submodule("_orig_mod")
        if compiled is not None and keep_torch_compile and not isinstance(inner, DistributedDataParallel):
            return compiled
        while isinstance(inner, (DistributedDataParallel, nn.DataParallel, BufferedDataParallel)):
            inner = inner.module
        return inner

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> StateDict:
        """The weights of a model, under the names of the unwrapped module.

        Collective if the model is sharded: rank 0 has the whole tensors, on the CPU, and the others have none.
        """
        inner = self.unwrap_model(model, keep_torch_compile=False) if unwrap else model
        weights: StateDict = inner.state_dict()
        if not is_sharded(inner.parameters()):
            return weights
        found: StateDict = {}
        for name, tensor in weights.items():
            gathered = whole(tensor)
            if self.is_main_process:
                found[name] = gathered.cpu()
        return found

    def free_memory(self, *objects: object) -> list[None]:
        """Collect garbage and release the device's unused memory; returns a None for each object."""
        gc.collect()
        empty_unused_memory()
        return [None] * len(objects)

    clear = free_memory

    def save(self, obj: dict[str, Tensor], f: str | os.PathLike[str], safe_serialization: bool = False) -> None:
        """Write an object on rank 0: with `torch.save`, or a dictionary of tensors as safetensors."""
        if not self.is_main_process:
            return
        if safe_serialization:
            save_file(obj, f)
        else:
            torch.save(obj, f)

    def log(self, values: Mapping[str, object], step: int | None = None, log_kwargs: object = None) -> None:
        """`trainer.log`: add a record to the log and the trackers, at the current step."""
        self._trainer.log(dict(values))

    # ---- a training step

    @property
    def mixed_precision(self) -> str:
        """no, bf16 or fp16."""
        args = self._trainer.args
        return "bf16" if args.bf16 else "fp16" if args.fp16 else args.mixed_precision or "no"

    def autocast(self, autocast_handler: object = None) -> AbstractContextManager[object]:
        """Context of a forward pass in the run's precision."""
        if self.mixed_precision == "no":
            return nullcontext()
        dtype = torch.bfloat16 if self.mixed_precision == "bf16" else torch.float16
        return torch.autocast(self.device.type, dtype=dtype)

    @property
    def scaler(self) -> ScaledLoss | None:
        """float16's loss scale; None in any other precision, and outside of a run."""
        scaler = self._loss_scaler()
        return None if scaler is None else ScaledLoss(scaler)

    def backward(self, loss: Tensor, **kwargs: object) -> None:
        """Run `loss.backward(**kwargs)`, with float16's loss scale."""
        scaler = self._loss_scaler()
        with torch.autocast(loss.device.type, enabled=False):  # the loop computes a whole training_step in autocast
            (loss if scaler is None else loss * scaler.scale).backward(**kwargs)  # type: ignore[no-untyped-call]

    @property
    def sync_gradients(self) -> bool:
        """Whether the current micro-batch is the last of its step, after which the weights are updated."""
        step = self._step()
        return step is None or len(step.micros) >= len(step.batches.micro_batches) - 1

    def accumulate(self, *models: object) -> AbstractContextManager[object]:
        """An empty context: the Trainer accumulates gradients itself."""
        return nullcontext()

    def no_sync(self, model: nn.Module) -> AbstractContextManager[object]:
        """Context in which backward passes do not exchange gradients."""
        return model.no_sync() if isinstance(model, (DistributedDataParallel, BufferedDataParallel)) else nullcontext()

    def clip_grad_norm_(self, parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2) -> Tensor:
        """Clip the global norm of gradients, and return it as it was; float16's loss scale does not count.

        Collective if parameters are sharded.
        """
        scaler, step = self._loss_scaler(), self._step()
        is_scaled = scaler is not None and step is not None and not hasattr(step, "total")
        scale = scaler.scale if scaler is not None and is_scaled else 1.0
        if norm_type == 2:
            return clip_grad_norm(self._named(parameters), max_norm * scale) / scale
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm * scale, norm_type=norm_type) / scale

    def _named(self, parameters: Tensor | Iterable[Tensor]) -> list[tuple[str, Tensor]]:
        """The parameters with their names in the model, for errors."""
        model = self._trainer.model
        names = {} if model is None else {id(one): name for name, one in model.named_parameters()}
        given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        return [(names.get(id(one), f"parameter {place} of those to clip"), one) for place, one in enumerate(given)]

    def clip_grad_value_(self, parameters: Tensor | Iterable[Tensor], clip_value: float) -> None:
        """Clip each value of the gradients."""
        torch.nn.utils.clip_grad_value_(parameters, clip_value)

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether the last update was skipped because float16 gradients overflowed."""
        optimizer = None if self._trainer.session is None else self._trainer.session.optimizer
        return isinstance(optimizer, TrainingOptimizer) and optimizer.overflowed

    def _loss_scaler(self) -> LossScaler | None:
        session = self._trainer.session
        if session is None or session.optimizer is None:
            return None
        scaler: LossScaler | None = session.state.loss_scaler(session.optimizer)
        return scaler

    def _is_filler(self) -> bool:
        """Whether the current micro-batch repeats a sample, so that this rank has one too."""
        session, step = self._trainer.session, self._step()
        if session is None:
            return False
        if not session.model[0].training:
            return bool(session.forward_step.is_filler)
        fillers = [] if step is None else step.batches.is_filler[len(step.micros) :]
        return bool(fillers and fillers[0])

    def _step(self) -> Step | None:
        session = self._trainer.session
        return None if session is None else session.state.features.room(LastStep).step

    def _known_world(self) -> World | None:
        session = self._trainer.session
        state = self._trainer.global_state if session is None else session.state
        world: World | None = None if state is None else state.world
        return self._opened if world is None else world

    def _world(self) -> World:
        """The ranks; joined now if no run has done so."""
        world = self._known_world()
        is_usable = world is not None and (world.size == 1 or dist.is_initialized())
        if world is None or not is_usable:
            if self._num_ranks == 1:
                return World(device=self.device)
            world = self._opened = open_world(
                DistributedInitConfig(device=self.device.type, distributed_backend=self._trainer.args.ddp_backend),
                self._trainer.args.parallel_sizes,
            )
            keep_world(world)
        return world
