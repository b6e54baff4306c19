import dataclasses
import re

import pytest

from onstep.config import ConfigContainer, validate
from onstep.errors import ConfigError


def check(**model):
    config = ConfigContainer()
    config.train.train_iters, config.train.micro_batch_size, config.train.global_batch_size = 4, 1, 1
    config.optimizer.lr = 1e-3
    config.model = dataclasses.replace(config.model, **model)
    validate(config)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"num_moe_experts": 4, "moe_router_topk": 5}, "moe_router_topk=5 must be at most model.num_moe_experts=4"),
        ({"num_moe_experts": 4, "moe_router_topk": 1}, "moe_router_topk=1 needs model.moe_router_pre_softmax=true"),
        (
            {"num_moe_experts": 4, "moe_router_load_balancing_type": "seq_aux_los"},
            "must be one of aux_loss | seq_aux_loss | global_aux_loss | none. Did you mean 'seq_aux_loss'?",
        ),
        (
            {
                "num_moe_experts": 4,
                "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"],
                "moe_aux_loss_coeff": [0.1],
            },
            "model.moe_aux_loss_coeff=[0.1] has 1 entries and model.moe_router_load_balancing_type=",
        ),
        ({"num_moe_experts": 4, "moe_router_load_balancing_type": ["none", "aux_loss"]}, "'none' alone"),
        ({"num_moe_experts": 4, "moe_router_load_balancing_type": ["aux_loss"] * 2}, "name each type once"),
        ({"num_moe_experts": 4, "moe_aux_loss_coeff": -0.1}, "model.moe_aux_loss_coeff=-0.1 must be >= 0"),
        ({"num_moe_experts": 4, "moe_layer_freq": [1, 0]}, "a 0 or 1 for each of the 4 layers"),
        ({"num_moe_experts": 4, "moe_layer_freq": [1, 0, 2, 0]}, "a 0 or 1 for each of the 4 layers"),
        ({"num_moe_experts": 4, "moe_layer_freq": [0, 0, 0, 0]}, "leaves no layer with experts"),
        ({"num_moe_experts": 4, "moe_layer_freq": 0}, "model.moe_layer_freq=0 must be >= 1"),
        ({"num_moe_experts": 4, "moe_shared_expert_gate": True}, "set model.moe_shared_expert_intermediate_size"),
        (
            {"num_moe_experts": 4, "moe_router_topk_scaling_factor": 0.0},
            "moe_router_topk_scaling_factor=0.0 must be > 0",
        ),
        (
            {"moe_aux_loss_coeff": 0.1},
            "model.moe_aux_loss_coeff=0.1 is an option of experts, but model.num_moe_experts",
        ),
        ({"moe_router_topk": 4, "moe_z_loss_coeff": 0.1}, "are options of experts, but model.num_moe_experts is null"),
        ({"mtp_num_layers": 256}, "model.mtp_num_layers=256 must be below model.seq_length=256"),
        ({"num_moe_experts": 0}, "model.num_moe_experts=0 must be > 0"),
        ({"num_moe_experts": 2, "moe_expert_capacity_factor": 0.0}, "model.moe_expert_capacity_factor=0.0 must be > 0"),
        (
            {"num_moe_experts": 4, "moe_router_bias_update_rate": 0.1},
            "model.moe_router_bias_update_rate=0.1 does nothing without moe_router_enable_expert_bias=true",
        ),
        (
            {"num_moe_experts": 4, "moe_router_pre_softmax": True, "moe_router_score_function": "sigmoid"},
            "model.moe_router_pre_softmax=True does nothing without moe_router_score_function=softmax",
        ),
        (
            {"num_moe_experts": 4, "moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.1},
            "model.moe_aux_loss_coeff=0.1 does nothing without a moe_router_load_balancing_type;",
        ),
        (
            {"num_moe_experts": 4, "moe_token_drop_policy": "position"},
            "model.moe_token_drop_policy=position does nothing without a moe_expert_capacity_factor",
        ),
        ({"mtp_loss_scaling_factor": 0.2}, "model.mtp_loss_scaling_factor=0.2 weights the loss of"),
        ({"num_moe_experts": 2, "moe_token_drop_policy": "prob"}, "Did you mean 'probs'?"),
    ],
)
def test_options_that_do_not_go_together_are_refused_with_value_and_remedy(model, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        check(**model)


@pytest.mark.parametrize(
    "model",
    [
        {},
        {"num_moe_experts": 4},
        {"num_moe_experts": 4, "moe_router_topk": 1, "moe_router_pre_softmax": True},
        {"num_moe_experts": 4, "moe_router_topk": 1, "moe_router_score_function": "sigmoid"},
        {"num_moe_experts": 4, "moe_layer_freq": [0, 1, 0, 1], "moe_router_load_balancing_type": "none"},
        {
            "num_moe_experts": 4,
            "moe_router_load_balancing_type": ["seq_aux_loss", "global_aux_loss"],
            "moe_aux_loss_coeff": [0.1, 0.2],
        },
        {"num_moe_experts": 4, "moe_shared_expert_intermediate_size": 64, "moe_shared_expert_gate": True},
        {"num_moe_experts": 4, "moe_router_enable_expert_bias": True, "moe_router_bias_update_rate": 0.1},
        {"num_moe_experts": 4, "moe_router_load_balancing_type": ["none"], "moe_aux_loss_coeff": [0.0]},
        {"num_moe_experts": 4, "moe_expert_capacity_factor": 1.0, "moe_token_drop_policy": "position"},
        {"mtp_num_layers": 2, "mtp_loss_scaling_factor": 0.2},
    ],
)
def test_options_that_go_together_are_taken(model):
    check(**model)
