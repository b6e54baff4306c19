"""What timers and the detection of slow ranks are refused for."""

from __future__ import annotations

import pytest

from onstep.config import apply_overrides, validate
from onstep.errors import ConfigError
from onstep.recipes import tiny_gpt_pretrain_config


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["logger.timing_log_level=3"], r"logger.timing_log_level=3 must be -1 \(nothing\), 0 .*, 1 .* or 2"),
        (["logger.timing_log_level=-2"], r"timing_log_level=-2 must be -1"),
        (["straggler.threshold=1.5"], r"straggler.threshold=1.5 must be above 0 and below 1.*such as 0.7"),
        (["straggler.threshold=0"], r"straggler.threshold=0(.0)? must be above 0"),
        (["nvrx_straggler.gpu_relative_perf_threshold=2"], r"gpu_relative_perf_threshold=2(.0)? must be above 0 and"),
        (["straggler.straggler_ctrlr_port=70000"], r"straggler_ctrlr_port=70000 must be from 1 to 65535"),
        (
            [
                "nvrx_straggler.enabled=true",
                "nvrx_straggler.calc_relative_gpu_perf=false",
                "nvrx_straggler.calc_individual_gpu_perf=false",
            ],
            r"nothing to compare; set nvrx_straggler.calc_relative_gpu_perf",
        ),
    ],
)
def test_a_value_that_cannot_work_is_refused_with_what_to_choose(words: list[str], message: str) -> None:
    config = tiny_gpt_pretrain_config()
    apply_overrides(config, words)
    with pytest.raises(ConfigError, match=message):
        validate(config)


@pytest.mark.parametrize("level", [-1, 0, 1, 2])
def test_every_level_is_accepted(level: int) -> None:
    config = tiny_gpt_pretrain_config()
    config.logger.timing_log_level = level
    validate(config)
