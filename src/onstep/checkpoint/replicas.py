"""Compares a state that all ranks should share, by digests of its values."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from itertools import zip_longest
from typing import Any

from blake3 import blake3
from torch import Tensor

from onstep.checkpoint.components import SharingPattern, StateComponent
from onstep.checkpoint.format.codec import encode_state
from onstep.checkpoint.format.tensor_file import bytes_of
from onstep.config.parallel_sizes import places
from onstep.distributed import World
from onstep.distributed.boxes import box_of
from onstep.distributed.outcomes import together
from onstep.distributed.shards import as_dtensor, held_part
from onstep.errors import CheckpointError

Fingerprints = list[tuple[str, str]]
FIRST_VALUES = 10
"""Number of values per tensor that validation level `quick` compares."""


def check_replicas(world: World, component: StateComponent, state: dict[str, Any] | None, doing: str) -> None:
    """Compare the component's state across all ranks, at its `validation_level`. Collective.

    Levels: `quick` compares the structure and the first values of each tensor, `tensor` all tensors, `full` also all
    other values. The device of a tensor makes no difference. A state of None stands for an optional component whose
    state could not be collected; nothing is compared then.

    Raises:
        CheckpointError: on all ranks, naming the component, the ranks that differ and the first path that differs.
    """
    if not component.validate_replication or component.validation_level == "none" or world.size == 1:
        return
    prints = together(world, lambda: fingerprints(state, component.validation_level), doing)
    if component.sharing_pattern is SharingPattern.SHARDED:
        _check_parts(component.key, world.gather(dict(prints)), doing, world.place)
        return
    overall = None if state is None else blake3(json.dumps(prints).encode()).hexdigest()
    everywhere = world.gather(overall)
    if None in everywhere or len(set(everywhere)) == 1:
        return
    raise CheckpointError(f"{doing} failed: {_difference(component.key, world.gather(prints), world.place)}")


def _check_parts(key: str, everywhere: list[dict[str, str]], doing: str, place: Callable[[int], str]) -> None:
    """Compare what several ranks hold, the same part of a tensor or another value, with the first that holds it."""
    first: dict[str, tuple[int, str]] = {}
    for rank, prints in enumerate(everywhere):
        for path, digest in prints.items():
            other, known = first.setdefault(path, (rank, digest))
            if known != digest:
                raise CheckpointError(
                    f"{doing} failed: component {key!r} differs between {place(other)} and {place(rank)}, which "
                    f"hold the same part of it; first at {key}{path}: {known} on {place(other)}, {digest} on "
                    f"{place(rank)}. Find out why the replicas diverge, or set checkpoint.validate_replication=false."
                )


def fingerprints(state: Any, level: str) -> Fingerprints:
    """Each path of a state with a short digest of its value; equal states have equal fingerprints."""
    return list(_fingerprints(state, "", level))


def _fingerprints(state: Any, path: str, level: str) -> Iterator[tuple[str, str]]:
    if isinstance(state, Tensor):
        box = box_of(state)
        if box is not None:  # None for one of other ranks
            yield path + ("" if as_dtensor(state) is None else str(box)), _of_tensor(held_part(state), level)
    elif isinstance(state, Mapping):
        yield path, f"{type(state).__name__} of {len(state)}"
        for name, item in state.items():
            step = f".{name}" if isinstance(name, str) else f"[{name!r}]"
            yield from _fingerprints(item, path + step, level)
    elif isinstance(state, (list, tuple)):
        yield path, f"{type(state).__name__} of {len(state)}"
        for i, item in enumerate(state):
            yield from _fingerprints(item, f"{path}[{i}]", level)
    else:
        yield path, _of_value(state, level)


def _of_tensor(tensor: Tensor, level: str) -> str:
    values = tensor.detach().reshape(-1)[:FIRST_VALUES] if level == "quick" else tensor
    return f"{tensor.dtype} {tuple(tensor.shape)} {blake3(bytes_of(values)).hexdigest(length=16)}"


def _of_value(value: Any, level: str) -> str:
    kind = type(value).__name__
    if level != "full":
        return kind
    tensors, document = encode_state(value)  # arrays become tensors
    content = [json.dumps(document), *(_of_tensor(tensor, level) for tensor in tensors.values())]
    return f"{kind} {blake3(' '.join(content).encode()).hexdigest(length=16)}"


def _difference(key: str, everywhere: list[Fingerprints], place: Callable[[int], str]) -> str:
    """Describe the first difference from rank 0's state."""
    first = everywhere[0]
    different = [rank for rank, prints in enumerate(everywhere) if prints != first]
    pairs = zip_longest(first, everywhere[different[0]], fillvalue=("", "nothing"))
    here, there = next((here, there) for here, there in pairs if here != there)
    return (
        f"component {key!r} is REPLICATED, but differs between {place(0)} and {places(different, place)}; "
        f"first at {key}{here[0] or there[0]}: {here[1]} on {place(0)}, {there[1]} on {place(different[0])}. Find out "
        f"why the ranks diverge, or use a different sharing pattern for the component."
    )
