"""A model whose losses are in static buffers, as with CUDA graphs, has the same numbers as any other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from onstep import CallbackManager
from tests.support.small_runs import TinyModel, eval_loader, mean_step, run, small_state, sum_step
from tests.support.static_buffers import Replay


class ReplayedModel(TinyModel):
    """`TinyModel` as a CUDA graph would compute it."""

    def __init__(self) -> None:
        super().__init__()
        self.replay = Replay()

    def forward(self, tokens: Tensor, labels: Tensor, reduction: str = "sum") -> Tensor:
        self.replay.begin()
        return self.replay.output(super().forward(tokens, labels, reduction))


def full_step(data_iterator: Any, model: nn.Module) -> Any:
    """Loss, count and reports all come from the model's graph."""
    batch = next(data_iterator)
    logits = model.out(model.embed(batch["tokens"]))
    place = (lambda value: value) if not isinstance(model, ReplayedModel) else model.replay.output
    if isinstance(model, ReplayedModel):
        model.replay.begin()
    losses = cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="none")
    loss, count = place(losses.sum()), place(batch["labels"].ne(-100).sum().float())
    report = {"mean": place(losses.mean()), "pair": (place(losses.square().sum()), count)}
    return loss, lambda loss: (loss, count, report)


def numbers(model: nn.Module, step: Any, micro: int, interval: int = 1) -> tuple[list[Any], list[Any], list[Tensor]]:
    """What a run logs, what callbacks have kept, and its weights."""
    state = small_state(micro=micro, batch=4, train_iters=6)
    state.cfg.logger.log_interval, state.cfg.validation.eval_interval = interval, 2
    state.cfg.anomaly.on_spike, state.cfg.anomaly.spike_warmup = "skip", 1
    state.cfg.validation.metric_for_best_model = "loss"
    kept: list[Any] = []
    manager = CallbackManager()
    manager.register("on_train_step_end", lambda context: kept.append(dict(context.loss_dict)))
    manager.register("on_forward_backward_end", lambda context: kept.append({"micro": context.loss}))
    run(state, manager, step=step, model=model, valid=eval_loader())
    timed = ("runtime", "per_second", "time", "throughput")
    logged = [
        {key: value for key, value in one.items() if not any(word in key for word in timed)}
        for one in state.info.log_history
    ]
    seen = [{key: float(value) for key, value in one.items()} for one in kept]
    logged += [state.train_state.best_metric, state.features.states(per_rank=False)["anomalies"].state_dict()]
    return logged, seen, [one.detach() for one in model.parameters()]


@pytest.mark.parametrize("step", [sum_step, mean_step, full_step])
@pytest.mark.parametrize(("micro", "interval"), [(4, 3), (2, 3)])
def test_a_run_with_static_losses_has_the_same_numbers(step: Any, micro: int, interval: int) -> None:
    plain, static = (numbers(kind(), step, micro, interval) for kind in (TinyModel, ReplayedModel))
    assert static[0] == plain[0]
    assert static[1] == plain[1]
    assert all(torch.equal(one, other) for one, other in zip(static[2], plain[2], strict=True))
    assert len(plain[0]) > 4
