"""Are the replicas' weights the same, bit for bit? Compared by a hash of each parameter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from blake3 import blake3
from torch import Tensor, nn

from onstep.distributed import World
from onstep.distributed.shards import as_dtensor
from onstep.errors import ReplicaMismatchError

_DIGEST_BYTES = 16


def weight_hashes(model: Sequence[nn.Module]) -> dict[str, bytes]:
    """The hash of each parameter's bytes by name: frozen ones too, tied ones once.

    A parameter that is split over the ranks (a DTensor) has no replica here and is left out. Every byte goes through
    the host.
    """
    seen: set[int] = set()
    hashes: dict[str, bytes] = {}
    for number, chunk in enumerate(model):
        prefix = f"chunk {number}: " if len(model) > 1 else ""
        for name, parameter in chunk.named_parameters():
            if id(parameter) in seen or as_dtensor(parameter) is not None:
                continue
            seen.add(id(parameter))
            hashes[prefix + name.removeprefix("module.")] = _hash(parameter)
    return hashes


def check_param_hashes_across_dp_replicas(
    model: Sequence[nn.Module], world: World | None = None, iteration: int | None = None
) -> None:
    """Compare the hashes of all parameters over the data-parallel ranks. Collective: one gather.

    Args:
        model: list of model chunks.
        world: the ranks; None is the default process group.
        iteration: the step, for the message.

    Raises:
        ReplicaMismatchError: on every rank, naming the ranks and parameters that differ from what most ranks have (from
            rank 0 where there is no majority).
    """
    mine = weight_hashes(model)
    by_rank: list[dict[str, bytes]] = (world or _default_world()).gather(mine)
    differing = _differing(by_rank)
    if differing:
        when = "" if iteration is None else f" after {iteration} iterations"
        raise ReplicaMismatchError(
            f"Parameter hashes not matching across DP replicas{when}: {_told(differing)}. A rank changed weights on "
            "its own, or computes wrongly (look at its memory errors); continue from a checkpoint of before it."
        )


def _differing(by_rank: list[dict[str, bytes]]) -> dict[int, list[str]]:
    """The parameters by rank that are not as on most ranks."""
    names = list(dict.fromkeys(name for hashes in by_rank for name in hashes))
    differing: dict[int, list[str]] = {}
    for name in names:
        found = [hashes.get(name) for hashes in by_rank]
        if len(set(found)) == 1:
            continue
        # equal counts are in order of first appearance, so rank 0 wins
        right = Counter(found).most_common(1)[0][0]
        for rank, one in enumerate(found):
            if one != right:
                differing.setdefault(rank, []).append(name)
    return dict(sorted(differing.items()))


def _told(differing: dict[int, list[str]], shown: int = 3) -> str:
    parts = []
    for rank, names in differing.items():
        more = f" and {len(names) - shown} more" if len(names) > shown else ""
        parts.append(f"rank {rank} differs in {', '.join(names[:shown])}{more}")
    return "; ".join(parts)


def _hash(tensor: Tensor) -> bytes:
    raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return blake3(raw.numpy().data).digest(length=_DIGEST_BYTES)


def _default_world() -> World:
    dist = torch.distributed
    if not (dist.is_available() and dist.is_initialized()):
        return World()
    return World(rank=dist.get_rank(), size=dist.get_world_size())
