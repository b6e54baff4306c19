"""No reader of weights sees old ones while a distributed optimizer gathers the new ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from onstep import Callback, CallbackManager
from onstep.callbacks import JsonLogger, PeakMemory
from onstep.training import GlobalState
from tests.support.delayed_gathers import DelayedChunk, DelayedOptimizer
from tests.support.every_moment import Reading, check_same, readings
from tests.support.shared_buffer import SharedBufferChunk, SharedBufferOptimizer
from tests.support.small_runs import run, small_state


def of_a_run(
    directory: Path, monkeypatch: pytest.MonkeyPatch, *, overlap: bool, fill: str = "old", **options: Any
) -> tuple[list[Reading], DelayedChunk]:
    chunk = DelayedChunk(overlap=overlap, fill=fill)
    return readings(chunk, DelayedOptimizer(chunk), small_state(), directory, monkeypatch, **options), chunk


@pytest.mark.parametrize(
    ("options", "moments"),
    [
        ({}, {"on_checkpoint_load", "on_command", "generation", "on_eval_step_end", "on_step_end", "on_train_end"}),
        ({"is_async": True, "fill": "zero"}, {"on_checkpoint_save", "saved in checkpoint-6", "saved in checkpoint-8"}),
        ({"fails_at": 5, "events": ("on_exception",)}, {"on_exception", "after the training"}),
        ({"fails_in_evaluation": True, "events": ("on_exception", "on_run_end")}, {"in the evaluation"}),
        ({"events": ()}, {"in the evaluation", "comparison", "generation", "after the training"}),
        ({"events": ("on_step_end",)}, {"before the forward pass, state_dict", "saved in checkpoint-3"}),
        ({"events": ("on_command", "on_eval_start", "on_step_end")}, {"on_command", "generation"}),
    ],
    ids=["all", "asynchronous saves", "error", "error in evaluation", "none", "steps", "commands"],
)
def test_what_is_read_at_every_moment_does_not_depend_on_the_overlap(
    options: dict[str, Any], moments: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, _ = of_a_run(tmp_path / "off", monkeypatch, overlap=False, **options)
    seen, chunk = of_a_run(tmp_path / "on", monkeypatch, overlap=True, **options)
    check_same(seen, expected)
    assert moments <= {moment for moment, *_ in seen}
    assert chunk.num_waited_for or options.get("events") != (), "nothing has overlapped"


class Quiet(Callback):
    """Reads no weights, and says so."""

    reads_weights = False

    def on_step_end(self, context: Any) -> None:
        self.step = context.step


class Reader(Quiet):
    """Says of itself that it does."""

    reads_weights = True


class OwnLogger(JsonLogger):
    """A user's subclass of a built-in callback, of which nothing is known."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.step = state.global_step


@pytest.mark.parametrize(
    ("callback", "waits"),
    [
        (Quiet(), False),
        (PeakMemory(), False),
        (Reader(), True),
        (OwnLogger(), True),
        (lambda context: None, True),
        (None, False),
    ],
    ids=["says no", "built-in", "says yes", "subclass", "function", "none"],
)
def test_only_a_listener_that_may_read_weights_ends_the_overlap(callback: Any, waits: bool) -> None:
    chunk, manager = DelayedChunk(), CallbackManager()
    if callable(callback):
        manager.register("on_step_end", callback)
    elif callback is not None:
        manager.add(callback)
    run(small_state(train_iters=3), manager, model=chunk, optimizer=DelayedOptimizer(chunk))
    assert chunk.num_waited_for == (0 if waits else 6), "three parameters in the second step and in the third"


def test_a_model_that_is_saved_while_it_is_trained_has_its_current_weights() -> None:
    """The weights that `state_dict`, and so `save_pretrained`, gives between two steps, without any event."""
    found: list[dict[str, torch.Tensor]] = []

    def steps(chunk: DelayedChunk) -> None:
        hook = chunk.module.register_forward_pre_hook(
            lambda *_: found.append({name: one.clone() for name, one in chunk.module.out.state_dict().items()})
        )
        run(small_state(train_iters=3), model=chunk, optimizer=DelayedOptimizer(chunk))
        hook.remove()
        assert not any(module._state_dict_pre_hooks for module in chunk.modules())

    steps(DelayedChunk(overlap=False))
    expected, found = found, []
    steps(DelayedChunk(fill="zero"))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_a_feature_that_reads_weights_at_every_step_sees_the_current_ones(tmp_path: Path) -> None:
    def chain(overlap: bool) -> str:
        chunk, state = DelayedChunk(overlap=overlap), small_state(train_iters=4)
        state.cfg.checkpoint.certify, state.cfg.checkpoint.save = True, str(tmp_path / str(overlap))
        run(state, model=chunk, optimizer=DelayedOptimizer(chunk))
        return _last_hash(state)

    assert chain(overlap=True) == chain(overlap=False)


def _last_hash(state: GlobalState) -> str:
    chain: str = state.features.states(per_rank=False)["certificate"].state_dict()["chain"]
    assert chain
    return chain


@pytest.mark.parametrize("is_async", [False, True], ids=["synchronous", "asynchronous"])
def test_parameters_that_share_the_buffer_of_gradients_are_current_and_gradients_clean(
    is_async: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In MXFP8: main parameters are staged after each clearing of the buffer, and before each forced gathering."""

    def of_a_run(*, shares: bool) -> list[Reading]:
        chunk, directory = SharedBufferChunk(shares=shares), tmp_path / str(shares)
        options: dict[str, Any] = {"events": (), "is_async": is_async}
        return readings(chunk, SharedBufferOptimizer(chunk), small_state(), directory, monkeypatch, **options)

    expected = of_a_run(shares=False)
    check_same(of_a_run(shares=True), expected)
    assert len({found for *_, found in expected}) == 9, "the weights of each step are others"


def of_early_use(chunk: DelayedChunk, kind: str) -> list[float]:
    """The losses of a run whose forward step uses parameters before it calls their modules."""
    losses, manager = list[float](), CallbackManager()

    def step(data_iterator: Any, model: Any) -> Any:
        batch = next(data_iterator)
        penalty = sum(one.square().sum() for one in model.parameters()) if kind == "penalty" else 0.0
        hidden = model.module.embed(batch["tokens"]) if kind == "parts" else None
        if kind == "weight":
            penalty = model.module.out.weight.data.abs().sum()
        loss = model(**batch) + penalty + (0.0 if hidden is None else hidden.sum())
        return loss, lambda loss: (loss, batch["labels"].ne(-100).sum(), {})

    manager.add(Losses(losses))
    run(small_state(train_iters=4), manager, step=step, model=chunk, optimizer=DelayedOptimizer(chunk))
    return losses


class Losses(Quiet):
    def __init__(self, losses: list[float]) -> None:
        self.losses = losses

    def on_train_metrics(self, context: Any) -> None:
        self.losses.append(float(context.loss))


@pytest.mark.parametrize(("kind", "is_early"), [("penalty", True), ("weight", True), ("parts", False), ("none", False)])
def test_a_forward_step_that_uses_parameters_before_their_modules_waits_for_them(
    kind: str, is_early: bool, caplog: pytest.LogCaptureFixture
) -> None:
    chunk = DelayedChunk()
    assert of_early_use(chunk, kind) == of_early_use(DelayedChunk(overlap=False), kind)
    assert ("before the modules that wait for their gathers are called" in caplog.text) is is_early
    assert bool(chunk.num_waited_for) is not is_early, "a call of a part of the model is awaited by that part"
