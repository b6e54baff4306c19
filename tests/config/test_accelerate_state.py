"""accelerate's state has the ranks and the device of the arguments, as transformers' arguments initialize it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import transformers

from onstep.config import ConfigContainer, TrainingArguments, args_to_config, config_to_args
from onstep.errors import ConfigError

state_module = pytest.importorskip("accelerate.state")


@pytest.fixture(autouse=True)
def _no_state() -> Iterator[None]:
    state_module.AcceleratorState._reset_state(reset_partial_state=True)
    yield
    state_module.AcceleratorState._reset_state(reset_partial_state=True)


def known() -> dict[str, Any]:
    return {name: str(value) for name, value in state_module.PartialState._shared_state.items()}


def test_the_state_after_the_arguments_is_that_of_transformers() -> None:
    transformers.TrainingArguments("out", use_cpu=True)
    expected = known()
    state_module.AcceleratorState._reset_state(reset_partial_state=True)
    assert known() == {}

    args = TrainingArguments("out", use_cpu=True)

    assert known() == expected
    assert args.distributed_state is not None
    assert str(args.distributed_state.distributed_type) == "DistributedType.NO"
    assert args.distributed_state.is_main_process
    args.log_level = "info"
    from accelerate.logging import get_logger

    get_logger("mine").info("which requires the state")


def test_a_rank_without_a_launcher_gets_no_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert TrainingArguments("out", use_cpu=True).world_size == 1
    assert known() == {}


def test_what_compares_arguments_leaves_the_state_of_a_script_as_it_is() -> None:
    args = TrainingArguments("out", use_cpu=True)
    assert known()["_cpu"] == "True"
    config_to_args(args_to_config(args))
    assert not config_to_args(ConfigContainer()).use_cpu
    assert known()["_cpu"] == "True"
    TrainingArguments("out")
    assert known()["_cpu"] == "False"


def test_a_configured_state_is_used_or_its_absence_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"requires accelerate's state before TrainingArguments; call accelerate\.Par"
    ):
        TrainingArguments("out", accelerator_config={"use_configured_state": True})
    state_module.PartialState(cpu=True)
    args = TrainingArguments("out", accelerator_config={"use_configured_state": True})
    assert args.use_cpu
    assert args.device.type == "cpu"
    assert "use_configured_state" not in vars(args.accelerator_config), "removed, as transformers does"


def test_without_accelerate_nothing_is_initialized_or_imported() -> None:
    code = (
        "import sys, json\n"
        "from onstep import TrainingArguments\n"
        "args = TrainingArguments('out')\n"
        "first = [name for name in ('torch', 'accelerate') if name in sys.modules]\n"
        "args.distributed_state.is_main_process\n"
        "print(json.dumps([first, 'accelerate' in sys.modules]))\n"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert json.loads(found) == [[], True]


def test_there_is_no_plugin_and_none_is_accepted() -> None:
    args = TrainingArguments("out")
    assert (args.deepspeed_plugin, args.fsdp_plugin_args) == (None, None)
    args.deepspeed_plugin = None
    with pytest.raises(ConfigError, match="deepspeed_plugin=object is not supported: there is no DeepSpeed; start"):
        args.deepspeed_plugin = object()  # type: ignore[assignment]
    assert args._no_sync_in_gradient_accumulation
    assert args.default_optim == transformers.TrainingArguments.default_optim == args.optim
