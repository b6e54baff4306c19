"""What is done after a step beside training: when, in which order, and that it leaves nothing behind."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from onstep import CallbackManager
from onstep.distributed import World
from onstep.errors import ReplicaMismatchError
from onstep.training import (
    GlobalState,
    evaluate,
    maybe_check_weight_hash_across_dp_replicas,
    maybe_report_stragglers,
    maybe_run_manual_gc,
    post_training_step_callbacks,
    weight_hashes,
)
from onstep.training.verification.weight_hash import check_param_hashes_across_dp_replicas
from tests.support.small_runs import TinyModel, eval_loader, run, small_state, sum_step


class Straggler:
    """A timer that keeps what it was asked to report."""

    def __init__(self) -> None:
        self.reports: list[tuple[float, int]] = []

    def report(self, flops: float, log_interval: int) -> bool:
        self.reports.append((flops, log_interval))
        return False


class Replicas(World):
    """A world whose other ranks hold what `others` says, by rank."""

    def __init__(self, *others: torch.nn.Module) -> None:
        super().__init__(rank=0, size=len(others) + 1)
        self.others = others

    def gather(self, item: Any) -> list[Any]:
        return [item, *((weight_hashes([other]), {}) for other in self.others)]


@pytest.fixture
def collections() -> Iterator[list[int]]:
    """The generation of each collection that runs by hand or by itself."""
    seen: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            seen.append(info["generation"])

    gc.callbacks.append(note)
    yield seen
    gc.callbacks.remove(note)


def test_it_has_the_documented_parameters() -> None:
    assert list(inspect.signature(post_training_step_callbacks).parameters) == [
        "model",
        "num_floating_point_operations_since_last_log_event",
        "straggler_timer",
        "iteration",
        "prof",
        "config",
        "should_toggle_forward_pre_hook",
        "nsys_nvtx_context",
    ]


def test_the_flops_of_a_report_are_counted_anew() -> None:
    """Megatron Bridge zeroed its own copy only: the second report had the FLOPs of the first in it again."""
    config = small_state(train_iters=6).cfg
    config.straggler.log_straggler, config.logger.log_interval = True, 2
    timer, flops = Straggler(), 0.0
    for step in range(1, 6):
        flops = post_training_step_callbacks([], flops + 10.0, timer, step, None, config, False)
    assert timer.reports == [(20.0, 2), (20.0, 2)]
    assert flops == 10.0


@pytest.mark.parametrize(("log_straggler", "interval"), [(False, 2), (True, 0), (True, None), (True, 3)])
def test_no_report_leaves_the_flops(log_straggler: bool, interval: int | None) -> None:
    timer = Straggler()
    assert maybe_report_stragglers(interval, log_straggler, timer, 4, 7.0) == 7.0
    assert timer.reports == []


def test_features_are_built_only_where_they_are_wanted() -> None:
    state = small_state(train_iters=1)
    assert not {"manual_gc", "weight_hashes", "stragglers", "profilers", "device_sync"} & built_by(state)
    state.cfg.train.manual_gc_interval = 3
    assert "manual_gc" not in built_by(state), "collection is not manual"
    state.cfg.train.manual_gc = True
    assert "manual_gc" in built_by(state)


def built_by(state: GlobalState) -> set[str]:
    """Names of the features that a training of `state` has."""
    run(state)
    return {feature.name for feature in state.features.built}


def test_garbage_is_collected_at_its_steps_only_and_by_itself_again_afterwards(collections: list[int]) -> None:
    by_step: dict[int, int] = {}
    manager = CallbackManager()
    manager.register(
        "on_step_begin", lambda context: by_step.update({context.state.train_state.step: len(collections)})
    )
    manager.register("on_train_end", lambda _: by_step.update({6: len(collections)}))
    run(small_state(train_iters=6, manual_gc=True, manual_gc_interval=2), manager)
    found = [by_step[step + 1] - by_step[step] for step in range(6)]
    assert found == [0, 1, 0, 1, 0, 1]
    assert gc.isenabled()


@pytest.mark.parametrize("collects", [True, False])
def test_an_evaluation_is_collected_around(collections: list[int], collects: bool) -> None:
    around: list[int] = []
    manager = CallbackManager()
    manager.register("on_step_end", lambda _: around.append(len(collections)))
    manager.register("on_eval_start", lambda _: around.append(len(collections)))
    manager.register("on_train_end", lambda _: around.append(len(collections)))
    state = small_state(train_iters=1, manual_gc=True, manual_gc_eval=collects)
    state.cfg.validation.eval_interval = 1
    run(state, manager, valid=eval_loader())
    before, after = around[1] - around[0], around[2] - around[1]
    assert (before, after) == ((1, 1) if collects else (0, 0))
    if collects:
        assert collections[around[0]] == 2, "all generations before it"
        assert collections[around[1]] == 0, "the youngest one after it"


def test_collecting_by_hand_needs_an_interval(collections: list[int]) -> None:
    gc.disable()
    try:
        maybe_run_manual_gc(True, 0, 4)
        maybe_run_manual_gc(False, 2, 4)
        maybe_run_manual_gc(True, 3, 4)
        assert collections == []
        maybe_run_manual_gc(True, 2, 4)
        assert collections == [2]
    finally:
        gc.enable()


def test_the_hash_of_a_weight_changes_with_its_lowest_bit() -> None:
    model = TinyModel()
    before = weight_hashes([model])
    assert before.keys() == {"embed.weight", "out.weight", "out.bias"}
    with torch.no_grad():
        model.out.bias.view(torch.int32)[3] ^= 1
    after = weight_hashes([model])
    assert [name for name in before if before[name] != after[name]] == ["out.bias"]


def test_frozen_weights_are_hashed_and_tied_ones_once() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    model[0].bias.requires_grad_(False)
    assert weight_hashes([model]).keys() == {"0.weight", "0.bias"}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_weights_of_any_type_have_a_hash(dtype: torch.dtype) -> None:
    one, other = TinyModel(dtype=dtype), TinyModel(dtype=dtype)
    assert weight_hashes([one]) == weight_hashes([other])
    with torch.no_grad():
        other.embed.weight[2, 1] += 1
    assert weight_hashes([one])["embed.weight"] != weight_hashes([other])["embed.weight"]


def test_the_replica_that_differs_from_the_majority_is_named() -> None:
    models = [TinyModel() for _ in range(3)]
    with torch.no_grad():
        models[0].embed.weight[0, 0] += 1e-3
    with pytest.raises(ReplicaMismatchError) as error:
        check_param_hashes_across_dp_replicas([models[0]], Replicas(models[1], models[2]), 12)
    assert "Parameter hashes not matching across DP replicas after 12 iterations" in str(error.value)
    assert "rank 0 differs in embed.weight." in str(error.value)


def test_several_replicas_and_many_weights_are_named_shortly() -> None:
    models = [TinyModel(), TinyModel(), TinyModel(seed=1)]
    with pytest.raises(ReplicaMismatchError, match=r"rank 2 differs in embed.weight, out.weight, out.bias\."):
        check_param_hashes_across_dp_replicas([models[0]], Replicas(*models[1:]))


def test_equal_replicas_are_said_to_match_at_the_interval(capsys: pytest.CaptureFixture[str]) -> None:
    for step in range(1, 5):
        maybe_check_weight_hash_across_dp_replicas([TinyModel()], None, 2, step, False, Replicas(TinyModel()))
    assert capsys.readouterr().out.splitlines() == [
        ">>> Weight hashes match after 2 iterations...",
        ">>> Weight hashes match after 4 iterations...",
    ]


def test_a_run_compares_its_weights_at_the_start_too(capsys: pytest.CaptureFixture[str]) -> None:
    run(small_state(train_iters=4, check_weight_hash_across_dp_replicas_interval=3))
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith(">>>")] == [
        ">>> Weight hashes match after 0 iterations...",
        ">>> Weight hashes match after 3 iterations...",
    ]


def test_waiting_and_giving_memory_back_change_no_weight() -> None:
    plain, kept = TinyModel(), TinyModel()
    run(small_state(train_iters=3), model=plain)
    run(small_state(train_iters=3, train_sync_interval=1, empty_unused_memory_level=2), model=kept)
    assert weight_hashes([plain]) == weight_hashes([kept])


@pytest.mark.parametrize(("level", "given_back"), [(0, []), (1, [1, 2, 3]), (2, [1, 2, 3])])
def test_memory_is_given_back_after_each_batch_of_an_evaluation(
    monkeypatch: pytest.MonkeyPatch, level: int, given_back: list[int]
) -> None:
    batches: list[int] = []
    seen: list[int] = []
    manager = CallbackManager()
    manager.register("on_eval_step_start", lambda _: batches.append(0))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: seen.append(len(batches)))
    state = small_state(empty_unused_memory_level=level)
    evaluate(state, sum_step, eval_loader(), [TinyModel()], None, None, callback_manager=manager)
    assert len(batches) == 3
    assert seen == given_back


@pytest.mark.skipif(not torch.cuda.is_available(), reason="takes a CUDA GPU")
@pytest.mark.parametrize(("level", "returns"), [(0, False), (1, True), (2, True)])
def test_the_cache_of_a_gpu_is_emptied(level: int, returns: bool) -> None:
    reserved: list[int] = []

    class Hungry(TinyModel):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
            return super().forward(*args, **kwargs)

    state = small_state(train_iters=2, empty_unused_memory_level=level)
    state.world.device = torch.device("cuda")
    manager = CallbackManager()
    manager.register("on_pre_optimizer_step", lambda _: reserved.append(torch.cuda.memory_reserved()))
    run(state, manager, model=Hungry().cuda())
    assert (max(reserved) < 64 << 20) is returns
