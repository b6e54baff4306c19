"""What a compiled model with CUDA graphs needs of the loop: marked forward passes, and gradients of their own."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from onstep import pretrain
from onstep.config import ConfigContainer
from onstep.models import Transformer
from onstep.training.lifecycle.cuda_graphs import uses_cuda_graphs
from tests.support.small_runs import TinyModel, eval_loader, run, small_state
from tests.support.static_buffers import Replay, register_replayed


class PooledGradients(TinyModel):
    """Its gradients are in a graph's memory when they are new, which the next forward pass overwrites."""

    def __init__(self) -> None:
        super().__init__()
        self.pools = {id(one): torch.empty_like(one) for one in self.parameters()}
        for one in self.parameters():
            one.register_post_accumulate_grad_hook(self._pool)
        self._is_new = dict.fromkeys(self.pools, True)

    def zero(self) -> None:
        self._is_new = dict.fromkeys(self.pools, True)

    @torch.no_grad()
    def _pool(self, parameter: Tensor) -> None:
        if self._is_new[id(parameter)]:
            self._is_new[id(parameter)] = False
            assert parameter.grad is not None
            pool = self.pools[id(parameter)]
            pool.copy_(parameter.grad)
            parameter.grad = pool.detach()

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        if all(one.grad is None for one in self.parameters()):
            self.zero()
        for pool in self.pools.values():
            pool.fill_(math.nan)
        return super().forward(*args, **kwargs)


def weights(model: TinyModel, mode: str | None) -> list[Tensor]:
    state = small_state(train_iters=4)
    state.cfg.train.torch_compile, state.cfg.train.torch_compile_mode = mode is not None, mode
    run(state, model=model)
    return [one.detach() for one in model.parameters()]


def test_gradients_that_a_graph_returned_are_copied_before_the_next_micro_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: None)
    plain, graphs = weights(TinyModel(), None), weights(PooledGradients(), "reduce-overhead")
    assert all(torch.equal(one, other) for one, other in zip(plain, graphs, strict=True))


@pytest.mark.parametrize(("mode", "is_marked"), [("reduce-overhead", True), ("max-autotune", True), (None, False)])
def test_every_forward_pass_is_marked(mode: str | None, is_marked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    passes: list[str] = []
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: passes.append("mark"))
    state, model = small_state(train_iters=2), TinyModel()
    state.cfg.train.torch_compile, state.cfg.train.torch_compile_mode = mode is not None, mode
    state.cfg.validation.eval_interval = 2
    model.register_forward_pre_hook(lambda *given: passes.append("forward"))
    run(state, model=model, valid=eval_loader(2))
    in_pairs = ["mark", "forward"] if is_marked else ["forward"]
    assert passes[: 4 * len(in_pairs)] == in_pairs * 4
    assert passes.count("mark") == (passes.count("forward") if is_marked else 0)


def compiled_outside(mode: str) -> nn.Module:
    return torch.compile(TinyModel(), mode=mode)  # type: ignore[return-value]


def compiled_in_place(mode: str) -> nn.Module:
    model = TinyModel()
    model.out.compile(mode=mode)
    return model


def compiled_forward(mode: str) -> nn.Module:
    model = TinyModel()
    model.forward = torch.compile(model.forward, mode=mode)  # type: ignore[method-assign]
    return model


@pytest.mark.parametrize("compiled", [compiled_outside, compiled_in_place, compiled_forward])
def test_a_model_that_its_user_compiled_so_is_known(compiled: Any) -> None:
    assert uses_cuda_graphs([compiled("reduce-overhead")])
    assert not uses_cuda_graphs([compiled("default")])


def losses_of(config: ConfigContainer, directory: Path, name: str) -> list[dict[str, Any]]:
    config.run.name, config.run.output_dir = name, str(directory)
    config.train.global_batch_size, config.train.train_iters = 4, 6
    config.logger.log_interval, config.validation.eval_interval = 3, 3
    state = pretrain(config)
    found = [{key: one[key] for key in one if "loss" in key} for one in state.info.log_history]
    assert sum(map(len, found)) > 4
    return found


@pytest.mark.parametrize("kind", ["plain", "experts", "further tokens"])
def test_a_run_of_the_own_model_with_static_outputs_has_the_same_numbers(
    tiny_config: ConfigContainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    config, forward, replay = tiny_config, Transformer.forward, Replay()
    config.train.micro_batch_size = 2
    if kind == "experts":
        config.model.num_moe_experts, config.model.moe_aux_loss_coeff = 2, 0.01
    elif kind == "further tokens":
        config.model.mtp_num_layers = 1

    def static(self: Transformer, *args: Any, **kwargs: Any) -> Tensor:
        replay.begin()
        return replay.output(forward(self, *args, **kwargs))

    plain = losses_of(config, tmp_path, "plain")
    monkeypatch.setattr(Transformer, "forward", static)
    assert losses_of(config, tmp_path, "static") == plain


def test_a_compiled_run_whose_graphs_have_static_outputs_has_the_same_numbers(
    tiny_config: ConfigContainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: None)
    tiny_config.train.micro_batch_size = 2
    plain = losses_of(tiny_config, tmp_path, "plain")
    tiny_config.train.torch_compile, tiny_config.train.torch_compile_mode = True, "reduce-overhead"
    tiny_config.train.torch_compile_backend = register_replayed()
    assert losses_of(tiny_config, tmp_path, "static") == plain
    torch._dynamo.reset()
