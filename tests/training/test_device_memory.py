"""What a run says about memory before its model is built, and which it refuses."""

from __future__ import annotations

import logging

import pytest
import torch

from onstep.config import ConfigContainer, ModelConfig
from onstep.distributed import World
from onstep.errors import ConfigError
from onstep.training.setup.memory import check_device_memory

GPU = World(device=torch.device("cuda"))


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> ConfigContainer:
    """A run that requires 7 GiB, and a GPU of 4 GiB."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3 * 2**30, 4 * 2**30))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA Small")
    model = ModelConfig(num_layers=12, hidden_size=1024, num_attention_heads=8, vocab_size=32_000, seq_length=1024)
    given = ConfigContainer(model=model)
    given.train.micro_batch_size = given.train.global_batch_size = 4
    return given


def test_a_run_that_cannot_fit_its_gpu_is_refused_with_what_would_make_it_fit(config: ConfigContainer) -> None:
    with pytest.raises(ConfigError, match=r"NVIDIA Small has 4\.0 GiB\. Any of these makes it fit: model\.recompute"):
        check_device_memory(config, GPU)


def test_run_check_memory_false_starts_it_with_a_warning(
    config: ConfigContainer, caplog: pytest.LogCaptureFixture
) -> None:
    config.run.check_memory = False
    check_device_memory(config, GPU)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "memory: about " in caplog.text
    assert "NVIDIA Small has 4.0 GiB, 3.0 GiB of it free" in caplog.text


def test_a_run_on_the_cpu_says_what_the_machine_has(caplog: pytest.LogCaptureFixture) -> None:
    small = ConfigContainer(model=ModelConfig(num_layers=1, hidden_size=32, num_attention_heads=2, vocab_size=100))
    small.train.micro_batch_size = 1
    with caplog.at_level(logging.INFO):
        check_device_memory(small, World())
    assert "weights, trained " in caplog.text
    assert "; this machine has " in caplog.text
