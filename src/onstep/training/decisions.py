"""Ranks agree: what any rank asked for becomes one decision at one step on all ranks."""

from __future__ import annotations

import json
import logging
import time

from onstep.events import Request
from onstep.events.control import STICKY
from onstep.training.state import GlobalState

logger = logging.getLogger(__name__)


def agree(state: GlobalState) -> None:
    """Make the control's flags the same on all ranks; over ranks, set wins. Collective.

    Who asked, and why, travels in a second collective, and only when something was asked. What was decided goes to the
    run's `decisions.jsonl`.
    """
    control, world = state.control, state.world
    if world.size == 1:
        _forget_withdrawn_stop(state)
        if control.requests:
            record(state, control.drain())
        return
    is_asked = control.adopt(world.agree(control.vector()))
    _forget_withdrawn_stop(state)
    if is_asked:
        everyone = world.gather([vars(request) for request in control.drain()])
        record(state, [Request(**fields) for fields_of_rank in everyone for fields in fields_of_rank])


def record(state: GlobalState, requests: list[Request]) -> None:
    """Remember who asked for the end of training, and append the requests to the run's `decisions.jsonl`."""
    is_training = state.train_started and not state.train_ended
    for request in requests:
        if request.flag in STICKY and state.stopped_by is None and is_training:
            state.stopped_by = request
    if state.run_folder is None or not state.world.is_main:
        return
    step, now = state.train_state.step, time.time()
    with state.run_folder.decisions.open("a", encoding="utf-8") as file:
        for request in requests:
            file.write(json.dumps({"timestamp": now, "step": step, **vars(request)}) + "\n")


def _forget_withdrawn_stop(state: GlobalState) -> None:
    if state.stopped_by is not None and not any(getattr(state.control, flag) for flag in STICKY):
        state.stopped_by = None
