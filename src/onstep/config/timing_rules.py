"""The rules of timers and of the detection of slow ranks."""

from __future__ import annotations

from onstep.config.parts import ConfigContainer
from onstep.errors import ConfigError


def check_timing(config: ConfigContainer) -> None:
    """Check what says which parts are timed and which rank is slow.

    Raises:
        ConfigError: naming the key, the value, the rule and what to choose.
    """
    level = config.logger.timing_log_level
    if not -1 <= level <= 2:
        raise ConfigError(
            f"logger.timing_log_level={level} must be -1 (nothing), 0 (set-up, saves, evaluations), 1 (also the parts "
            "of a step) or 2 (also its micro-batches)."
        )
    shares = {
        "straggler.threshold": config.straggler.threshold,
        "nvrx_straggler.gpu_relative_perf_threshold": config.nvrx_straggler.gpu_relative_perf_threshold,
        "nvrx_straggler.gpu_individual_perf_threshold": config.nvrx_straggler.gpu_individual_perf_threshold,
    }
    for key, share in shares.items():
        if not 0 < share < 1:
            raise ConfigError(f"{key}={share} must be above 0 and below 1: the share of a healthy speed; such as 0.7.")
    port = config.straggler.straggler_ctrlr_port
    if port > 65535:
        raise ConfigError(f"straggler.straggler_ctrlr_port={port} must be at most 65535; choose a free port.")
    nvrx = config.nvrx_straggler
    if nvrx.enabled and not (nvrx.calc_relative_gpu_perf or nvrx.calc_individual_gpu_perf):
        raise ConfigError(
            "nvrx_straggler.enabled=True has nothing to compare; set nvrx_straggler.calc_relative_gpu_perf or "
            "nvrx_straggler.calc_individual_gpu_perf to true."
        )
