"""The code examples of Megatron Bridge's callbacks guide run here once `megatron.bridge` is called `onstep`.

The page lies beside the project, not in it; where it is missing, these tests are skipped.
"""

from __future__ import annotations

import io
import os
import re
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import onstep.recipes.qwen
from onstep import Callback, CallbackManager, pretrain
from onstep.config import ConfigContainer, apply_overrides
from onstep.recipes import qwen25_500m_pretrain_config
from onstep.training import forward_step

PAGE = Path(__file__).parents[3] / "shared" / "seeds" / "callbacks_guide.txt"
FENCE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)

SHRUNK = [
    "train.train_iters=3",
    "train.global_batch_size=2",
    "scheduler.lr_warmup_iters=1",
    "model.num_layers=1",
    "model.hidden_size=28",
    "model.ffn_hidden_size=32",
    "model.kv_channels=2",
    "model.vocab_size=257",
    "model.seq_length=32",
    "dataset.seq_length=32",
    "dataset.num_workers=0",
    "dataset.split=80,10,10",
    "validation.eval_interval=2",
    "validation.eval_iters=1",
    "dist.device=cpu",
]
"""What makes the recipe small; everything else is the recipe's."""


class Service:
    """Stands for the monitoring systems that the page names and does not define."""

    def __init__(self, endpoint: str = "") -> None:
        self.endpoint = endpoint
        self.received: list[Any] = []

    def log(self, losses: Any) -> None:
        self.received.append(losses)

    def send(self, record: Any) -> None:
        self.received.append(record)


@pytest.fixture
def small_recipe(corpus: Path, empty_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The recipe, built as it is, with sizes that a test can afford."""

    def small() -> ConfigContainer:
        config = qwen25_500m_pretrain_config()
        apply_overrides(config, [*SHRUNK, f"dataset.paths=[{corpus}]"])
        return config

    monkeypatch.setattr(onstep.recipes.qwen, "qwen25_500m_pretrain_config", small)
    return small


def examples() -> list[str]:
    """The page's blocks with the name of our package in their import lines."""
    if not PAGE.is_file():
        pytest.skip(f"{PAGE.name} is not beside the project")
    found = FENCE.findall(PAGE.read_text(encoding="utf-8"))
    return [block.replace("megatron.bridge", "onstep") for block in found]


def names_the_page_leaves_open() -> dict[str, Any]:
    """What a reader of the page is expected to have."""
    return {
        "my_fn": lambda context: None,
        "TimingCallback": type("TimingCallback", (Callback,), {}),
        "MetricsCallback": type("MetricsCallback", (Callback,), {}),
        "InternalMetricsClient": Service,
        "external_service": Service(),
        "os": os,
    }


@pytest.fixture
def executed(small_recipe: Any) -> dict[str, Any]:
    """The names after the whole page was executed in its order, with what it printed."""
    namespace = names_the_page_leaves_open()
    printed = io.StringIO()
    with redirect_stdout(printed):
        for block in examples():
            exec(block, namespace)
    return {**namespace, "printed": printed.getvalue()}


def test_the_examples_run_and_say_what_they_should(executed: dict[str, Any]) -> None:
    printed = executed["printed"]
    assert printed.count("Training started at step 0") == 2
    assert printed.count("Training completed in ") == 2
    assert printed.count("Step 2: loss={'lm loss': ") == 2
    assert printed.count("Step 2: {'lm loss': ") == 1
    assert printed.count("Evaluation complete!") == 2, "one at step 2, one after training"
    assert "Callbacks registered for on_train_start\nFound 1 callbacks" in printed
    assert "on_train_step_end" in printed.splitlines()[-1]


def test_the_callbacks_that_the_page_only_defines_work(executed: dict[str, Any], small_recipe: Any) -> None:
    page = SimpleNamespace(**executed)
    metrics = page.ProprietaryMetricsCallback("tcp://nowhere")
    manager = CallbackManager()
    manager.add([page.StepCounterCallback(), page.RankZeroCallback(), metrics])
    manager.register("on_train_step_end", page.safe_callback)
    printed = io.StringIO()
    with redirect_stdout(printed):
        pretrain(small_recipe(), forward_step, callbacks=manager)
    assert "Callback saw 3 steps" in printed.getvalue()
    assert "Step 2 complete" in printed.getvalue()
    assert [record["step"] for record in metrics.client.received] == [0, 1, 2]
    assert all(float(record["loss"]) > 0 and float(record["grad_norm"]) > 0 for record in metrics.client.received)
    assert len(page.external_service.received) == 3


def test_nothing_but_import_lines_is_changed() -> None:
    if not PAGE.is_file():
        pytest.skip(f"{PAGE.name} is not beside the project")
    before = FENCE.findall(PAGE.read_text(encoding="utf-8"))
    pairs = [
        (old, new)
        for theirs, ours in zip(before, examples(), strict=True)
        for old, new in zip(theirs.splitlines(), ours.splitlines(), strict=True)
    ]
    assert all(old.startswith("from megatron.bridge.") for old, new in pairs if old != new)


def test_the_recipe_builds_as_it_is() -> None:
    config = qwen25_500m_pretrain_config()
    assert (config.model.num_layers, config.model.hidden_size, config.model.vocab_size) == (24, 896, 151_936)
