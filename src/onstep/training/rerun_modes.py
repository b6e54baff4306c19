"""What a rerun state machine does, where it stands, and how the process ends by it; the names are Megatron-Core's."""

from __future__ import annotations

from enum import Enum, StrEnum

EXIT_CODE_RESUME_TO_DISAMBIGUATE = 16
"""Start the same command again, on another device: it computes the step once more."""
EXIT_CODE_FAILED_ON_RESULT_VALIDATION = 17
"""A result was wrong, and where the fault lies is known as far as it can be."""


class RerunMode(StrEnum):
    """What the machine does."""

    DISABLED = "disabled"
    """Nothing is rerun: a rejected result raises at once, if fatal, and is warned of otherwise."""
    VALIDATE_RESULTS = "validate_results"
    """A step with a rejected result is rerun."""
    REPORT_DETERMINISM_STATS = "report_determinism_stats"
    """Every step runs twice, and the differences are counted."""


class RerunState(Enum):
    """Where the machine stands."""

    NOT_RUNNING_YET = "not_running_yet"
    INITIAL_RUN = "initial_run"
    RERUNNING_IN_PLACE = "rerunning_in_place"
    """Also after it, where the second result was another one."""
    WILL_RERUN_FROM_CHECKPOINT = "will_rerun_from_checkpoint"
    RERUNNING_FROM_CHECKPOINT = "rerunning_from_checkpoint"
    """After a restart on another device."""
    RERUNNING_AGAIN_FROM_CHECKPOINT = "rerunning_again_from_checkpoint"
    """After a restart on the same device, which cannot tell anything new."""
