import pytest
import torch

from onstep.metrics.moe_losses import REPORTED
from onstep.models.layers.router import Router
from onstep.optim import LossScaler, TrainingOptimizer
from onstep.training import train_step
from onstep.training.compute.step import Step
from onstep.training.experts.experts import Experts
from onstep.training.loop import Loop
from tests.support.expert_runs import (
    labels_of,
    mean_step,
    moe_model,
    reference_gradient,
    share_step,
    step_gradient,
    sum_step,
)
from tests.support.small_runs import RaggedRows, TinyModel, small_job, small_state, split
from tests.support.small_runs import sum_step as plain_step

SPLITS = {"1 x 8": [8], "4 x 2": [2, 2, 2, 2], "ragged": [3, 1, 4]}


def check(gradient, expected):
    for name, one in expected.items():
        torch.testing.assert_close(gradient[name].double(), one, rtol=1e-3, atol=2e-6, msg=name)


def by_labels(batches):
    counts = [labels_of(batch) for batch in batches.micro_batches]
    return [[count / sum(counts) for count in counts]]


@pytest.mark.parametrize("name", SPLITS)
@pytest.mark.parametrize(("kind", "recompute"), [("sum", None), ("sum", "full"), ("mean", None), ("share", "full")])
def test_the_gradient_of_a_step_is_that_of_the_loss_and_the_mean_of_the_auxiliary_ones(kind, name, recompute):
    batches = split(RaggedRows(8), SPLITS[name])
    model = moe_model(recompute_granularity=recompute)
    weights, size = by_labels(batches), len(SPLITS[name])
    if kind == "share":
        weights = [[1 / size] * size]
    expected, _ = reference_gradient(model, [batches.micro_batches], weights)
    total = sum(labels_of(batch) for batch in batches.micro_batches)
    step = {"sum": sum_step, "mean": mean_step, "share": share_step(total)}[kind]
    check(step_gradient(model, step, batches, small_state(batch=8)), expected)


@pytest.mark.filterwarnings("ignore:.*not a leaf Tensor.*:UserWarning")
@pytest.mark.parametrize("recompute", [None, pytest.param("full", marks=pytest.mark.slow)])
def test_compiled_blocks_have_the_gradient_of_plain_ones(recompute):
    """The scale of the auxiliary losses is known only after the forward pass."""
    batches = split(RaggedRows(8), [4, 4])
    model, other = (moe_model(num_layers=1, recompute_granularity=recompute) for _ in range(2))
    plain = step_gradient(other, sum_step, batches, small_state(batch=8))
    torch._dynamo.reset()
    for layer in model.layers:
        layer.compile(backend="aot_eager")
    compiled = step_gradient(model, sum_step, batches, small_state(batch=8))
    for name, one in plain.items():
        torch.testing.assert_close(compiled[name], one, rtol=1e-5, atol=1e-6, msg=name)
    torch._dynamo.reset()


def test_the_loss_scaler_scales_the_auxiliary_losses_too():
    batches = split(RaggedRows(8), [2, 2, 2, 2])
    model = moe_model()
    expected, _ = reference_gradient(model, [batches.micro_batches], by_labels(batches))
    scaler = LossScaler(initial_scale=1024.0)
    check(step_gradient(model, sum_step, batches, small_state(batch=8), scaler=scaler), expected)


@pytest.mark.parametrize("recompute", [None, "full"])
def test_the_losses_of_a_step_are_means_over_micro_batches_and_layers(recompute):
    batches = split(RaggedRows(8), [2, 2, 4])
    model, state = moe_model(recompute_granularity=recompute), small_state(batch=8)
    _, means = reference_gradient(model, [batches.micro_batches], by_labels(batches))
    step_gradient(model, sum_step, batches, state)
    losses = state.experts.losses(state.experts.last)
    assert {name: loss.item() for name, loss in losses.items()} == pytest.approx(
        {REPORTED[name]: mean for name, mean in means.items()}, rel=1e-5
    )


def test_a_step_that_runs_again_counts_once():
    """As a rerun of suspicious results does: forward and backward, twice, and one end."""
    batches = split(RaggedRows(8), [4, 4])
    model, state = moe_model(), small_state(batch=8, micro=4)
    optimizer = TrainingOptimizer(torch.optim.SGD(model.parameters(), lr=0.0))
    job, step = small_job(state, model, optimizer, sum_step), Step(1, batches)
    state.features.build((Experts,), job, state.world)
    loop = Loop(job)
    loop.compute(step)
    loop.train_step(step)
    for router, row in zip(state.experts.routers, state.experts.rows(state.experts.last), strict=True):
        assert row[:4].sum() == 8 * 12 * 2
        assert torch.equal(router.record.row, row)


def test_fillers_count_nothing_and_do_not_train():
    rows = split(RaggedRows(8), [4, 4])
    model, other, state = moe_model(), moe_model(), small_state(batch=8, micro=4)
    rows.is_filler[1] = True
    gradient = step_gradient(model, sum_step, rows, state)
    assert state.experts.last[:4].sum() == 4 * 12 * 2
    alone = step_gradient(other, sum_step, split(RaggedRows(4), [4]), small_state(batch=4, micro=4))
    for name, one in alone.items():
        # the filler's rows make the experts' products larger, which other kernels compute
        torch.testing.assert_close(gradient[name], one, rtol=1e-4, atol=5e-6)


def test_the_expert_bias_moves_once_a_step_by_the_load_of_all_micro_batches():
    model = moe_model(moe_router_enable_expert_bias=True, moe_router_score_function="sigmoid")
    state = small_state(batch=8)
    step_gradient(model, sum_step, split(RaggedRows(8), [2, 2, 2, 2]), state)
    for router, row in zip(state.experts.routers, state.experts.rows(state.experts.last), strict=True):
        load = row[:4]
        assert load.sum() == 8 * 12 * 2
        assert router.expert_bias.tolist() == pytest.approx((1e-3 * torch.sign(load.mean() - load)).tolist())


def test_a_step_whose_update_was_not_applied_leaves_the_bias():
    model, state = moe_model(moe_router_enable_expert_bias=True), small_state(batch=8, micro=4)

    class Refusing:
        param_groups = [{"params": list(model.parameters()), "lr": 0.1}]  # noqa: RUF012

        def zero_grad(self):
            model.zero_grad()

        def step(self):
            return False, None, None

    train_step(sum_step, split(RaggedRows(8), [4, 4]), [model], Refusing(), None, state)
    assert all(not router.expert_bias.any() for router in state.experts.routers)


def test_a_model_without_experts_has_nothing_to_do():
    state, model = small_state(), TinyModel()
    step_gradient(model, plain_step, split(RaggedRows(4), [2, 2]), state)
    assert state.experts is None


def test_counts_stay_on_the_device_until_somebody_asks():
    """The routers count into one vector, which the loop clones and adds without reading it."""
    model, state = moe_model(), small_state(batch=8, micro=4)
    for _ in range(3):
        step_gradient(model, sum_step, split(RaggedRows(8), [4, 4]), state)
    routers = [one for one in model.modules() if isinstance(one, Router)]
    assert state.experts.routers == routers
    interval = state.experts.flush()
    assert torch.equal(interval, torch.cat([router.record.row for router in routers]))
    assert state.experts.flush() is None
