"""The rules of values about hanging and dying ranks that only mean something together."""

from __future__ import annotations

from onstep.config.parts import ConfigContainer
from onstep.errors import ConfigError


def check_watching(config: ConfigContainer, world_size: int) -> None:
    """Refuse combinations about the watchdog and simulated faults that cannot work.

    Raises:
        ConfigError: naming the value, the rule and the remedy.
    """
    _check_watchdog(config)
    _check_sections(config)
    _check_fault(config, world_size)


def _check_watchdog(config: ConfigContainer) -> None:
    seconds = config.ft.watchdog_seconds
    if seconds is not None and seconds < 1:
        raise ConfigError(
            f"ft.watchdog_seconds={seconds} must be at least 1: ranks look at each other a few times in it; choose "
            "more than the longest single operation takes, or null to watch nothing."
        )


def _check_sections(config: ConfigContainer) -> None:
    ft = config.ft
    names = [name for name in ("calc_ft_timeouts", "enable_ft_package") if getattr(ft, name)]
    if names and config.run.name is None and config.checkpoint.save is None:
        raise ConfigError(
            f"ft.{names[0]}=True keeps ft_state.json beside the checkpoints, and this run has no folder for them; set "
            "run.name or checkpoint.save."
        )
    if ft.calc_ft_timeouts and not ft.enable_ft_package and ft.watchdog_seconds is None:
        raise ConfigError(
            "ft.calc_ft_timeouts=True learns the limits of a watchdog, and ft.watchdog_seconds=null watches nothing; "
            "set ft.watchdog_seconds, which holds until limits are learned."
        )


def _check_fault(config: ConfigContainer, world_size: int) -> None:
    ft = config.ft
    rank = ft.simulated_fault_rank
    if rank is not None and not 0 <= rank < world_size:
        raise ConfigError(
            f"ft.simulated_fault_rank={rank} must be one of the ranks 0 to {world_size - 1}; leave it null to draw one."
        )
