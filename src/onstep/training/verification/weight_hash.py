"""Compares the replicas' weights bit for bit, by a hash of each parameter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from blake3 import blake3
from torch import nn

from onstep.checkpoint.format.tensor_file import bytes_of
from onstep.config.suggestions import listed
from onstep.distributed import World, shards
from onstep.errors import ReplicaMismatchError
from onstep.training.compute.step import Step
from onstep.training.feature import Feature, is_due
from onstep.training.stages.job import Job


def weight_hashes(model: Sequence[nn.Module]) -> dict[str, bytes]:
    """The hash of each parameter's bytes by name, including frozen ones; tied parameters count once.

    A parameter that is sharded over the ranks (a DTensor) has no replica here and is skipped. Every byte passes through
    the host.
    """
    seen: set[int] = set()
    hashes: dict[str, bytes] = {}
    for number, chunk in enumerate(model):
        prefix = f"chunk {number}: " if len(model) > 1 else ""
        for name, parameter in chunk.named_parameters():
            if id(parameter) in seen or shards.as_dtensor(parameter) is not None:
                continue
            seen.add(id(parameter))
            hashes[prefix + name.removeprefix("module.")] = blake3(bytes_of(parameter)).digest(length=16)
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
        ReplicaMismatchError: on every rank, naming the ranks and parameters that differ from the majority (from rank 0
            without a majority).
    """
    world = world or World(rank=shards.rank(), size=shards.world_size())
    differing = _differing(world.gather(weight_hashes(model)))
    if differing:
        listing = "; ".join(f"rank {rank} differs in {listed(names, 3)}" for rank, names in differing.items())
        when = "" if iteration is None else f" after {iteration} iterations"
        raise ReplicaMismatchError(
            f"Parameter hashes not matching across DP replicas{when}: {listing}. A rank modified weights on "
            "its own, or computes incorrectly (check for memory errors); continue from a checkpoint before that."
        )


def _differing(by_rank: list[dict[str, bytes]]) -> dict[int, list[str]]:
    """The parameters by rank that differ from those of most ranks."""
    differing: dict[int, list[str]] = {}
    for name in dict.fromkeys(name for hashes in by_rank for name in hashes):
        found = [hashes.get(name) for hashes in by_rank]
        # equal counts are in order of first appearance, so rank 0 wins
        right = Counter(found).most_common(1)[0][0]
        for rank, one in enumerate(found):
            if one != right:
                differing.setdefault(rank, []).append(name)
    return dict(sorted(differing.items()))


class WeightHashes(Feature[Job]):
    """Compares the weights of all replicas, before the first step and at a configured interval."""

    name = "weight_hashes"
    when = "train.check_weight_hash_across_dp_replicas_interval"
    collective = True

    def begin(self) -> None:
        self._compare()

    def after_iteration(self, step: Step) -> None:
        if is_due(step.number, self.host.run.cfg.train.check_weight_hash_across_dp_replicas_interval):
            self._compare()

    def _compare(self) -> None:
        run = self.host.run
        with run.features.pause("compare"):
            check_weight_hashes(self.host.model, run.train_state.step, run.world)


def check_weight_hashes(model: Sequence[nn.Module], iteration: int, world: World | None = None) -> None:
    """Compare all weights over the data-parallel ranks, and print on rank 0 that they match. Collective.

    Raises:
        ReplicaMismatchError: see `check_param_hashes_across_dp_replicas`.
    """
    check_param_hashes_across_dp_replicas(model, world, iteration)
    if (shards.rank() if world is None else world.rank) == 0:
        print(f">>> Weight hashes match after {iteration} iterations...", flush=True)  # noqa: T201 - Bridge's line
