"""Loading components from a checkpoint that was verified."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from onstep.checkpoint.component_io import read_state
from onstep.checkpoint.components import SharingPattern, StateComponent
from onstep.checkpoint.discovery import CheckpointInfo
from onstep.checkpoint.placement import ComponentFiles, Placement
from onstep.checkpoint.saving import check_keys
from onstep.distributed import World
from onstep.distributed.rank_errors import attempt, raise_together
from onstep.errors import CheckpointError


@dataclass
class LoadReport:
    """What a load left as it was, on this rank."""

    missing: list[str] = field(default_factory=list)
    """Optional components that the checkpoint does not have."""
    unexpected: list[str] = field(default_factory=list)
    """Components of the checkpoint that nobody asked for."""
    other_ranks: bool = False
    """The checkpoint is of another layout, and some component has no file for this rank: it was not loaded."""


def load_components(
    world: World,
    placement: Placement,
    info: CheckpointInfo,
    components: Sequence[StateComponent],
    skip: Collection[str] = (),
) -> LoadReport:
    """Load each component, in order, from the files that are this rank's by the pattern it was saved with. Collective.

    Raises:
        CheckpointError: on all ranks, for a required component that is missing and for any that fails to load.
        ConfigError: on all ranks, for two components of one key and a group that this run does not have.
    """
    wanted = [component for component in components if component.key not in skip]
    _, error = attempt(lambda: check_keys(wanted))
    raise_together(world, error, f"Loading {info.path}")
    stored = info.manifest.components
    report = LoadReport(unexpected=[key for key in stored if key not in {*skip, *(one.key for one in components)}])
    for component in wanted:
        doing = f"Loading {component.key!r} of {info.path}"
        state, error = attempt(partial(_read, placement, info, component, report))
        raise_together(world, error, doing)
        _, error = attempt(partial(_take_over, component, state))
        raise_together(world, error, doing)
    return report


def _read(placement: Placement, info: CheckpointInfo, component: StateComponent, report: LoadReport) -> Any:
    """The state for this rank; None, noted in the report, if there is none."""
    entry = info.manifest.components.get(component.key)
    if entry is None:
        if component.required:
            raise CheckpointError(
                f"it is required and the checkpoint has only {', '.join(info.manifest.components) or 'nothing'}; "
                f"resume from another checkpoint."
            )
        report.missing.append(component.key)
        return None
    pattern = SharingPattern(entry.sharing_pattern)
    files = placement.files(component, pattern)
    if files.document in entry.files:
        return read_state(info.path, files, entry.files)
    _check_can_do_without(component, pattern, files)
    report.other_ranks = True
    return None


def _check_can_do_without(component: StateComponent, pattern: SharingPattern, files: ComponentFiles) -> None:
    """Another number of ranks leaves some without a file of their own; a group has no such excuse."""
    if component.required and pattern is not SharingPattern.PER_RANK:
        raise CheckpointError(
            f"it is required and {files.document} is not in the checkpoint; resume with the groups and machines that "
            f"it was saved with."
        )


def _take_over(component: StateComponent, state: Any) -> None:
    if state is not None:
        component.stateful.load_state_dict(state)
