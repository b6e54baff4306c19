"""Starts the ranks of a benchmark on this machine."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any

import torch
from torch.multiprocessing.spawn import spawn


def start_ranks(work: Callable[..., None], ranks: int, *arguments: Any) -> None:
    """Call `work(*arguments)` in so many new processes of one thread, with the environment that `torchrun` sets.

    Args:
        work: a function of a module.
        ranks: the number of processes.
    """
    os.environ["OMP_NUM_THREADS"] = "1"
    with socket.socket() as held:  # until rank 0 listens there, nobody else gets the port
        held.bind(("127.0.0.1", 0))
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        spawn(_start, (work, ranks, held.getsockname()[1], arguments), nprocs=ranks)  # type: ignore[no-untyped-call]


def _start(rank: int, work: Callable[..., None], ranks: int, port: int, arguments: tuple[Any, ...]) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    work(*arguments)
