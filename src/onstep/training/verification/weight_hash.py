"""Compares replicas bit for bit, by a hash of each parameter or of the shard of it that a rank holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from blake3 import blake3
from torch import nn
from torch.nn import Parameter

from onstep.checkpoint.format.tensor_file import bytes_of
from onstep.config.suggestions import listed
from onstep.distributed import World, shards
from onstep.distributed.boxes import Box, box_of
from onstep.distributed.pipeline.seats import is_staged
from onstep.errors import ReplicaMismatchError
from onstep.training.compute.step import Step
from onstep.training.feature import Feature, is_due
from onstep.training.stages.job import Job

_NOTHING = Box((), ())
"""What this rank holds of a parameter of other ranks only."""


def weight_hashes(model: Sequence[nn.Module]) -> dict[str, bytes]:
    """The hash of each parameter's bytes by name, including frozen ones; tied parameters count once.

    Of a parameter that is sharded over the ranks (a DTensor) the hash is that of this rank's shard. Every byte passes
    through the host.
    """
    return {
        name: blake3(bytes_of(shards.local_part(parameter.detach()))).digest(length=16)
        for name, parameter in _named_once(model)
    }


def check_param_hashes_across_dp_replicas(
    model: Sequence[nn.Module], world: World | None = None, iteration: int | None = None
) -> None:
    """Compare the hashes of all parameters over the ranks that hold replicas of them. Collective: one gather.

    These are the data-parallel ranks for a parameter that each of them holds, and for a shard the ranks that hold the
    same one: those along `dp_replicate`. Of a pipeline, these are the replicas of a stage, and both copies of a tied
    embedding.

    Args:
        model: list of model chunks.
        world: the ranks; None is the default process group.
        iteration: the step, for the message.

    Raises:
        ReplicaMismatchError: on every rank, naming the ranks and parameters that differ from the majority (from the
            lowest rank without a majority).
    """
    world = world or World(rank=shards.rank(), size=shards.world_size())
    is_cut = is_staged(model)
    differing = _differing(world.gather((weight_hashes(model), _shards(model))), is_cut=is_cut)
    if differing:
        listing = "; ".join(f"{world.place(rank)} differs in {listed(names, 3)}" for rank, names in differing.items())
        when = "" if iteration is None else f" after {iteration} iterations"
        raise ReplicaMismatchError(
            f"Parameter hashes not matching across DP replicas{when}: {listing}. A rank modified weights on "
            "its own, or computes incorrectly (check for memory errors); continue from a checkpoint before that."
        )


def _named_once(model: Sequence[nn.Module]) -> Iterator[tuple[str, Parameter]]:
    """The parameters by name; a tied one comes once."""
    seen: set[int] = set()
    for number, chunk in enumerate(model):
        prefix = f"chunk {number}: " if len(model) > 1 and not is_staged(model) else ""
        for name, parameter in chunk.named_parameters():
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield prefix + name.removeprefix("module."), parameter


def _shards(model: Sequence[nn.Module]) -> dict[str, Box]:
    """Which part of each sharded parameter this rank holds."""
    sharded = ((name, one) for name, one in _named_once(model) if shards.as_dtensor(one) is not None)
    return {name: box_of(parameter) or _NOTHING for name, parameter in sharded}


def _differing(by_rank: list[tuple[dict[str, bytes], dict[str, Box]]], *, is_cut: bool) -> dict[int, list[str]]:
    """The parameters by rank that differ from those of most ranks that hold the same part.

    Args:
        by_rank: the hashes and parts of each rank.
        is_cut: whether ranks hold stages of a model, so that some lack a parameter.
    """
    differing: dict[int, list[str]] = {}
    for name in dict.fromkeys(name for hashes, _ in by_rank for name in hashes):
        replicas: dict[Box | None, list[tuple[int, bytes | None]]] = {}
        for rank, (hashes, boxes) in enumerate(by_rank):
            if is_cut and name not in hashes:
                continue
            replicas.setdefault(boxes.get(name), []).append((rank, hashes.get(name)))
        for found in replicas.values():
            # equal counts are in order of first appearance, so the lowest rank wins
            right = Counter(digest for _, digest in found).most_common(1)[0][0]
            for rank, digest in found:
                if digest != right:
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
