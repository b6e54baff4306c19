"""Tests the conditions that keys declare: those under which they have an effect."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import partial
from typing import Any

from onstep.config.checks.data import parse_split
from onstep.config.container import ConfigContainer
from onstep.config.keys import KEYS, Key
from onstep.config.sections.logger import A_TRACKER, BRIDGE_TAGS, TO_TRACKER
from onstep.config.sections.profiling import WITHIN_THE_RUN
from onstep.config.sections.run import IN_A_STORE
from onstep.config.sections.training import VALIDATION_SHARE
from onstep.config.trackers import ALL, BRIDGE_FIELDS, TRACKERS, name_list, tracker_list

_ALTERNATIVE = re.compile(r"(mixed_precision|[a-z_]+\.\w+)? ?(=|>=|>|other than)? ?(.*)")
_WORDS: dict[Any, str] = {True: "true", False: "false", None: "null"}


def holds(condition: str, config: ConfigContainer) -> bool:
    """Whether a configuration meets a condition that a key declares.

    A condition has one or more alternatives, joined by "or": `key` (it is not at its default), `key=value`,
    `key > number`, `key >= number`, `key other than value`. An alternative without a key is about the key before it.
    What ends with ": " and what begins with "; " is for the reader. A few conditions are functions.
    """
    if condition in _FUNCTIONS:
        return _FUNCTIONS[condition](config)
    alternatives, key = condition.partition("; ")[0].rpartition(": ")[2].split(" or "), ""
    for alternative in alternatives:
        match = _ALTERNATIVE.fullmatch(alternative)
        assert match is not None
        key = match[1] or key
        if _is_met(KEYS[key], config, match[2] or "", match[3]):
            return True
    return False


def _is_met(key: Key, config: ConfigContainer, sign: str, wanted: str) -> bool:
    value = key.get(config)
    if not sign and not wanted:
        return bool(value != key.default)
    if sign in (">", ">="):
        return value is not None and (value > float(wanted) or (sign == ">=" and value == float(wanted)))
    return (_as_text(value) == wanted) is not (sign == "other than")


def _as_text(value: Any) -> str:
    return _WORDS[value] if value is None or isinstance(value, bool) else str(value)


def _trackers(config: ConfigContainer) -> set[str]:
    """The configured trackers, by `report_to` or by a field that enables one."""
    named = tracker_list(config.logger.report_to, "logger.report_to")
    by_field = (name for name, field in BRIDGE_FIELDS.items() if getattr(config.logger, field) is not None)
    return {*(TRACKERS if named == [ALL] else named), *by_field}


def _reports_to(tracker: str, config: ConfigContainer) -> bool:
    return tracker in _trackers(config)


def _shows_bridge_tags(config: ConfigContainer) -> bool:
    """Whether a configured tracker shows Megatron Bridge's tags."""
    logger = config.logger
    chosen = name_list(logger.report_names)
    if chosen is not None:
        return "bridge" in chosen and bool(_trackers(config))
    return any(getattr(logger, field) is not None for field in BRIDGE_FIELDS.values())


_FUNCTIONS: dict[str, Callable[[ConfigContainer], bool]] = {
    A_TRACKER: lambda config: bool(_trackers(config)),
    BRIDGE_TAGS: _shows_bridge_tags,
    VALIDATION_SHARE: lambda config: parse_split(config.dataset.split)[1] > 0,
    IN_A_STORE: lambda config: config.run.is_in_store,
    WITHIN_THE_RUN: lambda config: config.profiling.profile_step_start < (config.train.train_iters or math.inf),
    **{need: partial(_reports_to, tracker) for tracker, need in TO_TRACKER.items()},
}
