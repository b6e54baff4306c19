"""Taking the states of a save: asked of every component on every rank, encoded where they are written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from onstep.checkpoint.codec import encode_state
from onstep.checkpoint.component_io import EncodedState
from onstep.checkpoint.components import StateComponent
from onstep.checkpoint.placement import Placement
from onstep.checkpoint.rank_errors import attempt
from onstep.checkpoint.saving import check_keys
from onstep.checkpoint.tensor_header import ordered_names


@dataclass
class TakenStates:
    """The states of one moment, on one rank; their tensors are still those that training changes."""

    states: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By key, also of what other ranks write."""
    encoded: list[EncodedState] = field(default_factory=list)
    """What this rank writes."""
    left_out: dict[str, str] = field(default_factory=dict)
    """Optional components that failed here, and why."""

    @property
    def size_bytes(self) -> int:
        """Bytes of the tensors that this rank writes."""
        return sum(state.size_bytes for state in self.encoded)


def take_states(components: Sequence[StateComponent], placement: Placement) -> TakenStates:
    """Ask each component for its state, on every rank, since some gather it from all; encode what this rank writes.

    Raises:
        ConfigError: for two components of one key and a group that this run does not have.
        Exception: what a required component fails with, UnsupportedStateError included.
    """
    check_keys(components)
    taken = TakenStates()
    for component in components:
        placement.files(component)  # an unknown group is no failure of the component
        _, error = attempt(partial(_take, taken, component, placement))
        if error is None:
            continue
        if component.required:
            error.add_note(f"while the state of component {component.key!r} was taken")
            raise error
        taken.states.pop(component.key, None)
        taken.left_out[component.key] = f"{type(error).__name__}: {error}"
    return taken


def _take(taken: TakenStates, component: StateComponent, placement: Placement) -> None:
    state = component.stateful.state_dict()
    taken.states[component.key] = state
    if placement.writes(component):
        tensors, document = encode_state(state, component.key)
        in_file_order = {name: tensors[name] for name in ordered_names(tensors)}
        taken.encoded.append(EncodedState(component, placement.files(component), in_file_order, document))
