"""On a GPU: a whole quiet step of either door never waits for the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from onstep import Callback, TrainerCallback
from onstep.config import ConfigContainer
from onstep.config.load import merge
from onstep.training import pretrain
from tests.support.small_models import Regression, arguments, quiet, regression_rows

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

FIRST, LAST = 12, 19
"""Steps after those that warm up, and before the last."""


class RefusesWaits(Callback):
    """Every operation that waits for the device raises, from the start of step 12 to that of step 20."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_train_step_start(self, context: Any) -> None:
        step = context.trainer_state.global_step + 1
        torch.cuda.set_sync_debug_mode("error" if FIRST <= step <= LAST else "default")
        self.steps += [step] * (torch.cuda.get_sync_debug_mode() == 2)


class Waits(TrainerCallback):
    """Reads a value of the device in step 15."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 15:
            torch.ones((), device="cuda").item()


@pytest.fixture(autouse=True)
def modes() -> Iterator[None]:
    yield
    torch.cuda.set_sync_debug_mode("default")


def quiet_config(config: ConfigContainer, overrides: dict[str, Any]) -> ConfigContainer:
    steps = {"train.train_iters": 20, "logger.log_interval": 100}
    merge(config, {**steps, "validation.eval_interval": None, "validation.eval_iters": 0, **overrides})
    config.dist.device = "cuda"
    return config


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"mixed_precision": "bf16_mixed"},
        {"train.micro_batch_size": 2},
        {"optimizer.optimizer": "sgd"},
        {"optimizer.optimizer": "muon"},
        {"optimizer.clip_grad": None},
        {"dataset.reset_attention_mask": True, "mixed_precision": "bf16_mixed"},
        {"model.num_moe_experts": 4, "mixed_precision": "bf16_mixed"},
        {"model.num_moe_experts": 4},
        {"optimizer.log_num_zeros_in_grad": True},
    ],
    ids=[
        "float32",
        "bf16",
        "two micro-batches",
        "sgd",
        "muon",
        "no clipping",
        "packed",
        "experts",
        "experts in float32",
        "zeros",
    ],
)
def test_a_quiet_step_of_pretrain_does_not_wait(tiny_config: ConfigContainer, overrides: dict[str, Any]) -> None:
    refuses = RefusesWaits()
    pretrain(quiet_config(tiny_config, overrides), callbacks=[refuses])
    assert refuses.steps == list(range(FIRST, LAST + 1))


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer | None]] = {
    "its own optimizer": lambda params: None,
    "fused AdamW": lambda params: torch.optim.AdamW(params, lr=1e-3, fused=True),
    "AdamW(params)": lambda params: torch.optim.AdamW(params, lr=1e-3),
    "unfused AdamW": lambda params: torch.optim.AdamW(params, lr=1e-3, foreach=True),
    "SGD(params)": lambda params: torch.optim.SGD(params, lr=1e-3, momentum=0.9),
    "RMSprop": torch.optim.RMSprop,
}


@pytest.mark.parametrize("make_optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_a_quiet_step_of_trainer_does_not_wait(tmp_path: Path, make_optimizer: Any) -> None:
    model, refuses = Regression().cuda(), RefusesWaits()
    optimizer = make_optimizer(model.parameters())
    args = arguments(tmp_path, use_cpu=False, max_steps=20, logging_strategy="no", bf16=True)
    quiet(model, args, regression_rows(80), callbacks=[refuses], optimizers=(optimizer, None)).train()
    assert refuses.steps == list(range(FIRST, LAST + 1))


def test_a_callback_that_waits_is_noticed(tiny_config: ConfigContainer) -> None:
    with pytest.raises(RuntimeError, match="synchroniz"):
        pretrain(quiet_config(tiny_config, {}), callbacks=[RefusesWaits(), Waits()])
