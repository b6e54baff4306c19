"""Which runs are refused for their memory, what the refusal recommends, and what a machine has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from onstep.config import ConfigContainer, ModelConfig, apply_overrides, resolve
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


CAUSES = {
    "micro-batch": {"train.micro_batch_size": 64, "train.global_batch_size": 64},
    "length": {"model.seq_length": 65_536, "dataset.seq_length": 65_536, "train.micro_batch_size": 1},
    "size": {"model.num_layers": 96, "model.hidden_size": 2048, "checkpoint.pretrained_checkpoint": "weights"},
}


def less(values: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The same without one of the values, or with a milder one in its place."""
    for key, value in values.items():
        rest = {one: other for one, other in values.items() if one != key}
        if key in ("train.micro_batch_size", "model.seq_length"):
            yield {**rest, key: 2 * value}
        elif key == "model.recompute_granularity" and value == "full":
            yield {**rest, key: "selective", "model.recompute_interval": 1}
            if "model.recompute_interval" not in values:
                yield {**rest, key: value, "model.recompute_interval": 2}
        elif key == "optimizer.optimizer" and value == "paged_adamw_8bit":
            yield {**rest, key: "adamw_8bit"}
        elif key not in _OF_OTHERS and not (key == "optimizer.main_params_dtype" and "optimizer.optimizer" in values):
            yield rest


_OF_OTHERS = ("model.recompute_interval", "dataset.seq_length", "optimizer.rounding")


@pytest.mark.parametrize("share", [0.7, 0.4, 0.2])
@pytest.mark.parametrize("cause", CAUSES)
def test_changes_differ_and_nothing_in_them_can_be_left_out_or_made_milder(cause: str, share: float) -> None:
    config, whole = given(**CAUSES[cause])
    limit = int(share * whole.total)
    found = changes_that_fit(config, limit)
    assert found
    assert len({next(iter(change.values)) for change in found}) == len(found)
    for change in found:
        assert estimated(given(**CAUSES[cause] | change.values)[0]).total == change.total <= limit
        for values in less(change.values):
            assert estimated(given(**CAUSES[cause] | values)[0]).total > limit, values


@pytest.mark.parametrize("share", [0.7, 0.4, 0.2])
@pytest.mark.parametrize("cause", CAUSES)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_each_change_is_a_valid_configuration(device: str, cause: str, share: float) -> None:
    rest = {"optimizer.lr": 1e-3, "train.train_iters": 10, "dataset.seq_length": 2048}
    config, whole = given(**rest | CAUSES[cause])
    for change in changes_that_fit(config, int(share * whole.total), device=device, most=10):
        changed, _ = given(**rest | CAUSES[cause] | change.values)
        resolve(changed, 1)
        assert device == "cuda" or not {"model.offload_activations", "bitsandbytes"} & {
            *change.values,
            *change.packages,
        }


def test_an_optimizer_with_less_state_is_named_with_its_package() -> None:
    config, whole = given(**{"model.num_layers": 96, "train.micro_batch_size": 1, "model.seq_length": 256})
    changes = changes_that_fit(config, whole.held - whole.optimizer // 2, most=10)
    shown = {next(iter(change.values)): str(change) for change in changes}["optimizer.optimizer"]
    assert shown.startswith("optimizer.optimizer=adamw_8bit ")
    assert shown.endswith(" GiB; requires bitsandbytes)")


def test_a_smaller_micro_batch_comes_first_and_alone_where_it_is_enough() -> None:
    config, whole = given(**CAUSES["micro-batch"])
    found = changes_that_fit(config, int(0.4 * whole.total))
    assert found[0].values == {"train.micro_batch_size": 16}
    assert [next(iter(change.values)) for change in found[1:]] == ["model.chunked_loss", "model.recompute_granularity"]


def test_a_change_that_is_not_enough_alone_includes_the_cheaper_ones() -> None:
    config, whole = given()
    one = estimated(given(**{"train.micro_batch_size": 1})[0]).total
    both = estimated(given(**{"train.micro_batch_size": 1, "model.recompute_granularity": "full"})[0]).total
    found = changes_that_fit(config, both)
    assert list(found[0].values.items()) == [("model.recompute_granularity", "full"), ("train.micro_batch_size", 1)]
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
    with pytest.raises(
        ConfigError, match=r"Even model\.seq_length=256 .* \(\d+\.\d GiB; requires bitsandbytes\) is too much"
    ):
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
