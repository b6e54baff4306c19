import pytest

from onstep.config import ModelConfig
from onstep.errors import ConfigError
from onstep.models import build_transformer, check_model_config, ffn_hidden_size, head_width, num_query_groups


def test_sizes_left_open_follow_from_the_hidden_size_and_the_heads():
    config = ModelConfig(hidden_size=128, num_attention_heads=4)

    assert head_width(config) == 32
    assert num_query_groups(config) == 4
    assert ffn_hidden_size(config) == 384


@pytest.mark.parametrize(("hidden", "width"), [(24, 64), (192, 512), (194, 576), (896, 2432)])
def test_feed_forward_width_is_eight_thirds_rounded_up_to_a_multiple_of_64(hidden, width):
    assert ffn_hidden_size(ModelConfig(hidden_size=hidden)) == width


def test_sizes_that_are_set_are_taken():
    config = ModelConfig(kv_channels=10, num_query_groups=2, ffn_hidden_size=7)

    assert (head_width(config), num_query_groups(config), ffn_hidden_size(config)) == (10, 2, 7)


def test_a_config_that_fits_passes():
    check_model_config(ModelConfig(vocab_size=257, num_attention_heads=4, num_query_groups=2))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"vocab_size": None}, "vocab_size is None"),
        ({"vocab_size": 0}, "model.vocab_size=0 must be > 0"),
        ({"num_layers": 0}, "num_layers=0 must be > 0"),
        ({"num_layers": True}, "num_layers=True must be int"),
        ({"seq_length": 2.5}, "seq_length=2.5 must be int"),
        ({"ffn_hidden_size": -1}, "ffn_hidden_size=-1 must be > 0"),
        ({"num_query_groups": 0}, "num_query_groups=0 must be > 0"),
        ({"hidden_size": 130}, "hidden_size=130 must be a multiple of num_attention_heads=4"),
        ({"num_query_groups": 3}, "num_attention_heads=4 must be a multiple of num_query_groups=3"),
        ({"hidden_size": 12}, "a head is 3, and rotary embeddings require an even width"),
        ({"kv_channels": 5}, "a head is 5, and rotary embeddings require an even width"),
        ({"rotary_base": 0.0}, "model.rotary_base=0.0 must be > 0"),
        ({"layernorm_epsilon": float("nan")}, "model.layernorm_epsilon=nan must be a finite number"),
        ({"init_method_std": -0.1}, "model.init_method_std=-0.1 must be > 0"),
        ({"hidden_dropout": 1.0}, "hidden_dropout=1.0 must be at least 0 and below 1"),
        ({"normalization": "LayerNrom"}, "model.normalization='LayerNrom' must be .* Did you mean 'LayerNorm'"),
        ({"activation_func": "gleu"}, "Did you mean 'gelu'"),
    ],
)
def test_sizes_that_cannot_work_are_refused_with_value_and_rule(values, message):
    config = ModelConfig(**({"vocab_size": 257} | values))

    with pytest.raises(ConfigError, match=message):
        check_model_config(config)


def test_heads_need_not_divide_the_hidden_size_where_their_width_is_given():
    check_model_config(ModelConfig(vocab_size=257, hidden_size=130, kv_channels=32))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"moe_router_topk": 5}, "moe_router_topk=5 must be at most"),
        ({"moe_layer_freq": 0}, "moe_layer_freq=0 must be >= 1"),
        ({"moe_layer_freq": [1, 0]}, "for each of the 4 layers"),
        ({"moe_aux_loss_coeff": [0.1, 0.2]}, "has 2 entries"),
        ({"moe_router_load_balancing_type": "even"}, "must be one of aux_loss"),
        ({"moe_shared_expert_gate": True}, "gates a shared expert"),
        ({"num_moe_experts": None, "moe_router_topk": 3}, "num_moe_experts is null"),
        ({"moe_router_pre_softmax": True, "moe_router_score_function": "sigmoid"}, "does nothing without"),
    ],
)
def test_experts_that_cannot_work_are_refused_without_a_run(values, message):
    config = ModelConfig(**({"vocab_size": 257, "num_moe_experts": 4} | values))
    with pytest.raises(ConfigError, match=message):
        build_transformer(config)


def test_a_model_whose_router_could_not_learn_can_be_built():
    check_model_config(ModelConfig(vocab_size=257, num_moe_experts=4, moe_router_topk=1))
