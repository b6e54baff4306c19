"""What grows is named, and tracing ends with the run."""

from __future__ import annotations

import logging
import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from onstep import Callback, pretrain
from onstep.callbacks.peak_memory import TraceMalloc
from onstep.callbacks.profiler_callback import ProfilerCallback
from onstep.config import ConfigContainer
from onstep.errors import ConfigError, MissingExtraError
from tests.support.small_configs import small_pretrain_config


@pytest.fixture(autouse=True)
def untraced() -> Iterator[None]:
    assert not tracemalloc.is_tracing()
    yield
    tracemalloc.stop()


class Leak(Callback):
    """Keeps 200 kB at every step."""

    def __init__(self) -> None:
        self.kept: list[bytes] = []

    def on_step_end(self, context: Any) -> None:
        self.kept.append(bytes(200_000 + len(self.kept)))


@pytest.fixture
def config(corpus: Path, token_cache: Path) -> ConfigContainer:
    """8 steps of a model that allocates little: a report compares all that is allocated."""
    config = small_pretrain_config(corpus, token_cache)
    config.train.train_iters, config.train.global_batch_size, config.train.micro_batch_size = 8, 1, 1
    config.logger.log_interval = 4
    config.validation.eval_interval, config.validation.eval_after_training = None, False
    return config


def reports(config: ConfigContainer, callback: TraceMalloc, caplog: pytest.LogCaptureFixture) -> list[str]:
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="onstep.callbacks.peak_memory"):
        pretrain(config, callbacks=[Leak(), callback])
    return [message for message in caplog.messages if message.startswith("memory at step")]


def test_the_line_that_leaks_is_the_first_that_is_named(
    config: ConfigContainer, caplog: pytest.LogCaptureFixture
) -> None:
    first, second, _ = reports(config, TraceMalloc(top_k=3), caplog)
    assert first.startswith("memory at step 4\n  resident (RSS): ")
    lines = second.splitlines()
    for head, kib in (("  grown since the previous log", 4 * 200_000 / 1024), ("  grown since the start", 8 * 195.3)):
        place = next(number for number, line in enumerate(lines) if line.startswith(head))
        assert "test_trace_malloc.py" in lines[place + 1]
        assert float(lines[place + 1].split()[0]) == pytest.approx(kib, rel=0.02)
        assert sum("blocks" in line for line in lines[place + 1 : place + 5]) == 3
    assert "of them tensors" in lines[-1]


def test_less_can_be_reported(config: ConfigContainer, caplog: pytest.LogCaptureFixture) -> None:
    callback = TraceMalloc(monitor_system_memory=False, comprehensive_mode=False)
    report = reports(config, callback, caplog)[0]
    assert "RSS" not in report
    assert "start of training" not in report
    assert "tensors" not in report


def test_tracing_ends_with_the_run_and_can_begin_again(
    config: ConfigContainer, caplog: pytest.LogCaptureFixture
) -> None:
    callback = TraceMalloc()
    for _ in range(2):
        assert len(reports(config, callback, caplog)) == 3
        assert not tracemalloc.is_tracing()
    callback.on_run_end(None, None, None)  # closed twice


def test_a_trace_that_somebody_else_started_goes_on(config: ConfigContainer, caplog: pytest.LogCaptureFixture) -> None:
    tracemalloc.start()
    assert reports(config, TraceMalloc(), caplog)
    assert tracemalloc.is_tracing()


@pytest.mark.slow
def test_where_a_profiler_records_it_makes_no_report_and_the_next_one_has_the_growth_of_both(
    config: ConfigContainer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    profiler = ProfilerCallback(start_step=3, num_steps=2, output_dir=str(tmp_path / "profiles"), with_stack=False)
    with caplog.at_level(logging.INFO):
        pretrain(config, callbacks=[Leak(), profiler, TraceMalloc(top_k=50)])
    assert "no memory report at step 4: a profiler is recording" in caplog.text
    first = next(message for message in caplog.messages if message.startswith("memory at step"))
    assert first.startswith("memory at step 8")
    (leak,) = [line for line in first.partition("the start of")[0].splitlines() if "test_trace_malloc.py" in line]
    assert float(leak.split()[0]) == pytest.approx(8 * 200_000 / 1024, rel=0.02)


def test_without_psutil_the_message_has_the_install_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psutil", None)
    TraceMalloc(monitor_system_memory=False).on_train_begin(None, None, None)
    with pytest.raises(MissingExtraError, match=r"pip install 'onstep\[diagnostics\]'"):
        TraceMalloc().on_train_begin(None, None, None)


@pytest.mark.parametrize("top_k", [0, "a", 2.5, None])
def test_top_k_must_be_a_positive_whole_number(top_k: Any) -> None:
    with pytest.raises(ConfigError, match=f"top_k must be an integer >= 1, got {top_k!r}"):
        TraceMalloc(top_k=top_k)
