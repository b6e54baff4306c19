"""Joins the process group of a run: its backends, its store, its time limits, and the gloo group for decisions."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore
from torch.distributed.rendezvous import rendezvous

from onstep.config import DistributedInitConfig
from onstep.config.parallel_sizes import ParallelSizes
from onstep.distributed.meeting import meet
from onstep.errors import ConfigError
from onstep.files.bounded_reading import integer_from_environment

_MARGIN_SECONDS = 5.0
"""How much longer than its limit to wait for torch, which then raises by itself."""

Facts = Callable[[], Mapping[str, str]]
"""Gives what must be the same on all ranks that have it, by name."""


def group_options(backend: str, device: torch.device) -> dict[str, Any]:
    """Keywords of `init_process_group` for a backend.

    NCCL is joined by gloo for tensors on the CPU, which callbacks reduce, too, and bound to the GPU of this rank, so
    that it connects at once and barriers know their device.
    """
    if backend != "nccl":
        return {"backend": backend}
    return {"backend": "cuda:nccl,cpu:gloo", "device_id": device}


def is_timeout(error: BaseException) -> bool:
    """Whether an error of torch says that other ranks did not answer in time."""
    return says_timeout(str(error))


def says_timeout(text: str) -> bool:
    """Whether the text of an error of torch says so."""
    return re.search("timed? ?out", text, re.IGNORECASE) is not None


def join_group(
    config: DistributedInitConfig,
    sizes: ParallelSizes,
    rank: int,
    device: torch.device,
    facts: Facts | None = None,
) -> None:
    """Make the default group with the other ranks. Collective.

    Args:
        config: the configuration of the run.
        sizes: the number of ranks along each axis.
        rank: this rank.
        device: its device.
        facts: see `open_world`.

    Raises:
        ConfigError: for a backend or an environment that cannot work, ranks that do not come, or ranks that differ.
    """
    size, place = sizes.ranks, sizes.place(rank)
    backend = config.distributed_backend or ("nccl" if device.type == "cuda" and size > 1 else "gloo")
    if backend == "nccl" and (device.type != "cuda" or not dist.is_nccl_available()):
        lack = "this build of torch has no NCCL" if device.type == "cuda" else f"this run trains on {device}"
        raise ConfigError(f"dist.distributed_backend=nccl requires GPUs and NCCL, but {lack}; use gloo or null.")
    options: dict[str, Any] = group_options(backend, device) | {"timeout": timeout_of(config)}
    if size == 1:  # no need to open a port for a store without other readers
        dist.init_process_group(store=HashStore(), rank=0, world_size=1, **options)
        return
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK"):
        if not os.environ.get(name):
            raise ConfigError(f"$WORLD_SIZE is {size} but ${name} is not set; start the ranks with torchrun.")
    if not 0 < integer_from_environment("MASTER_PORT", 0) < 2**16:
        raise ConfigError(f"$MASTER_PORT must be from 1 to 65535, got {os.environ['MASTER_PORT']}; use torchrun.")
    own_facts = None if facts is None else facts()
    try:
        store = _joined_store(os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"], rank, size, timeout_of(config))
        attempt = meet(store, rank, size, timeout_of(config), own_facts, sizes.place)
        # without a prefix of its own a group would find the addresses of an earlier one, which nobody listens to
        store = PrefixStore(f"onstep/{attempt}", store)
        dist.init_process_group(store=store, rank=rank, world_size=size, **options)
    except (dist.DistError, RuntimeError) as error:
        if not is_timeout(error):
            raise ConfigError(
                f"{place} cannot join the other ranks of {size} at $MASTER_ADDR={os.environ['MASTER_ADDR']}, "
                f"$MASTER_PORT={os.environ['MASTER_PORT']}: {_reason_of(error)}; pass the address of rank 0's machine "
                f"and a free port, the same to all ranks (torchrun --standalone chooses a free one on one machine)."
            ) from None
        raise ConfigError(
            f"{place} has not met the other ranks of {size} within "
            f"dist.distributed_timeout_minutes={config.distributed_timeout_minutes:g}: {str(error).splitlines()[0]}; "
            f"look whether another rank has ended before it joined, start all with the same $MASTER_ADDR and "
            f"$MASTER_PORT, or allow more time."
        ) from None


@cache
def _joined_store(address: str, port: str, rank: int, size: int, timeout: timedelta) -> Any:
    """The store at this address, kept for the process: a rank that is ahead must not join one that is being closed.

    In a thread, since torch waits without a limit for a program at this address that is not a store.
    """
    found: list[Any] = []

    def join() -> None:
        try:
            found.append(next(rendezvous("env://", rank, size, timeout=timeout))[0])
        except BaseException as error:  # noqa: BLE001 - raised again by the thread that waits
            found.append(error)

    thread = threading.Thread(target=join, name="onstep-join-store", daemon=True)
    thread.start()
    thread.join(timeout.total_seconds() + _MARGIN_SECONDS)
    if not found:
        raise dist.DistNetworkError("what listens there does not answer, and may be another program")
    if isinstance(found[0], BaseException):
        raise found[0]
    return found[0]


def _reason_of(error: BaseException) -> str:
    """The first line of torch's message, without the C++ stack; of an error of the system, what that calls it."""
    line = str(error).splitlines()[0]
    named = re.search(r"message: (.*)", line)
    return (named[1] if named else line).rstrip(".")


def leave_group() -> None:
    """Leave the default group and all others, without waiting for any rank."""
    if dist.is_initialized():
        dist.distributed_c10d._abort_process_group()


def compare_ranks(facts: Facts, timeout: timedelta, sizes: ParallelSizes) -> None:
    """Check that the ranks of the existing group have the same facts. Collective, by its store.

    Args:
        facts: see `open_world`.
        timeout: how long to wait for the others.
        sizes: the number of ranks along each axis.

    Raises:
        ConfigError: on all ranks alike, what differs between them.
    """
    store = dist.distributed_c10d._get_default_store()
    meet(store, dist.get_rank(), dist.get_world_size(), timeout, facts(), sizes.place)


def timeout_of(config: DistributedInitConfig) -> timedelta:
    """The time limit of a collective."""
    return timedelta(minutes=config.distributed_timeout_minutes)


def gloo_group() -> Any:
    """A gloo group of all ranks beside all others, for a thread; None for a single rank. Collective."""
    return None if not dist.is_initialized() or dist.get_world_size() == 1 else dist.new_group(backend="gloo")


def leave_one(group: Any, *, waits: bool) -> None:
    """Leave a group that `gloo_group` made.

    Args:
        group: None for none.
        waits: False after an error: what another thread waits for in it fails.
    """
    if group is not None and dist.is_initialized():
        dist.destroy_process_group(group) if waits else dist.distributed_c10d._abort_process_group(group)


def control_group(timeout: timedelta | None = None) -> Any:
    """A gloo group for decisions, on the CPU; None where the default group is one. Collective."""
    if dist.get_world_size() == 1 or dist.get_backend() == "gloo":
        return None
    return dist.new_group(backend="gloo", timeout=timeout)
