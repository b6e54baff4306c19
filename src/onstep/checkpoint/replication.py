"""Whether ranks that should hold the same state do."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import zip_longest
from typing import Any

from blake3 import blake3
from torch import Tensor

from onstep.checkpoint.codec import encode_state
from onstep.checkpoint.components import StateComponent
from onstep.checkpoint.tensor_file import bytes_of
from onstep.distributed import World
from onstep.distributed.rank_errors import attempt, raise_together
from onstep.errors import CheckpointError

FIRST_VALUES = 10
"""Values of each tensor that the level `quick` compares."""


def check_replicas(world: World, component: StateComponent, state: dict[str, Any] | None, doing: str) -> None:
    """Compare the component's state across all ranks, as thoroughly as its `validation_level` says. Collective.

    Levels: `quick` compares the structure and the first values of each tensor, `tensor` all tensors, `full` every
    other value too. On which device a tensor lies makes no difference. None stands for the state of an optional
    component that could not be had; then nothing is compared.

    Raises:
        CheckpointError: on all ranks, naming the component, the ranks that differ and the first path where they do.
    """
    if not component.validate_replication or component.validation_level == "none" or world.size == 1:
        return
    prints, error = attempt(lambda: fingerprints(state, component.validation_level))
    raise_together(world, error, doing)
    overall = None if state is None else blake3(json.dumps(prints).encode()).hexdigest()
    everywhere = world.gather(overall)
    if None in everywhere or len(set(everywhere)) == 1:
        return
    raise CheckpointError(f"{doing} failed: {_difference(component.key, world.gather(prints))}")


Fingerprints = list[tuple[str, str]]


def fingerprints(state: Any, level: str) -> Fingerprints:
    """Each path of a state with a short text of what is there; equal states give equal ones."""
    return list(_fingerprints(state, "", level))


def _fingerprints(state: Any, path: str, level: str) -> Iterator[tuple[str, str]]:
    if isinstance(state, Tensor):
        yield path, _of_tensor(state, level)
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


def _difference(key: str, everywhere: list[Fingerprints]) -> str:
    """What differs, judged by rank 0's state."""
    first = everywhere[0]
    different = [rank for rank, prints in enumerate(everywhere) if prints != first]
    pairs = zip_longest(first, everywhere[different[0]], fillvalue=("", "nothing"))
    here, there = next((here, there) for here, there in pairs if here != there)
    ranks = "ranks " if len(different) > 1 else "rank "
    return (
        f"component {key!r} is REPLICATED, but not the same on rank 0 and on {ranks}{', '.join(map(str, different))}; "
        f"first at {key}{here[0] or there[0]}: {here[1]} on rank 0, {there[1]} on rank {different[0]}. Find out "
        f"why the ranks diverge, or give the component another sharing pattern."
    )
