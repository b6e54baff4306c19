"""Joins sites by a process group of torch, and does the collectives of their rounds over it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, BroadcastOptions, PrefixStore
from torch.distributed import ProcessGroup
from torch.distributed.rendezvous import rendezvous

from onstep.diloco.outer import OuterFactory, nesterov_sgd
from onstep.distributed.meeting import meet
from onstep.distributed.process_group import group_options
from onstep.errors import ConfigError, OnstepError, require, text_of
from onstep.files.bounded_reading import integer_from_environment


class SiteLostError(OnstepError, ConnectionError):
    """Another site has ended, or did not come in time: the round is in no site's model."""


@dataclass
class Sites:
    """The sites of a run without a server, and what is the same at all of them.

    Args:
        group: a process group (of torch, or a configured one of torchft) for tensors on the CPU with one rank of each
            site, or where to meet the other sites: a URL of `torch.distributed`, such as
            `tcp://host:port?rank=0&world_size=3`. Of a site with several ranks, rank 0 is in it.
        outer_optimizer_factory: makes the outer optimizer of a list of parameters, once for each fragment.
        overlap_steps: steps between a submission and the merge of its result; None merges it as it arrives, at the
            latest at the next submission, or waits for it if there is one fragment.
    """

    group: ProcessGroup | str
    outer_optimizer_factory: OuterFactory = nesterov_sgd
    overlap_steps: int | None = None

    def join(self, timeout: float) -> Meeting:
        """Meet the other sites; on rank 0 of each.

        Args:
            timeout: seconds to wait for them, now and in each round.

        Raises:
            ConfigError: for a URL that says nothing.
            SiteLostError: if they do not come.
        """
        if isinstance(self.group, str):
            return Meeting(_joined(self.group, timeout), is_own=True)
        return Meeting(self.group)


_stores: dict[str, Any] = {}
"""The last of each URL, which others may still need when this site has left: the store ends with its last reference."""


def _joined(url: str, timeout: float) -> ProcessGroup:
    limit = timedelta(seconds=timeout)
    try:
        store, rank, size = next(rendezvous(url, timeout=limit))
        _stores[url] = store
        try:  # an earlier group of these processes has left its addresses in the store
            attempt = meet(PrefixStore("onstep/sites", store), rank, size, limit, place="site {}".format)
        except ConfigError as error:
            raise RuntimeError(text_of(error).partition(";")[0]) from None
        return _gloo(store, f"onstep/sites/{attempt}", rank, size, limit)
    except (ValueError, KeyError) as error:
        raise ConfigError(
            f"group must be a process group, or a URL such as tcp://host:port?rank=0&world_size=3, got {url[:200]!r} "
            f"({text_of(error)})"
        ) from None
    except (dist.DistError, RuntimeError) as error:
        raise SiteLostError(
            f"the other sites were not met at {url} within {timeout:g} s: {_first_line(error)}; start all of them with "
            f"the address of the site of rank 0, which its firewall has to let in."
        ) from error


def _gloo(store: Any, name: str, rank: int, size: int, limit: timedelta) -> ProcessGroup:
    return dist.ProcessGroupGloo(PrefixStore(name, store), rank, size, limit)  # type: ignore[return-value]


def divide_into_sites(num_sites: int, timeout: float = 1800.0) -> ProcessGroup:
    """Divide the ranks that `torchrun` started into sites of equal size, neighbors together; before anything else.

    The default process group is then that of this site's ranks alone, so that everything that knows ranks, such as the
    division of samples, gradients and checkpoints, stays within the site.

    Args:
        num_sites: of which the number of ranks must be a multiple.
        timeout: seconds that a collective waits for other ranks.

    Returns:
        The group of the ranks that have this rank's number at their sites, for `DiLoCoCallback` and `DiLoCoWorker`;
        its `rank()` is the number of this site.

    Raises:
        ConfigError: if there is a process group, or another number of ranks.
    """
    require(num_sites >= 1, "num_sites", ">= 1", num_sites)
    size, rank = integer_from_environment("WORLD_SIZE", 1), integer_from_environment("RANK", 0)
    if dist.is_initialized():
        raise ConfigError("divide_into_sites must come before the process group; call it first in the program.")
    require(size % num_sites == 0, "num_sites", f"a divisor of the {size} ranks that were started", num_sites)
    limit, ranks = timedelta(seconds=timeout), size // num_sites
    site, place = divmod(rank, ranks)
    store, _, _ = next(rendezvous("env://", rank, size, timeout=limit))
    on_cuda = torch.cuda.is_available() and dist.is_nccl_available()
    device = torch.device("cuda", integer_from_environment("LOCAL_RANK", 0)) if on_cuda else torch.device("cpu")
    own = PrefixStore(f"onstep/site/{site}", store)
    options = group_options("nccl" if on_cuda else "gloo", device)
    dist.init_process_group(store=own, rank=place, world_size=ranks, timeout=limit, **options)
    return _gloo(store, f"onstep/sites/{place}", site, num_sites, limit)


class Meeting:
    """Collectives between the sites. Each must be reached by rank 0 of every site, in the same order.

    Args:
        group: of the sites.
        is_own: whether nobody else has the group.
    """

    def __init__(self, group: ProcessGroup, *, is_own: bool = False) -> None:
        self._group: ProcessGroup | None = group
        self._is_own = is_own
        self.site, self.size = group.rank(), group.size()

    def close(self) -> None:
        """Let go of a group that nobody else has, and leave another to its owner."""
        if self._is_own:
            self._group = None

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """The tensors of all sites, of the same shape and dtype."""
        found = [torch.empty_like(tensor) for _ in range(self.size)]
        self._run(lambda group: group.allgather([found], [tensor], AllgatherOptions()))
        return found

    def gather_json(self, value: Any) -> list[Any]:
        """The values of all sites, which JSON can express."""
        text = json.dumps(value).encode()
        lengths = [int(one) for one in self.gather(torch.tensor([len(text)]))]
        padded = torch.zeros(max(lengths), dtype=torch.uint8)
        padded[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        rows = zip(self.gather(padded), lengths, strict=True)
        return [json.loads(bytes(row[:length].numpy())) for row, length in rows]

    def share(self, tensor: Tensor) -> None:
        """Overwrite a tensor with that of site 0."""
        self._run(lambda group: group.broadcast([tensor], BroadcastOptions()))

    def _run(self, start: Callable[[ProcessGroup], Any]) -> None:
        group = self._group
        if group is None:
            raise SiteLostError(f"site {self.site} of {self.size} has left the others; start a new worker.")
        if group.size() != self.size:  # of a group whose members change, as torchft's managed one
            raise SiteLostError(
                f"the group has {group.size()} sites now where it had {self.size}, but a run without a server "
                f"has the same ones from beginning to end; start all of them again."
            )
        try:
            start(group).wait()
        except (dist.DistError, RuntimeError) as error:
            raise SiteLostError(
                f"site {self.site} of {self.size} waits for the others in vain, so this round is in no site's model: "
                f"{_first_line(error)}; look for the site whose output ends first, and start all of them again, which "
                f"continue from their checkpoints."
            ) from error


def _first_line(error: BaseException) -> str:
    return text_of(error).splitlines()[0].rstrip(".")
