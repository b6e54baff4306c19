"""No read of the device inside a step that is not logged."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from onstep import Callback, DefaultMetrics, InfoCallback, JsonLogger, ProgressCallback, pretrain
from onstep.config import ConfigContainer

READS = ("_local_scalar_dense", "item", "is_nonzero", "equal")


class ReadCounter(TorchDispatchMode):
    """Counts the operators that make the host wait for a value."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in READS:
            self.reads.append(name)
        return func(*args, **(kwargs or {}))


class Window(Callback):
    """Counts reads from `on_step_begin` to `on_step_end` of each step."""

    def __init__(self) -> None:
        self.by_step: dict[int, int] = {}

    def on_step_begin(self, context: Any) -> None:
        self.mode = ReadCounter()
        self.mode.__enter__()

    def on_step_end(self, context: Any) -> None:
        self.mode.__exit__(None, None, None)
        self.by_step[context.state.train_state.step] = len(self.mode.reads)


class Reader(Callback):
    """What must not be done: reads the loss at every step."""

    def on_train_step_end(self, context: Any) -> None:
        context.loss_dict["lm loss"].item()


def reads_of(config: ConfigContainer, folder: Path, extra: list[Any]) -> dict[int, int]:
    config.train.micro_batch_size = 2
    config.logger.log_interval, config.validation.eval_interval = 5, None
    config.run.name, config.run.output_dir = "run", str(folder)
    window = Window()
    defaults = [
        DefaultMetrics(),
        ProgressCallback(use_tqdm=False, output_stream=io.StringIO()),
        InfoCallback(),
        JsonLogger(),
    ]
    pretrain(config, callbacks=[window, *defaults, *extra])
    return window.by_step


def test_steps_read_nothing_from_the_device(tiny_config: ConfigContainer, tmp_path: Path) -> None:
    assert reads_of(tiny_config, tmp_path, []) == dict.fromkeys(range(1, 9), 0)


def test_the_count_is_red_for_a_callback_that_reads(tiny_config: ConfigContainer, tmp_path: Path) -> None:
    assert all(count >= 1 for count in reads_of(tiny_config, tmp_path, [Reader()]).values())
