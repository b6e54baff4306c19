"""`train.tf32`: what it sets for the time of a run, where it is refused, and the line about a faster precision."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from onstep.config import ConfigContainer, TrainingArguments, args_to_config, config_to_args
from onstep.errors import ConfigError
from onstep.events import CallbackManager
from onstep.training import pretrain
from onstep.training.lifecycle import float32
from onstep.training.lifecycle.float32 import has_tf32, slow_float32
from onstep.training.setup import setup
from tests.support.small_models import Regression, arguments, quiet, regression_rows

GPU = torch.device("cuda", 0)


def precision() -> Any:
    """What torch's two interfaces say of matrix products and of convolutions."""
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1))  # restores a setting that it has read
    cudnn: Any = torch.backends.cudnn
    newer = torch.backends.cuda.matmul.fp32_precision == "tf32", cudnn.conv.fp32_precision == "tf32"
    return torch.get_float32_matmul_precision(), cudnn.allow_tf32, *newer


@pytest.fixture(params=["highest", "high"])
def of_script(request: pytest.FixtureRequest) -> Iterator[None]:
    """What a script has set before the run."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(request.param)
    yield
    torch.set_float32_matmul_precision(before)


@pytest.fixture
def ampere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA A100")


@pytest.mark.parametrize(
    ("tf32", "expected"),
    [(True, ("high", True, True, True)), (False, ("highest", False, False, False)), (None, None)],
)
@pytest.mark.usefixtures("of_script")
def test_it_is_set_for_a_run_and_restored(
    tiny_config: ConfigContainer, monkeypatch: pytest.MonkeyPatch, tf32: bool | None, expected: tuple[Any, ...] | None
) -> None:
    monkeypatch.setattr(float32, "has_tf32", lambda device=None: True)
    monkeypatch.setattr(setup, "slow_float32", lambda *args: None)
    seen, before, manager = set(), precision(), CallbackManager()
    manager.register("on_step_end", lambda context: seen.add(precision()))
    tiny_config.train.tf32 = tf32
    tiny_config.train.train_iters, tiny_config.validation.eval_interval = 3, None

    pretrain(tiny_config, callbacks=manager)

    assert seen == {expected or before}
    assert precision() == before


def test_what_a_script_has_set_by_the_newer_interface_is_restored() -> None:
    backends: Any = torch.backends
    backends.fp32_precision, backends.cuda.matmul.fp32_precision = "ieee", "none"
    try:
        with float32.float32_precision(tf32=True):
            assert precision() == ("high", True, True, True)
        assert backends.fp32_precision == backends.cuda.matmul.fp32_precision == "ieee"
        backends.fp32_precision = "tf32"
        assert backends.cuda.matmul.fp32_precision == "tf32"  # which still inherits
    finally:
        backends.fp32_precision = "none"


def test_it_requires_a_gpu_that_has_it(tiny_config: ConfigContainer) -> None:
    tiny_config.train.tf32, tiny_config.dist.device = True, "cpu"
    with pytest.raises(ConfigError, match=r"train.tf32=true requires a CUDA GPU of the Ampere .* is on cpu; use null"):
        pretrain(tiny_config)


def test_a_trainers_argument_is_the_key(tmp_path: Path) -> None:
    for value in (True, False, None):
        config = args_to_config(TrainingArguments(str(tmp_path), tf32=value))
        assert config.train.tf32 is value
        assert config_to_args(config).tf32 is value


def test_float32_is_named_where_a_gpu_has_faster_precisions(ampere: None) -> None:
    model = [nn.Linear(3, 3)]
    line = slow_float32(GPU, model, "train.tf32=true", "mixed_precision=bf16_mixed")
    assert line is not None
    assert line.startswith("float32 on NVIDIA A100")
    assert "train.tf32=true" in line
    assert "mixed_precision=bf16_mixed" in line
    assert slow_float32(torch.device("cpu"), model, "", "") is None
    assert slow_float32(GPU, [nn.Linear(3, 3).bfloat16()], "", "") is None
    with float32.float32_precision(tf32=True):
        assert slow_float32(GPU, model, "", "") is None


def test_a_gpu_without_them_is_left_alone(ampere: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    assert not has_tf32(GPU)
    assert slow_float32(GPU, [nn.Linear(3, 3)], "", "") is None


def note(device: torch.device, model: Any, tf32: str, bf16: str) -> str:
    return f"faster: {tf32}, {bf16}"


@pytest.mark.parametrize("decided", [{}, {"tf32": False}, {"mixed_precision": "bf16_mixed"}])
def test_the_line_comes_at_the_start_unless_somebody_has_decided(
    tiny_config: ConfigContainer, monkeypatch: pytest.MonkeyPatch, caplog: Any, decided: dict[str, Any]
) -> None:
    monkeypatch.setattr(setup, "slow_float32", note)
    tiny_config.train.tf32, tiny_config.mixed_precision = decided.get("tf32"), decided.get("mixed_precision")
    tiny_config.train.train_iters, tiny_config.validation.eval_interval = 3, None

    pretrain(tiny_config)

    assert caplog.text.count("faster: train.tf32=true, mixed_precision=bf16_mixed") == (0 if decided else 1)


def test_a_trainers_line_names_its_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    monkeypatch.setattr(setup, "slow_float32", note)
    quiet(Regression(), arguments(tmp_path, max_steps=1), regression_rows(4)).train()
    assert caplog.text.count("faster: tf32=True, bf16=True") == 1
