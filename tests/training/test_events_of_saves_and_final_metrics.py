"""The events before a checkpoint is written, and before the final metrics are logged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from onstep import Callback, TrainerCallback, pretrain
from onstep.config import ConfigContainer


class Counter(Callback):
    """Counts in `on_checkpoint_save_start`; what it has then is what the checkpoint must hold."""

    def __init__(self) -> None:
        self.count = 0
        self.calls: list[tuple[str, int]] = []

    def on_checkpoint_save_start(self, context: Any) -> None:
        self.count += 1
        self.calls.append(("start", context.checkpoint_step))

    def on_checkpoint_save(self, context: Any) -> None:
        self.calls.append(("durable", context.checkpoint_step))

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.count = state_dict["count"]


def test_the_beginning_of_a_save_is_fired_before_any_state_is_collected(
    tiny_config: ConfigContainer, tmp_path: Path
) -> None:
    tiny_config.checkpoint.save, tiny_config.checkpoint.save_interval = str(tmp_path), 3
    first, second = Counter(), Counter()
    pretrain(tiny_config, callbacks=[first])
    assert first.calls == [(what, step) for step in (3, 6, 8) for what in ("start", "durable")]
    tiny_config.train.train_iters = 9
    tiny_config.checkpoint.on_config_change = "apply"
    pretrain(tiny_config, callbacks=[second])
    assert second.count == 3 + 1


def test_what_is_added_to_the_final_metrics_reaches_every_listener_and_the_history(
    tiny_config: ConfigContainer,
) -> None:
    seen: list[dict[str, Any]] = []

    class Reader(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **kwargs: Any) -> None:
            seen.append(dict(logs))

    class Adder(TrainerCallback):
        def on_final_metrics(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **kwargs: Any) -> None:
            assert "train_runtime" in logs
            logs["answer"] = 42

    state = pretrain(tiny_config, callbacks=[Reader(), Adder()])
    assert [logs.get("answer") for logs in seen] == [None, None, 42]
    assert [record["answer"] for record in state.info.log_history if "answer" in record] == [42]
