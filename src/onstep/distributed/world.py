"""The ranks of a run: what they agree on, which of them have different samples, and the axes along which they lie.

A world of one follows the same path as a world of many: it has a process group too (callbacks may call
`torch.distributed.get_rank()`), and communication is skipped in this package, nowhere else.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from onstep.config.parallel_sizes import ParallelSizes
from onstep.distributed.data_ranks import DataRanks
from onstep.distributed.main_only import MainOnlySection, Postponed
from onstep.distributed.mesh import AXES, EXPERT_AXES, RankGroups, check_sizes
from onstep.distributed.packed_flags import pack, unpack
from onstep.distributed.process_group import is_timeout, leave_group
from onstep.distributed.timeouts import TimeLimit
from onstep.errors import CollectiveAfterErrorError, RanksApartError


@dataclass
class World:
    """The process group of a run. Methods marked collective must be reached by every rank.

    A rank is a process here: what locks, writes, measures or agrees asks `rank`, `size` and `is_main`. What counts
    samples asks `data`, what divides a model asks `mesh`.
    """

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
    sizes: ParallelSizes = field(default_factory=ParallelSizes)
    """The number of ranks along each axis of `mesh`; by default every rank is a replica with samples of its own."""

    data: DataRanks = field(init=False, repr=False, compare=False)
    """The ranks with different samples."""

    _hooks: tuple[Any, Any] | None = field(default=None, init=False, repr=False, compare=False)
    """`sys.excepthook` before torch replaced it for this group, and torch's, which puts the rank before each line."""
    _error_at_start: int = field(default_factory=lambda: id(_current_error()), init=False, repr=False, compare=False)
    """The identity of an error that was already being handled, such as that of a run which this one repeats."""
    _error: str | None = field(default=None, init=False, repr=False, compare=False)
    """The name of the error after which no collective may start."""
    _postponed: Postponed = field(default_factory=Postponed, init=False, repr=False, compare=False)
    """The error of a section of one rank, which all ranks raise at the next agreement."""
    _limit: TimeLimit = field(default_factory=TimeLimit, init=False, repr=False, compare=False)
    """The time limit of collectives, while it is another than at first."""
    _groups: RankGroups = field(init=False, repr=False, compare=False)
    """The process groups along the axes of `mesh`."""

    def __post_init__(self) -> None:
        if self.sizes == ParallelSizes():
            self.sizes = ParallelSizes(dp_replicate=self.size)
        check_sizes(self.sizes, self.size)
        timeout = None if self.timeout_minutes is None else timedelta(minutes=self.timeout_minutes)
        self._groups = RankGroups(self.sizes, self.rank, self.device, timeout)
        self.data = DataRanks(
            self.sizes,
            self.rank,
            reduce=self.reduce,
            gather=self.gather,
            gather_numbers=self.gather_numbers,
            group=self.group,
        )

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh of all ranks, with the axes pp, dp_replicate, dp_shard, cp and tp. Collective the first time."""
        return self._groups.mesh(AXES)

    @property
    def expert_mesh(self) -> DeviceMesh:
        """The ranks as the experts of a layer see them: pp, expt_dp, ep, expt_tp. Collective the first time."""
        return self._groups.mesh(EXPERT_AXES)

    def part_of_mesh(self, *axes: str) -> DeviceMesh:
        """The mesh of the ranks that differ from this one on these axes only. Collective the first time.

        Args:
            axes: of `mesh`.
        """
        return self._groups.part_of_mesh(axes)

    def tensor_blocks(self, blocks: int) -> DeviceMesh:
        """The tensor-parallel ranks in blocks of neighbors: blocks, and the ranks in one. Collective the first time.

        Args:
            blocks: their number, which divides that of the ranks.
        """
        return self._groups.tensor_blocks(blocks)

    def beside_tensors(self, mesh: DeviceMesh, *axes: str) -> DeviceMesh:
        """A mesh of tensor-parallel ranks, with other axes as its last dimensions. Collective the first time.

        Args:
            mesh: `part_of_mesh("tp")`, or one of `tensor_blocks`.
            axes: of `mesh`.
        """
        return self._groups.beside_tensors(mesh, axes)

    def group(self, *axes: str) -> ProcessGroup:
        """The process group of the ranks that differ from this one on these axes only. Collective the first time.

        Args:
            axes: of `mesh`, or of `expert_mesh`; none for this rank alone.
        """
        return self._groups.over(axes)

    def parts(self, *axes: str) -> list[tuple[int, ...]]:
        """All ranks, divided into those that differ on these axes only, each ascending, without communication.

        Args:
            axes: of `mesh`, or of `expert_mesh`; none for ranks alone.
        """
        return self._groups.parts(axes)

    def part(self, *axes: str) -> tuple[int, ...]:
        """The ranks that differ from this one on these axes only, this one among them, without communication.

        Args:
            axes: of `mesh`, or of `expert_mesh`.
        """
        return next(part for part in self.parts(*axes) if self.rank in part)

    def group_beside(self, axis: str) -> ProcessGroup:
        """Another process group than `group(axis)` of the same ranks. Collective the first time.

        Gloo begins the collectives of a group in their order, so a small one would wait for all large ones before it.

        Args:
            axis: of `mesh`.
        """
        group = self._groups.own_of(self._groups.parts((axis,)), f"{axis} beside", is_apart=True)
        assert group is not None
        return group

    def group_among(self, parts: list[tuple[int, ...]], name: str) -> ProcessGroup | None:
        """The process group of that part of the ranks which has this one; None if none has. Collective, once.

        Args:
            parts: disjoint, each ascending, the same on all ranks.
            name: a description, for torch's messages.
        """
        return self._groups.own_of(parts, name)

    def place(self, rank: int | None = None) -> str:
        """A rank and its coordinates on axes of several ranks, such as `rank 5, tp 1, dp_replicate 2`.

        Args:
            rank: None for this rank. With data parallelism as the only axis, its number says it all.
        """
        return self.sizes.place(self.rank if rank is None else rank)

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def main_only(self, what: str | None = None, remedy: str | None = None) -> AbstractContextManager[None]:
        """Context for what one rank does alone: a collective raises in it at once, where it would wait for the others.

        Args:
            what: what is done, for the message; None for the callback that is being called.
            remedy: what to do instead of the collective; None for what a callback can do.

        Raises:
            MainOnlyError: at a collective, also one inside `full_tensor()` or the forward of a DDP or FSDP2 model.
        """
        return nullcontext() if self.size == 1 else MainOnlySection(self.place(), self.size, what, remedy)

    @contextmanager
    def postponing(self) -> Iterator[None]:
        """Context at whose end, at the latest, all ranks raise what one of them has postponed. Collective.

        Raises:
            MainOnlyError: on all ranks.
        """
        with self._postponed.accepting():
            yield
            self.agree([])

    def postpone(self, error: BaseException) -> bool:
        """Whether all ranks will raise this error together, at the next agreement.

        Args:
            error: what a callback raised that one rank alone called; only an error of `main_only` is postponed.
        """
        return self._error is None and self._postponed.take(error)

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
        """The flags that are set on any rank, as 0 and 1. Collective, on the CPU.

        Args:
            votes: flags of this rank; each is set on all ranks if it is set on one.

        Raises:
            MainOnlyError: on all ranks, if one of them has postponed it.
            RanksApartError: if another rank is at another collective, or agrees on another number of flags.
        """
        if not self._communicates("agree"):
            return [int(bool(vote)) for vote in votes]
        own = [self._postponed.error is not None, *votes, True]  # the last one is set on every rank
        numbers = torch.tensor(pack(own, self.size))
        self._run("agree", lambda: dist.all_reduce(numbers, group=self.control_group))
        *counts, present = unpack(numbers.tolist(), len(own), self.size)
        if present != self.size:
            raise RanksApartError(
                f"{self.place()} of {self.size} agrees on {len(votes)} flags, and another rank is at another "
                f"collective; look for code that calls one on some ranks only."
            )
        fails, *agreed = (int(count > 0) for count in counts)
        if fails:
            self._postponed.raise_together(self.gather)
        return agreed

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
        return self.reduce(tensor, dist.ReduceOp.SUM, "sum")

    def max(self, tensor: Tensor) -> Tensor:
        """The maximum over all ranks, in place. Collective, on the tensor's device.

        Args:
            tensor: a tensor of the same shape on each rank.
        """
        return self.reduce(tensor, dist.ReduceOp.MAX, "max")

    def reduce(
        self,
        tensor: Tensor,
        operation: dist.ReduceOp.RedOpType,
        name: str = "reduce",
        group: ProcessGroup | None = None,
    ) -> Tensor:
        """What `operation` makes of the tensors of the ranks of a group, in place. Collective, on the tensor's device.

        Args:
            tensor: a tensor of the same shape on each rank.
            operation: such as `torch.distributed.ReduceOp.SUM`.
            name: what errors call it.
            group: None for all ranks.
        """
        if self._communicates(name):
            self._run(name, lambda: dist.all_reduce(tensor, op=operation, group=group))
        return tensor

    def broadcast(
        self, tensor: Tensor, source: int, name: str = "broadcast", group: ProcessGroup | None = None
    ) -> Tensor:
        """The tensor of one rank of a group, in place. Collective, on the tensor's device.

        Args:
            tensor: a tensor of the same shape on each rank.
            source: the rank, among all ranks, that has it.
            name: what errors call it.
            group: None for all ranks.
        """
        if self._communicates(name):
            self._run(name, lambda: dist.broadcast(tensor, source, group=group))
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

    def limit(self, seconds: float) -> None:
        """Set the time limit of collectives over any of the ranks, from now until `unlimit`; not collective.

        Args:
            seconds: how long a collective waits for other ranks.
        """
        if self.size > 1 and dist.is_initialized():
            groups = [dist.group.WORLD, self.control_group, *self._groups.made]
            self._limit.set((one for one in groups if isinstance(one, ProcessGroup)), seconds)

    def unlimit(self) -> None:
        """Give collectives the time limits that they had before `limit`; not collective."""
        if self._limit.seconds is not None and dist.is_initialized():
            self._limit.restore()

    def _communicates(self, collective: str) -> bool:
        """Whether there are other ranks; raises if one of them might not have seen this rank's error."""
        if self.size > 1 and self._error is not None:
            raise CollectiveAfterErrorError(
                f"World.{collective} was called on {self.place()} of {self.size} after {self._error}; no rank starts "
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
                minutes, seconds = self.timeout_minutes, self._limit.seconds
                limit = f"dist.distributed_timeout_minutes{'' if minutes is None else f'={minutes:g}'}"
                if seconds is not None:
                    limit = f"dist.timeout_after_first_step={seconds:g}"
                error.add_note(
                    f"{self.place()} of {self.size} waited in World.{collective} for longer than {limit} "
                    f"(ddp_timeout of TrainingArguments); look for the rank whose output ends first, or allow more "
                    f"time."
                )
            raise

    def close(self) -> None:
        """Leave the process group if `open_world` made it; not collective, so also right after an exception.

        After an exception, also one that ended the script, communicators are aborted: destroying those of NCCL waits
        for what the other ranks no longer do, before Python prints the traceback.
        """
        if dist.is_initialized():
            if self.owns_group and self.size > 1:
                gc.collect()  # a data-parallel wrapper in a cycle would keep gloo's threads alive past their group
            self._groups.close(waits=not self._is_failing())
            if self.owns_group and self._is_failing():
                self.abandon()
            elif self.owns_group:
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
        leave_group()

    def keep_excepthook(self, before: Any) -> None:
        """Let torch's hook name the rank if there are several; once, if an earlier group's is still there."""
        if self.size == 1 or getattr(before, "__module__", "") == dist.distributed_c10d.__name__:
            sys.excepthook = before
        else:
            self._hooks = before, sys.excepthook


def _current_error() -> BaseException | None:
    """The error that is being handled, or that has ended the script."""
    return sys.exc_info()[1] or getattr(sys, "last_value", None)
