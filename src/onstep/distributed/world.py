"""Joins the ranks of a run, picks each one's device, and lets ranks agree on decisions, values and errors.

A world of one follows the same path as a world of many: it has a process group too (callbacks may call
`torch.distributed.get_rank()`), and communication is skipped in this package, nowhere else.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from onstep.config import DistributedInitConfig
from onstep.distributed.process_group import control_group, is_timeout, join_group, timeout_of
from onstep.errors import CheckpointError, CollectiveAfterErrorError, ConfigError
from onstep.files.bounded_reading import integer_from_environment


@dataclass
class World:
    """The process group of a run. Methods marked collective must be reached by every rank."""

    rank: int = 0
    """This rank, from 0."""
    size: int = 1
    """The number of ranks."""
    local_rank: int = 0
    """This rank among those of its machine."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    """The device of this rank."""
    owns_group: bool = False
    """Whether `close` destroys the process group; a group made by the caller is kept."""
    control_group: Any = None
    """A gloo group for decisions, on the CPU; None means the default group."""
    timeout_minutes: float | None = None
    """`dist.distributed_timeout_minutes` of the group that `open_world` made; None for a group of the caller."""
    is_assumed: bool = False
    """Nobody has chosen this world: it is of one rank because there was no process group."""

    _hooks: tuple[Any, Any] | None = field(default=None, init=False, repr=False, compare=False)
    """`sys.excepthook` before torch replaced it for this group, and torch's, which puts the rank before each line."""
    _error_at_start: int = field(default_factory=lambda: id(_current_error()), init=False, repr=False, compare=False)
    """The identity of an error that was already being handled, such as that of a run which this one repeats."""
    _error: str | None = field(default=None, init=False, repr=False, compare=False)
    """The name of the error after which no collective may start."""

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    @contextmanager
    def error_scope(self) -> Iterator[None]:
        """Context for everything that happens because of an error; afterwards collectives are allowed as before."""
        before = self._error
        try:
            yield
        finally:
            self._error = before

    @contextmanager
    def no_collectives_after_an_error(self) -> Iterator[None]:
        """After an exception other than SystemExit has left this context, collectives of this world raise.

        The other ranks might not have seen the error and be elsewhere: waiting for them would hang, or pair one rank's
        request with an unrelated one. Entering the context again (the next `train()`) allows collectives again. A world
        of one waits for nothing and is never blocked.
        """
        self._error = None
        try:
            yield
        except SystemExit:
            raise
        except BaseException as error:
            self._error = type(error).__name__
            raise
        self._error = None  # of a nested run, whose error was handled

    def agree(self, votes: list[int]) -> list[int]:
        """The elementwise maximum of all ranks' votes. Collective, on the CPU.

        Args:
            votes: flags of this rank; each is set on all ranks if it is set on one.
        """
        if not self._communicates("agree"):
            return votes
        tensor = torch.tensor(votes, dtype=torch.int64)
        self._run("agree", lambda: dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.control_group))
        return [int(vote) for vote in tensor.numpy()]

    def gather(self, item: Any) -> list[Any]:
        """Every rank's item, in rank order, on every rank. Collective; for small Python objects.

        Args:
            item: a picklable object of this rank.
        """
        if not self._communicates("gather"):
            return [item]
        items: list[Any] = [None] * self.size
        self._run("gather", lambda: dist.all_gather_object(items, item, group=self.control_group))
        return items

    def gather_numbers(self, numbers: list[float]) -> list[list[float]]:
        """Every rank's numbers, in rank order, on every rank; all must pass equally many. Collective, on the CPU.

        Args:
            numbers: as many numbers on each rank.
        """
        if not self._communicates("gather_numbers"):
            return [numbers]
        mine = torch.tensor(numbers, dtype=torch.float64)
        rows = [torch.empty_like(mine) for _ in range(self.size)]
        self._run("gather_numbers", lambda: dist.all_gather(rows, mine, group=self.control_group))
        return [row.tolist() for row in rows]

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks, in place. Collective, on the tensor's device.

        Args:
            tensor: a tensor of the same shape on each rank.
        """
        if self._communicates("sum"):
            self._run("sum", lambda: dist.all_reduce(tensor, op=dist.ReduceOp.SUM))
        return tensor

    def max(self, tensor: Tensor) -> Tensor:
        """The maximum over all ranks, in place. Collective, on the tensor's device.

        Args:
            tensor: a tensor of the same shape on each rank.
        """
        if self._communicates("max"):
            self._run("max", lambda: dist.all_reduce(tensor, op=dist.ReduceOp.MAX))
        return tensor

    def share(self, item: Any, source: int = 0) -> Any:
        """The item of rank `source`, on every rank. Collective; for small Python objects.

        Args:
            item: the object on the rank that has it.
        """
        if not self._communicates("share"):
            return item
        items = [item]
        self._run("share", lambda: dist.broadcast_object_list(items, src=source, group=self.control_group))
        return items[0]

    def barrier(self) -> None:
        """Wait for all ranks. Collective."""
        if self._communicates("barrier"):
            self._run("barrier", lambda: dist.barrier(group=self.control_group))

    def _communicates(self, collective: str) -> bool:
        """Whether there are other ranks; raises if one of them might not have seen this rank's error."""
        if self.size > 1 and self._error is not None:
            raise CollectiveAfterErrorError(
                f"World.{collective} was called on rank {self.rank} of {self.size} after {self._error}; no rank starts "
                "a collective after an error, because other ranks might not have seen it: call it earlier, and not in "
                "code that runs because of the error (on_exception, on_train_end, on_run_end)"
            )
        return self.size > 1

    def _run(self, collective: str, work: Callable[[], object]) -> None:
        """Do a collective; the error of one that took too long names the limit, and who waited where."""
        try:
            work()
        except RuntimeError as error:
            if is_timeout(error):
                limit = "" if self.timeout_minutes is None else f"={self.timeout_minutes:g}"
                error.add_note(
                    f"rank {self.rank} of {self.size} waited in World.{collective} for longer than "
                    f"dist.distributed_timeout_minutes{limit} (ddp_timeout of TrainingArguments); look for the rank "
                    f"whose output ends first, or allow more time."
                )
            raise

    def close(self) -> None:
        """Leave the process group if `open_world` made it; not collective, so also right after an exception.

        After an exception, also one that ended the script, communicators are aborted: destroying those of NCCL waits
        for what the other ranks no longer do, before Python prints the traceback.
        """
        if self.owns_group and dist.is_initialized():
            if self.size > 1:  # a data-parallel wrapper in a cycle would keep gloo's threads alive past their group
                gc.collect()
            if self._is_failing():
                self.abandon()
            else:
                dist.destroy_process_group()
        self.owns_group = False
        if self._hooks is not None and sys.excepthook is self._hooks[1] and sys.exc_info()[1] is None:
            sys.excepthook = self._hooks[0]  # after an error it stays: the traceback is to name its rank
            self._hooks = None

    def _is_failing(self) -> bool:
        """Whether an error since the group was opened is being handled, or has ended the script.

        All ranks leave together by `sys.exit`.
        """
        error = _current_error()
        return error is not None and not isinstance(error, SystemExit) and id(error) != self._error_at_start

    def abandon(self) -> None:
        """Leave the process group and all others without waiting for any rank."""
        if dist.is_initialized():
            dist.distributed_c10d._abort_process_group()

    def _keep_excepthook(self, before: Any) -> None:
        """Let torch's hook name the rank if there are several; once, if an earlier group's is still there."""
        if self.size == 1 or getattr(before, "__module__", "") == dist.distributed_c10d.__name__:
            sys.excepthook = before
        else:
            self._hooks = before, sys.excepthook


def open_world(config: DistributedInitConfig) -> World:
    """Join the process group that `torchrun`'s environment describes, or create one for a single process.

    An existing process group is used as is, and not destroyed by `World.close`.

    Args:
        config: the configuration of the run.

    Raises:
        ConfigError: for a device that this machine does not have, or an invalid environment.
    """
    size, rank = integer_from_environment("WORLD_SIZE", 1), integer_from_environment("RANK", 0)
    local_rank = integer_from_environment("LOCAL_RANK", 0)
    if dist.is_initialized():
        rank, size = dist.get_rank(), dist.get_world_size()
    if not 0 <= rank < size:
        raise ConfigError(
            f"$RANK must be at least 0 and below $WORLD_SIZE, got rank {rank} of {size}; start the ranks with torchrun."
        )
    device = _device(config.device, local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    owns_group, hook = not dist.is_initialized(), sys.excepthook
    if owns_group:
        join_group(config, size, rank, device)
    world = World(rank, size, local_rank, device, owns_group, control_group(timeout_of(config)))
    if owns_group:
        world.timeout_minutes = config.distributed_timeout_minutes
        world._keep_excepthook(hook)
    return world


def existing_world() -> World:
    """The ranks of the existing process group; one rank without a group. Collective with a backend other than gloo."""
    if not (dist.is_available() and dist.is_initialized()):
        return World(is_assumed=True)
    if dist.get_world_size() == 1:
        return World()
    on_cuda = dist.get_backend() != "gloo" and torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if on_cuda else torch.device("cpu")
    local_rank = integer_from_environment("LOCAL_RANK", 0)
    return World(dist.get_rank(), dist.get_world_size(), local_rank, device, control_group=control_group())


def world_size_from_environment() -> int:
    """The number of ranks that `torchrun` started; 1 without it."""
    return dist.get_world_size() if dist.is_initialized() else integer_from_environment("WORLD_SIZE", 1)


def _device(wanted: str | None, local_rank: int) -> torch.device:
    if wanted is None:
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(wanted)
    if device.type != "cuda":
        return device
    if not torch.cuda.is_available():
        raise ConfigError(f"dist.device={wanted} requires a CUDA GPU, but torch sees none; use dist.device=cpu.")
    index = local_rank if device.index is None else device.index
    if index >= torch.cuda.device_count():
        raise ConfigError(
            f"dist.device={wanted} of local rank {local_rank} is GPU {index}, but torch sees "
            f"{torch.cuda.device_count()}; start fewer ranks on this machine, or use dist.device=cpu."
        )
    return torch.device("cuda", index)


def _current_error() -> BaseException | None:
    """The error that is being handled, or that has ended the script."""
    return sys.exc_info()[1] or getattr(sys, "last_value", None)


T = TypeVar("T")


def attempt(work: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """The result of the work, or the error it raised: for work whose outcome must be known to all ranks.

    Args:
        work: what is called, without arguments.
    """
    try:
        return work(), None
    except Exception as error:  # noqa: BLE001 - the caller raises it on every rank with `raise_together`
        return None, error


def raise_together(world: World, error: Exception | None, doing: str) -> None:
    """Raise on all ranks if there is an error on any rank. Collective.

    Args:
        world: the ranks of the run.
        error: the error of this rank; None if it has none.
        doing: what was done, for the errors of the other ranks.

    Raises:
        CheckpointError: naming each rank that failed and why; on a failed rank, with the error as its cause.
        ConfigError: likewise, if the first failed rank raised one.
    """
    notes = world.gather(None if error is None else (isinstance(error, ConfigError), _described(error)))
    failed = [(rank, note) for rank, note in enumerate(notes) if note is not None]
    if not failed:
        return
    kind = ConfigError if failed[0][1][0] else CheckpointError
    texts = [(rank, text.rstrip(".")) for rank, (_, text) in failed]
    causes = "; ".join(f"rank {rank}: {text}" if world.size > 1 else text for rank, text in texts)
    raise kind(f"{doing} failed: {causes}.") from error


def together(world: World, work: Callable[[], T], doing: str) -> T:
    """This rank's result of the work, once it has succeeded on all ranks; else as `raise_together`. Collective."""
    result, error = attempt(work)
    raise_together(world, error, doing)
    return cast(T, result)


def on_main(world: World, work: Callable[[], T]) -> T:
    """What the work gives on rank 0, on all ranks; its error is raised on all of them. Collective.

    Args:
        world: the ranks of the run.
        work: what rank 0 calls, without arguments.
    """
    result, error = attempt(work) if world.is_main else (None, None)
    result, error = world.share((result, error))
    if error is not None:
        raise error
    return cast(T, result)


def _described(error: Exception) -> str:
    kind = "" if isinstance(error, (CheckpointError, ConfigError)) else f"{type(error).__name__}: "
    notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
    return f"{kind}{error}{notes}"
