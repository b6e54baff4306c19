"""Which runs are refused for their memory, what the refusal recommends, and what a machine has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from onstep.config import ConfigContainer, ModelConfig, apply_overrides
from onstep.errors import ConfigError
from onstep.metrics.memory.changes import changes_that_fit
from onstep.metrics.memory.estimate import MemoryEstimate, estimate_training_memory
from onstep.metrics.memory.fitting import check_gpu, check_machine
from onstep.metrics.memory.machine import MachineMemory, machine_memory


def given(**values: Any) -> tuple[ConfigContainer, MemoryEstimate]:
    """A configuration of about half a billion weights, in float32, and its estimate."""
    sizes = {"num_layers": 24, "hidden_size": 1024, "num_attention_heads": 16, "vocab_size": 50_000}
    config = ConfigContainer(model=ModelConfig(**sizes, seq_length=2048))
    config.train.micro_batch_size = config.train.global_batch_size = 4
    apply_overrides(config, [f"{key}={value}" for key, value in values.items()])
    return config, estimated(config)


def estimated(config: ConfigContainer) -> MemoryEstimate:
    estimate = estimate_training_memory(config)
    assert estimate is not None
    return estimate


def test_each_change_makes_the_training_fit_and_the_cheapest_comes_first() -> None:
    config, whole = given()
    found = changes_that_fit(config, int(0.7 * whole.total))
    assert len(found) == 3
    assert list(found[0].values) == ["train.micro_batch_size"]
    assert [change.total for change in found] == [estimated(given(**change.values)[0]).total for change in found]
    assert all(change.total <= 0.7 * whole.total for change in found)


def test_a_change_that_is_not_enough_alone_includes_the_cheaper_ones() -> None:
    config, whole = given()
    one = estimated(given(**{"train.micro_batch_size": 1})[0]).total
    both = estimated(given(**{"train.micro_batch_size": 1, "model.recompute_granularity": "full"})[0]).total
    found = changes_that_fit(config, (one + both) // 2)
    assert list(found[0].values) == ["train.micro_batch_size", "model.recompute_granularity"]
    assert whole.total > one > both


def test_lora_is_recommended_for_fine_tuning_only() -> None:
    for path, expected in (("null", False), ("weights", True)):
        config, whole = given(**{"checkpoint.pretrained_checkpoint": path})
        words = " ".join(map(str, changes_that_fit(config, whole.held)))
        assert ("peft.peft_scheme=lora" in words) is expected


def test_a_gpu_that_is_too_small_is_refused_with_changes_and_their_figures() -> None:
    config, estimate = given()
    there = int(0.6 * estimate.total)
    with pytest.raises(ConfigError) as caught:
        check_gpu(config, estimate, there, "NVIDIA A10G")
    text = str(caught.value)
    assert f"requires about {estimate.total / 2**30:.1f} GiB" in text
    assert f"NVIDIA A10G has {there / 2**30:.1f} GiB" in text
    assert "Any of these makes it fit: train.micro_batch_size=1 (" in text
    assert text.endswith("run.check_memory=false starts it all the same.")
    assert "\n" not in text


def test_a_gpu_that_may_be_large_enough_is_not_refused() -> None:
    config, estimate = given()
    check_gpu(config, estimate, int(estimate.total / 1.04), "NVIDIA A10G")


def test_what_no_change_makes_fit_is_refused_with_the_least_figure() -> None:
    config, estimate = given()
    with pytest.raises(ConfigError, match=r"Even train\.micro_batch_size=1 .* \(\d+\.\d GiB\) is too much: use a smal"):
        check_gpu(config, estimate, 2**30, "NVIDIA A10G")


def test_a_machine_is_too_small_only_by_far() -> None:
    config, estimate = given(**{"dist.device": "cpu"})
    check_machine(config, estimate, MachineMemory(int(estimate.total / 1.4), 0))
    with pytest.raises(ConfigError, match=r"this machine has .* Any of these makes it fit"):
        check_machine(config, estimate, MachineMemory(int(estimate.total / 1.6), 0))


def files(root: Path, **texts: str) -> Path:
    for name, text in texts.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MEMINFO = "MemTotal:       1000 kB\nMemFree: 10 kB\nMemAvailable:    600 kB\nSwapTotal:       500 kB\n"


def test_the_machine_has_its_memory_and_swap_space(tmp_path: Path) -> None:
    assert machine_memory(files(tmp_path, proc__meminfo=MEMINFO)) == MachineMemory(1500 * 1024, 600 * 1024)


@pytest.mark.parametrize("limit", ["300", "max"])
def test_a_container_has_the_limit_of_its_control_group(tmp_path: Path, limit: str) -> None:
    root = files(tmp_path, proc__meminfo=MEMINFO, proc__self__cgroup="0::/pod/job\n")
    group = root / "sys/fs/cgroup/pod"
    (group / "job").mkdir(parents=True)
    text = str(int(limit) * 1024) if limit.isdigit() else limit
    (group / "memory.max").write_text(f"{text}\n")
    (group / "memory.current").write_text(f"{200 * 1024}\n")
    (group / "memory.stat").write_text(f"anon 1\ninactive_file {50 * 1024}\n")
    expected = MachineMemory(300 * 1024, 150 * 1024) if limit.isdigit() else MachineMemory(1500 * 1024, 600 * 1024)
    assert machine_memory(root) == expected


def test_control_groups_of_version_1_are_read_at_the_top_of_a_container(tmp_path: Path) -> None:
    root = files(tmp_path, proc__meminfo=MEMINFO, proc__self__cgroup="4:memory:/docker/abc\n3:cpu:/x\n")
    group = root / "sys/fs/cgroup/memory"
    group.mkdir(parents=True)
    (group / "memory.limit_in_bytes").write_text(str(400 * 1024))
    (group / "memory.usage_in_bytes").write_text(str(100 * 1024))
    assert machine_memory(root) == MachineMemory(400 * 1024, 300 * 1024)
