"""`train.torch_compile` changes how a run computes, not what it learns or saves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from onstep import CallbackManager, pretrain
from onstep.config import ConfigContainer


def run(config: ConfigContainer, directory: Path, name: str, **settings: Any) -> tuple[list[float], Path, set[str]]:
    config.run.output_dir, config.run.name = str(directory), name
    config.train.train_iters, config.validation.eval_interval, config.logger.log_interval = 4, 2, 1
    for key, value in settings.items():
        setattr(config.train, key, value)
    names: set[str] = set()
    manager = CallbackManager()
    manager.register("on_step_end", lambda context: names.update(dict(context.unwrapped_model.named_parameters())))
    state = pretrain(config, callbacks=manager)
    return [record["loss"] for record in state.info.log_history if "loss" in record], directory / name, names


def test_a_compiled_run_has_the_losses_and_names_of_a_plain_one(tiny_config: ConfigContainer, tmp_path: Path) -> None:
    compiled_graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled_graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    torch._dynamo.register_backend(backend, name="counting")
    plain = run(tiny_config, tmp_path, "plain")
    assert not compiled_graphs
    compiled = run(tiny_config, tmp_path, "compiled", torch_compile=True, torch_compile_backend="counting")
    assert compiled_graphs
    assert compiled[0] == plain[0]
    assert compiled[2] == plain[2]
    torch._dynamo.reset()


def test_a_run_may_be_continued_without_compiling(tiny_config: ConfigContainer, tmp_path: Path) -> None:
    whole = run(tiny_config, tmp_path, "whole")[0]
    tiny_config.train.exit_interval = 2
    try:
        run(tiny_config, tmp_path, "changing", torch_compile=True, torch_compile_backend="eager")
    except SystemExit:
        tiny_config.train.exit_interval = None
    rest = run(tiny_config, tmp_path, "changing", torch_compile=False, torch_compile_backend=None)[0]
    assert rest[-2:] == whole[-2:]
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*not a leaf Tensor.*:UserWarning")
def test_a_compiled_run_with_experts_has_the_losses_of_a_plain_one(
    tiny_config: ConfigContainer, tmp_path: Path
) -> None:
    tiny_config.model.num_moe_experts = 4
    torch._dynamo.reset()
    plain = run(tiny_config, tmp_path, "plain")[0]
    compiled = run(tiny_config, tmp_path, "compiled", torch_compile=True, torch_compile_backend="aot_eager")[0]
    assert compiled == plain
    torch._dynamo.reset()
