import dataclasses

import pytest
import torch

from onstep.config import ModelConfig
from onstep.models import build_transformer
from onstep.models.layers import feed_forward
from onstep.models.layers.expert_products import Blocks, LoopedProduct, can_group, way_to_multiply
from onstep.models.layers.feed_forward import MixtureOfExperts, is_moe_layer
from tests.support.expert_reference import layer

SIZES = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "ffn_hidden_size": 32, "vocab_size": 40}
CONFIG = ModelConfig(**SIZES, num_moe_experts=5, moe_ffn_hidden_size=8)

OPTIONS = {
    "plain": {},
    "pre-softmax": {"moe_router_pre_softmax": True, "moe_router_topk_scaling_factor": 2.5},
    "sigmoid": {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True, "moe_router_topk": 3},
    "sigmoid of one": {"moe_router_score_function": "sigmoid", "moe_router_topk": 1},
    "softmax with bias": {"moe_router_enable_expert_bias": True},
    "shared": {"moe_shared_expert_intermediate_size": 12, "moe_shared_expert_gate": True},
    "shared without gate": {"moe_shared_expert_intermediate_size": 12},
    "biases": {"add_bias_linear": True},
    "two matrices": {"gated_linear_unit": False, "activation_func": "relu2", "add_bias_linear": True},
    "drops by weight": {"moe_expert_capacity_factor": 0.6},
    "drops by position": {"moe_expert_capacity_factor": 0.6, "moe_token_drop_policy": "position"},
    "drops with biases": {"moe_expert_capacity_factor": 0.6, "add_bias_linear": True},
    "room for all": {"moe_expert_capacity_factor": 5.0},
    "room for more than any": {"moe_expert_capacity_factor": 1e300},
}


def built(dtype=torch.float32, **options):
    config = dataclasses.replace(CONFIG, **options)
    torch.manual_seed(0)
    moe = MixtureOfExperts(config, 0).to(dtype)
    with torch.no_grad():  # as they are drawn, a mistake in the second matrix or a bias would not show
        for parameter in moe.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
        if moe.router.expert_bias is not None:
            moe.router.expert_bias.copy_(torch.randn(5) * 0.3)
    return config, moe


def inputs(dtype=torch.float32):
    return torch.randn(3, 7, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)


@pytest.fixture(params=["grouped", "blocks", "loop"])
def _way(request, monkeypatch):
    monkeypatch.setattr(feed_forward, "way_to_multiply", lambda *args: request.param)


@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize("name", OPTIONS)
def test_a_layer_gives_what_its_experts_give_token_by_token(name):
    config, moe = built(**OPTIONS[name])
    with torch.no_grad():
        torch.testing.assert_close(moe(inputs()).double(), layer(config, moe, inputs()), rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize("name", ["plain", "sigmoid", "shared", "biases", "drops by weight"])
def test_gradients_are_those_of_the_reference(name):
    config, moe = built(**OPTIONS[name])
    target = torch.randn(3, 7, 16, dtype=torch.float64)
    (layer(config, moe, inputs()) * target).sum().backward()
    expected = {name: p.grad.clone() for name, p in moe.named_parameters()}
    moe.zero_grad()
    x = inputs().requires_grad_()
    (moe(x) * target.float()).sum().backward()
    for name, parameter in moe.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-3, atol=1e-5)
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("load", [[0, 0, 64, 0, 0], [64, 0, 0, 0, 0], [13, 13, 13, 13, 12], [1, 0, 1, 0, 62], [0] * 5])
def test_blocks_hold_every_row_whatever_the_loads(load):
    torch.manual_seed(0)
    rows, weight, bias = torch.randn(sum(load), 8), torch.randn(5, 6, 8), torch.randn(5, 6)
    weights, biases = [weight.clone().requires_grad_() for _ in "ab"], [bias.clone().requires_grad_() for _ in "ab"]
    load = torch.tensor(load)
    blocks = Blocks(load, len(rows))
    expert = torch.arange(5).repeat_interleave(load)
    rank = torch.arange(len(rows)) - (load.cumsum(0) - load)[expert]
    slots = blocks.first[expert] * blocks.num_block_rows + rank
    assert len(set(slots.tolist())) == len(rows)
    assert all(slots < blocks.num_blocks * blocks.num_block_rows)
    padded = torch.zeros(blocks.num_blocks * blocks.num_block_rows, 8).index_copy(0, slots, rows)
    out = blocks.product(padded.view(blocks.num_blocks, -1, 8), weights[0], biases[0]).flatten(0, 1)[slots]
    expected = LoopedProduct(load)(rows, weights[1], biases[1])
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    for result in (out, expected):
        result.square().sum().backward()
    torch.testing.assert_close(weights[0].grad, weights[1].grad, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(biases[0].grad, biases[1].grad, rtol=1e-4, atol=1e-4)


def test_an_accelerator_is_waited_for_only_where_that_is_less_than_padding():
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    for dtype in (torch.float32, torch.float16, torch.float64):
        assert way_to_multiply(cuda, dtype, 4096, 8, 256, 512) == "blocks"
        assert way_to_multiply(cuda, dtype, 32768, 8, 768, 3072) == "loop", "padding costs more than a wait"
        assert way_to_multiply(cuda, dtype, 64, 512, 512, 512) == "loop", "blocks would copy 1.5 GiB of weights"
    assert way_to_multiply(cpu, torch.float32, 4096, 8, 256, 512) == "grouped"
    assert way_to_multiply(cpu, torch.float64, 4096, 8, 256, 512) == "loop", "a CPU does not wait"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("biases", [True, False])
@pytest.mark.parametrize("way", ["grouped", "blocks"])
def test_compiled_experts_have_the_bits_of_plain_ones(dtype, biases, way, monkeypatch):
    monkeypatch.setattr(feed_forward, "way_to_multiply", lambda *args: way)
    _, moe = built(dtype, add_bias_linear=biases)
    routing = moe.router(inputs(dtype))
    routing = dataclasses.replace(routing, weights=routing.weights.detach())

    def results(experts):
        moe.zero_grad()
        x = inputs(dtype).flatten(0, 1).requires_grad_()
        out = experts(x, routing)
        out.square().sum().backward()
        return [out, x.grad, *(parameter.grad for parameter in moe.experts.parameters())]

    torch._dynamo.reset()
    plain = results(moe.experts)
    compiled = results(torch.compile(moe.experts, backend="aot_eager", fullgraph=True))
    assert all(torch.equal(one, other) for one, other in zip(plain, compiled, strict=True))
    torch._dynamo.reset()


def test_in_float64_the_layer_is_exact():
    config, moe = built(torch.float64)
    assert not can_group(torch.device("cpu"), torch.float64, 16, 8)
    with torch.no_grad():
        torch.testing.assert_close(
            moe(inputs(torch.float64)), layer(config, moe, inputs(torch.float64)), rtol=1e-12, atol=1e-12
        )


def test_rows_that_torch_cannot_align_take_the_loop():
    assert can_group(torch.device("cpu"), torch.bfloat16, 16, 8)
    assert not can_group(torch.device("cpu"), torch.bfloat16, 16, 12)
    config, moe = built(moe_ffn_hidden_size=6)
    with torch.no_grad():
        torch.testing.assert_close(moe(inputs()).double(), layer(config, moe, inputs()), rtol=1e-4, atol=1e-5)


def test_under_autocast_experts_compute_in_bfloat16_and_the_router_in_float32():
    config, moe = built()
    x = inputs()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        out, logits, chosen = moe(x), moe.router.logits(x), moe.router(x).experts
    assert out.dtype == torch.bfloat16
    assert torch.equal(logits, x @ moe.router.weight.T)
    assert torch.equal(chosen, moe.router(x).experts)
    torch.testing.assert_close(out.double(), layer(config, moe, x), rtol=0.05, atol=0.05)


def test_the_router_computes_in_float32_with_bfloat16_weights():
    _, moe = built(torch.bfloat16)
    x = inputs(torch.bfloat16)
    logits = moe.router.logits(x)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, x.float() @ moe.router.weight.float().T)


@pytest.mark.parametrize("options", [{}, {"moe_grouped_gemm": False}, {"moe_expert_capacity_factor": 1.0}])
def test_an_expert_without_tokens_has_a_gradient_of_zero(options):
    _, moe = built(**options, moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True)
    moe.router.expert_bias[3] = -100.0
    moe(inputs()).square().sum().backward()
    for weight in (moe.experts.gate_weight, moe.experts.up_weight, moe.experts.down_weight):
        assert weight.grad[3].abs().max() == 0
        assert weight.grad[0].abs().max() > 0


@pytest.mark.parametrize("policy", ["probs", "position"])
def test_dropped_choices_are_counted_and_add_nothing(policy):
    _, moe = built(moe_expert_capacity_factor=0.5, moe_token_drop_policy=policy)
    moe(inputs())
    totals = moe.router.routing_totals()
    capacity = 5  # ceil(21 tokens * 2 choices / 5 experts * 0.5)
    assert totals["dropped"] == (totals["load"] - capacity).clamp(min=0).sum() > 0
    assert totals["load"].sum() == 42


def test_the_bias_chooses_and_does_not_weigh():
    _, moe = built(moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True)
    logits = moe.router.logits(inputs()).flatten(0, 1)
    moe.router.expert_bias.zero_()
    moe.router.expert_bias[2] = 10.0
    routing = moe.router.choose(logits)
    assert (routing.experts[:, 0] == 2).all()
    scores = torch.sigmoid(logits).gather(1, routing.experts)
    torch.testing.assert_close(routing.weights, scores / scores.sum(1, keepdim=True))


@pytest.mark.parametrize(
    ("frequency", "expected"),
    [(1, [1, 1, 1, 1, 1]), (2, [1, 0, 1, 0, 0]), (3, [1, 0, 0, 1, 1]), ([0, 1, 1, 0], [0, 1, 1, 0, 0])],
)
def test_layers_with_experts_follow_the_frequency_and_further_ones_the_last(frequency, expected):
    config = dataclasses.replace(CONFIG, num_layers=4, moe_layer_freq=frequency)
    assert [is_moe_layer(config, index) for index in range(5)] == [bool(one) for one in expected]
    assert not is_moe_layer(dataclasses.replace(config, num_moe_experts=None), 0)


def test_a_transformer_has_experts_where_the_configuration_says_and_starts_without_a_bias():
    config = dataclasses.replace(CONFIG, moe_layer_freq=[0, 1], moe_router_enable_expert_bias=True)
    model = build_transformer(config, seed=3)
    assert [isinstance(one.feed_forward, MixtureOfExperts) for one in model.layers] == [False, True]
    moe = model.layers[1].feed_forward
    assert moe.router.layer_index == 1
    assert torch.equal(moe.router.expert_bias, torch.zeros(5))
    assert "layers.1.feed_forward.router.expert_bias" in model.state_dict()
    assert moe.experts.up_weight.std().item() == pytest.approx(0.02, rel=0.2)
    assert moe.experts.down_weight.std().item() == pytest.approx(0.02 / 2, rel=0.2)


@pytest.mark.parametrize("policy", ["probs", "position"])
def test_outside_training_nothing_is_dropped_and_no_token_sees_a_later_one(policy):
    options = {"moe_expert_capacity_factor": 0.5, "moe_token_drop_policy": policy, "init_method_std": 0.3}
    model = build_transformer(dataclasses.replace(CONFIG, **options), seed=0).eval()
    plain = build_transformer(dataclasses.replace(CONFIG, init_method_std=0.3), seed=0).eval()
    tokens = torch.randint(0, 40, (1, 20), generator=torch.Generator().manual_seed(0))
    other = tokens.clone()
    other[0, -1] = (other[0, -1] + 5) % 40
    with torch.no_grad():
        # batches of other sizes for an expert go through other kernels
        torch.testing.assert_close(model(tokens), plain(tokens), rtol=0, atol=1e-5)
        torch.testing.assert_close(model(tokens)[:, :-1], model(other)[:, :-1], rtol=0, atol=1e-5)
        assert not torch.allclose(model.train()(tokens), plain(tokens), atol=1e-3)
