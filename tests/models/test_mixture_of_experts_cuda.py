"""On a GPU: experts give the numbers of the CPU, the grouped product those of the loop, and nothing waits for them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from onstep.config import ModelConfig
from onstep.models import Transformer, build_transformer
from onstep.models.layers import feed_forward
from onstep.models.layers.expert_products import GroupedProduct, LoopedProduct, can_group
from onstep.models.layers.feed_forward import MixtureOfExperts

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sigmoid": {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True},
    "shared": {"moe_shared_expert_intermediate_size": 16, "moe_shared_expert_gate": True},
    "biases": {"add_bias_linear": True},
    "losses": {
        "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss", "global_aux_loss"],
        "moe_aux_loss_coeff": 0.1,
        "moe_z_loss_coeff": 0.01,
    },
    "drops by weight": {"moe_expert_capacity_factor": 0.6},
    "drops by position": {"moe_expert_capacity_factor": 0.6, "moe_token_drop_policy": "position"},
    "prediction": {"mtp_num_layers": 1, "position_embedding_type": "learned_absolute"},
}
EVERY_OPTION = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
SIZES: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "vocab_size": 31,
    "seq_length": 32,
    "init_method_std": 0.2,
    "num_moe_experts": 5,
    "moe_ffn_hidden_size": 16,
}


def model_of(options: dict[str, Any]) -> Transformer:
    return build_transformer(ModelConfig(**(SIZES | options)), seed=0)


def some_tokens(seed: int = 0) -> Tensor:
    return torch.randint(0, 31, (4, 32), generator=torch.Generator().manual_seed(seed))


def loads_of(model: Transformer) -> list[Tensor]:
    totals = [one.router.routing_totals() for one in model.modules() if isinstance(one, MixtureOfExperts)]
    return [total["load"].cpu() for total in totals if total is not None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_blocks_are_the_loop(dtype: torch.dtype) -> None:
    def results(way: str) -> list[Tensor]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(feed_forward, "way_to_multiply", lambda *args: way)
            model = model_of({}).cuda()
            with torch.autocast("cuda", dtype, enabled=dtype is not torch.float32):
                loss = model(some_tokens().cuda(), some_tokens(1).cuda(), reduction="mean")
            loss.backward()
        return [loss.detach(), *(one.grad for one in model.parameters() if one.grad is not None)]

    for one, other in zip(results("blocks"), results("loop"), strict=True):
        torch.testing.assert_close(one, other, rtol=0.02, atol=1e-3 if dtype is torch.float16 else 1e-5)


@EVERY_OPTION
def test_losses_gradients_and_loads_are_those_of_the_cpu(options: dict[str, Any]) -> None:
    def step(device: str) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        model = model_of(options).double().to(device)
        loss = model(some_tokens().to(device), some_tokens(1).to(device), reduction="sum")
        loss.backward()
        gradients = [parameter.grad.cpu() for parameter in model.parameters() if parameter.grad is not None]
        return loss.detach().cpu(), gradients, loads_of(model)

    expected, found = step("cpu"), step("cuda")

    torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=1e-4)  # the loss itself is float32
    torch.testing.assert_close(found[1], expected[1], rtol=1e-4, atol=1e-4)
    assert all(torch.equal(one, other) for one, other in zip(found[2], expected[2], strict=True))


@pytest.mark.parametrize("has_bias", [False, True])
def test_the_grouped_product_is_the_loop_also_for_experts_without_rows(has_bias: bool) -> None:
    if not can_group(torch.device("cuda"), torch.bfloat16, 32, 16):
        pytest.skip("needs compute capability 8.0")
    torch.manual_seed(0)
    load = torch.tensor([0, 7, 1, 0, 24], device="cuda")

    def results(product: Any) -> list[Tensor]:
        torch.manual_seed(1)
        x = torch.randn(32, 32, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        weight = torch.randn(5, 16, 32, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        bias = torch.randn(5, 16, device="cuda", dtype=torch.bfloat16) if has_bias else None
        out = product(x, weight, bias)
        out.float().square().sum().backward()
        assert x.grad is not None
        assert weight.grad is not None
        return [out.detach(), x.grad, weight.grad]

    grouped, looped = results(GroupedProduct(load)), results(LoopedProduct(load))
    for one, other in zip(grouped, looped, strict=True):
        torch.testing.assert_close(one.float(), other.float(), rtol=0.02, atol=0.02 * other.abs().max().item())
    assert grouped[2][0].abs().max() == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, None], ids=str)
@EVERY_OPTION
def test_a_step_does_not_wait_for_the_device(options: dict[str, Any], dtype: torch.dtype | None) -> None:
    model = model_of(options).cuda()
    tokens = some_tokens().cuda()

    def step() -> None:
        with torch.autocast("cuda", dtype, enabled=dtype is not None):
            loss = model(tokens, tokens, reduction="sum")
        loss.backward()

    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
