import pytest
import torch
from torch import nn

from onstep.config import ModelConfig
from onstep.distributed.pipeline.seats import Seat
from onstep.errors import ConfigError
from onstep.models.stages import cut
from onstep.models.transformer import build_transformer
from onstep.training import freeze_moe_router
from onstep.training.stages.left_out import check_stages
from tests.support.expert_runs import moe_model, step_gradient, sum_step
from tests.support.small_configs import SIZES
from tests.support.small_runs import RaggedRows, small_state, split

from onstep.training import _ensure_model_list, _freeze_parameter_if_present  # isort: skip


class Wrapper(nn.Module):
    """Holds what it wraps as data-parallel wrappers do."""

    def __init__(self, module):
        super().__init__()
        self.module = module


def megatron_model():
    """The attribute paths of Megatron's models: a layer with everything, one without a router, one without `mlp`."""
    full, dense = nn.Module(), nn.Module()
    full.mlp, dense.mlp = nn.Module(), nn.Linear(2, 2)
    full.mlp.router, full.mlp.shared_experts = nn.Linear(4, 3), nn.Module()
    full.mlp.shared_experts.gate_weight = nn.Parameter(torch.ones(1, 4))
    full.mlp.shared_experts.gate_bias = None
    full.mlp.shared_experts.up = nn.Linear(4, 4)
    model = nn.Module()
    model.decoder = nn.Module()
    model.decoder.layers = nn.ModuleList([full, dense, nn.Identity()])
    return model


def frozen(model):
    return {name for name, parameter in model.named_parameters() if not parameter.requires_grad}


@pytest.mark.parametrize("wrap", [lambda model: model, lambda model: Wrapper(Wrapper(model))])
def test_routers_and_gates_of_megatrons_models_are_frozen_and_nothing_else(wrap):
    model = megatron_model()
    chunks = [wrap(model)]
    assert freeze_moe_router(chunks) is chunks
    layer = "decoder.layers.0.mlp"
    assert frozen(model) == {f"{layer}.router.weight", f"{layer}.router.bias", f"{layer}.shared_experts.gate_weight"}


@pytest.mark.parametrize("wrap", [lambda model: model, Wrapper])
def test_routers_and_gates_of_our_models_are_frozen(wrap):
    model = moe_model(
        moe_layer_freq=[0, 1], moe_shared_expert_intermediate_size=8, moe_shared_expert_gate=True, mtp_num_layers=1
    )
    assert freeze_moe_router(wrap(model))[0] is not None
    names = ("router.weight", "shared_experts.gate_weight")
    places = ("layers.1.feed_forward", "mtp.depths.0.layer.feed_forward")
    assert frozen(model) == {f"{place}.{name}" for place in places for name in names}


def test_frozen_routers_and_their_biases_do_not_move():
    model = moe_model(moe_router_enable_expert_bias=True, moe_router_bias_update_rate=0.5)
    freeze_moe_router(model)
    router = model.layers[0].feed_forward.router
    before = router.weight.detach().clone()
    gradient = step_gradient(model, sum_step, split(RaggedRows(8), [4, 4]), small_state(batch=8, micro=4))
    assert torch.equal(router.weight, before)
    assert not router.expert_bias.any()
    assert gradient["layers.0.feed_forward.experts.up_weight"].abs().max() > 0


def test_a_router_that_is_not_frozen_moves():
    model = moe_model(moe_router_enable_expert_bias=True)
    gradient = step_gradient(model, sum_step, split(RaggedRows(8), [4, 4]), small_state(batch=8, micro=4))
    assert gradient["layers.0.feed_forward.router.weight"].abs().max() > 0
    assert model.layers[0].feed_forward.router.expert_bias.any()


def test_what_is_not_there_is_skipped():
    _freeze_parameter_if_present(nn.Identity(), "weight")
    _freeze_parameter_if_present(nn.Linear(2, 2, bias=False), "bias")
    linear = nn.Linear(2, 2)
    _freeze_parameter_if_present(linear, "bias")
    assert frozen(linear) == {"bias"}
    plain = nn.Linear(2, 2)
    assert freeze_moe_router(plain) == [plain]
    assert not frozen(plain)


def test_a_model_becomes_a_list_and_a_list_stays():
    model = nn.Linear(2, 2)
    chunks = [model]
    assert _ensure_model_list(chunks) is chunks
    assert _ensure_model_list(model) == [model]


def test_stages_of_a_pipeline_that_are_frozen_on_a_rank_are_refused_by_their_layers():
    """Each rank has an optimizer, which must have a parameter."""
    whole = build_transformer(ModelConfig(**{**SIZES, "num_layers": 4}), seed=0)
    for name, parameter in whole.named_parameters():
        parameter.requires_grad_(name == "layers.1.attention_norm.weight")
    first, second = (cut(whole, [Seat(number, (range(2), range(2, 4)))]) for number in range(2))
    check_stages([whole])
    check_stages(first)
    with pytest.raises(ConfigError, match="this rank of a pipeline, those of layers 2, 3, are frozen, but each rank"):
        check_stages(second)
