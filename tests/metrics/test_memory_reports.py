"""What is reported of memory: the allocator's statistics, their largest over stages, and the estimate."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from onstep.config import ConfigContainer, ModelConfig, ProfilingConfig
from onstep.metrics import (
    MEMORY_KEYS,
    estimate_training_memory,
    format_training_memory_estimate,
    reduce_max_memory_across_pp_group,
    report_memory,
    report_theoretical_memory,
    start_memory_history_recording,
)
from onstep.metrics.memory_reports import save_memory_snapshot
from onstep.models import build_transformer

DOCUMENTED = {
    "allocated_bytes.all.current": "mem-allocated-gigabytes",
    "active_bytes.all.current": "mem-active-gigabytes",
    "inactive_split_bytes.all.current": "mem-inactive-gigabytes",
    "reserved_bytes.all.current": "mem-reserved-gigabytes",
    "allocated_bytes.all.peak": "mem-max-allocated-gigabytes",
    "active_bytes.all.peak": "mem-max-active-gigabytes",
    "inactive_split_bytes.all.peak": "mem-max-inactive-gigabytes",
    "reserved_bytes.all.peak": "mem-max-reserved-gigabytes",
    "num_alloc_retries": "mem-alloc-retires",
    "allocation.all.current": "mem-allocated-count",
}


@pytest.fixture
def statistics(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """What CUDA's allocator would tell."""
    found = {key: 1_234_567_890 * (place + 1) for place, key in enumerate(DOCUMENTED)}
    found |= {"num_alloc_retries": 3, "allocation.all.current": 123_456_789, "something else": 1}
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: found)
    return found


def test_every_statistic_is_reported_in_order(statistics: dict[str, int]) -> None:
    report = report_memory(None)
    assert list(report) == list(DOCUMENTED.values())
    assert report["mem-allocated-gigabytes"] == 1.2346
    assert report["mem-max-reserved-gigabytes"] == 9.8765
    assert report["mem-alloc-retires"] == 3
    assert report["mem-allocated-count"] == 123_456_789
    assert isinstance(report["mem-allocated-count"], int)
    assert list(MEMORY_KEYS) == list(DOCUMENTED)


def test_other_statistics_are_reported_by_name_and_unknown_ones_left_out(statistics: dict[str, int]) -> None:
    statistics["allocated_bytes.all.current"] = 0
    keys = {"allocated_bytes.all.current": "now-bytes", "no such": "x", "something else": "bytes-of-mine"}
    assert report_memory(keys) == {"now-gigabytes": 0, "bytes-of-mine": 1}
    assert report_memory({}) == report_memory(None)


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without CUDA")
def test_without_cuda_there_is_nothing_to_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profiling = ProfilingConfig(record_memory_history=True, memory_snapshot_path=str(tmp_path / "s.pickle"))
    assert report_memory(None) == {}
    start_memory_history_recording(profiling)
    assert save_memory_snapshot(profiling, profiling.profile_step_end) is None
    assert capsys.readouterr().out == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_snapshot_holds_the_history_of_allocations(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profiling = ProfilingConfig(record_memory_history=True, memory_snapshot_path=str(tmp_path / "s.pickle"))
    start_memory_history_recording(profiling)
    try:
        kept = torch.zeros(1024, 1024, device="cuda")
        assert save_memory_snapshot(profiling, profiling.profile_step_end - 1) is None
        path = save_memory_snapshot(profiling, profiling.profile_step_end)
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    assert path == tmp_path / "s_0.pickle"
    snapshot: dict[str, Any] = pickle.loads(path.read_bytes())
    events = [event for trace in snapshot["device_traces"] for event in trace]
    assert any(event["size"] >= kept.nbytes and "frames" in event for event in events)
    printed = capsys.readouterr().out
    assert f"Memory history recording enabled (rank 0); snapshots will be written to '{tmp_path}/s.pickle'." in printed
    assert f"Saved memory snapshot to {path}" in printed


def test_nobody_records_who_is_not_asked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    started: list[Any] = []
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **options: started.append(options))
    start_memory_history_recording(None)
    start_memory_history_recording(ProfilingConfig())
    start_memory_history_recording(ProfilingConfig(record_memory_history=True, profile_ranks=[]))
    start_memory_history_recording(ProfilingConfig(record_memory_history=True, profile_ranks=[1]))
    assert started == []


def test_a_report_of_one_stage_stays_as_it_is() -> None:
    report = {"mem-max-allocated-gigabytes": 1.5}
    assert reduce_max_memory_across_pp_group(report, None) is report
    assert reduce_max_memory_across_pp_group(report, object()) is report


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_the_estimate_counts_the_parameters_of_the_model(tied: bool, bias: bool) -> None:
    config = ConfigContainer()
    sizes = {"num_layers": 3, "hidden_size": 48, "num_attention_heads": 6, "num_query_groups": 2, "vocab_size": 100}
    config.model = ModelConfig(**sizes, seq_length=32, share_embeddings_and_output_weights=tied, add_qkv_bias=bias)
    config.train.micro_batch_size = 2
    estimate = estimate_training_memory(config)
    assert estimate is not None
    assert estimate.num_parameters == build_transformer(config.model, seed=0).num_parameters()


@pytest.mark.parametrize(("optimizer", "momentum", "expected"), [("adam", 0.9, 16), ("sgd", 0.9, 12), ("sgd", 0.0, 8)])
def test_bytes_of_a_parameter_are_those_of_weights_gradient_and_state(
    optimizer: str, momentum: float, expected: int
) -> None:
    config = ConfigContainer()
    config.model.vocab_size, config.train.micro_batch_size = 256, 1
    config.optimizer.optimizer, config.optimizer.sgd_momentum = optimizer, momentum
    estimate = estimate_training_memory(config)
    assert estimate is not None
    assert estimate.weights_and_optimizer == expected * estimate.num_parameters
    model = build_transformer(config.model, seed=0)
    adam = torch.optim.AdamW(model.parameters())
    sgd = torch.optim.SGD(model.parameters(), momentum=momentum)
    used = adam if optimizer == "adam" else sgd
    model(torch.zeros(1, 4, dtype=torch.int64), torch.zeros(1, 4, dtype=torch.int64), reduction="sum").backward()
    used.step()
    state = [value for one in used.state.values() for value in one.values()]
    held = [*model.parameters(), *(p.grad for p in model.parameters() if p.grad is not None)]
    held += [value for value in state if isinstance(value, torch.Tensor) and value.numel() > 1]
    assert sum(value.nbytes for value in held) == estimate.weights_and_optimizer


def test_the_report_is_bridges_line_and_the_table_has_its_parts(capsys: pytest.CaptureFixture[str]) -> None:
    config = ConfigContainer()
    config.model.vocab_size, config.train.micro_batch_size = 256, 1
    report_theoretical_memory(config)
    estimate = estimate_training_memory(config)
    assert estimate is not None
    mebibytes = 16 * estimate.num_parameters / 1024**2
    line = f"Theoretical memory footprints: weight and optimizer={mebibytes:.2f} MB\n"
    assert capsys.readouterr().out == line
    table = format_training_memory_estimate(estimate).splitlines()
    names = ["parameters", "weights, trained", "gradients", "optimizer state", "activations", "logits and loss"]
    assert [row[:16].strip() for row in table] == [*names, "temporary", "total"]
    assert table[1].split()[2:] == [f"{4 * estimate.num_parameters / 1024**2:,.1f}", "MiB"]
