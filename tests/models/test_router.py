import dataclasses

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from onstep.config import ModelConfig
from onstep.models.layers.router import Router, loss_coefficients
from onstep.models.layers.routing_record import FIGURES
from tests.support.expert_reference import balancing, sequence_balancing, z

CONFIG = ModelConfig(hidden_size=16, num_moe_experts=5, moe_router_topk=2)
ALL = {
    "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss", "global_aux_loss"],
    "moe_aux_loss_coeff": [0.5, 0.25, 0.125],
    "moe_z_loss_coeff": 0.01,
}


def router(**options):
    torch.manual_seed(0)
    one = Router(dataclasses.replace(CONFIG, **options), 5)
    with torch.no_grad():
        one.weight.copy_(torch.randn(5, 16) * 0.5)
    return one


def inputs(seed=1, batch=3):
    return torch.randn(batch, 7, 16, generator=torch.Generator().manual_seed(seed))


def figures(one):
    return dict(zip(FIGURES, one.record.row[5:].tolist(), strict=True))


@pytest.mark.parametrize("function", ["softmax", "sigmoid"])
def test_losses_equal_the_reference(function):
    one, config = router(**ALL, moe_router_score_function=function), dataclasses.replace(CONFIG, **ALL)
    config = dataclasses.replace(config, moe_router_score_function=function)
    x = inputs()
    losses = one.losses(one.logits(x))
    flat = x.flatten(0, 1)
    expected = {
        "aux_loss": balancing(config, one.weight, flat)[0],
        "seq_aux_loss": sequence_balancing(config, one.weight, x),
        "global_aux_loss": balancing(config, one.weight, flat)[0],
        "z_loss": z(one.weight, flat),
    }
    assert set(losses) == set(expected)
    for name, loss in losses.items():
        torch.testing.assert_close(loss.double(), expected[name], rtol=1e-5, atol=1e-6)


def test_the_gradient_of_a_plain_loop_is_that_of_loss_plus_coefficients_times_losses():
    one, x = router(**ALL), inputs()
    config = dataclasses.replace(CONFIG, **ALL)
    one(x).weights[:, 0].sum().backward()
    plain = router()
    main = plain(x).weights[:, 0].sum()
    aux, _ = balancing(config, plain.weight, x.flatten(0, 1))
    sequences, logs = sequence_balancing(config, plain.weight, x), z(plain.weight, x.flatten(0, 1))
    (main + 0.5 * aux + 0.25 * sequences + 0.125 * aux + 0.01 * logs).backward()
    torch.testing.assert_close(one.weight.grad, plain.weight.grad, rtol=1e-4, atol=1e-5)


def test_the_global_loss_counts_the_choices_of_the_step_so_far():
    one = router(moe_router_load_balancing_type="global_aux_loss", moe_aux_loss_coeff=1.0)
    config, seen = CONFIG, [0] * 5
    for seed in (1, 2, 3):
        x = inputs(seed)
        found = one.losses(one.logits(x))["global_aux_loss"]
        counts = balancing(config, one.weight, x.flatten(0, 1))[1]
        seen = [before + now for before, now in zip(seen, counts, strict=True)]
        expected, _ = balancing(config, one.weight, x.flatten(0, 1), choices=seen)
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)
    one.begin_step()
    x = inputs(4)
    torch.testing.assert_close(
        one.losses(one.logits(x))["global_aux_loss"].double(),
        balancing(config, one.weight, x.flatten(0, 1))[0],
        rtol=1e-5,
        atol=1e-6,
    )


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_repetition_in_the_backward_pass_counts_nothing_and_gives_the_same_gradient(reentrant):
    options = {**ALL, "moe_router_enable_expert_bias": True}
    if reentrant:  # whose first pass has no gradients, and so no losses, and must not wait for other ranks
        options["moe_router_load_balancing_type"] = "aux_loss"
        options["moe_aux_loss_coeff"] = 0.5
    plain, repeated = router(**options), router(**options)
    for seed in (1, 2):  # the second micro-batch of a step is the one whose global shares a repetition might get wrong
        x = inputs(seed).requires_grad_()
        plain(x).weights[:, 0].sum().backward()
        checkpoint(lambda x: repeated(x).weights[:, 0], x, use_reentrant=reentrant).sum().backward()
    torch.testing.assert_close(repeated.weight.grad, plain.weight.grad)
    assert torch.equal(repeated.record.row[:6], plain.record.row[:6])
    assert figures(repeated)["micro_batches"] == 2
    if not reentrant:
        assert torch.equal(repeated.record.row, plain.record.row)


def test_the_record_is_a_direct_count():
    one = router(**ALL)
    one.measures_entropy = True
    load, entropy = [0] * 5, 0.0
    for seed in (1, 2):
        x = inputs(seed)
        one(x)
        for token in x.flatten(0, 1).double():
            logits = one.weight.detach().double() @ token
            shares = torch.exp(logits) / torch.exp(logits).sum()
            entropy -= float((shares * shares.log()).sum())
            for e in shares.argsort(descending=True)[:2].tolist():
                load[e] += 1
    assert one.record.row[:5].tolist() == load
    assert figures(one)["tokens"] == 42
    assert figures(one)["micro_batches"] == 2
    assert figures(one)["entropy"] == pytest.approx(entropy, rel=1e-6)


def test_evaluation_and_fillers_count_nothing():
    one = router(**ALL)
    one.eval()
    one(inputs())
    one.train()
    one.step.counts = False
    one(inputs())
    assert one.record.row is None


def test_a_step_that_is_looked_into_again_counts_nothing():
    one = router(**ALL)
    one(inputs())
    before = one.record.row.clone()
    one.step.is_replay = True
    one(inputs(2))
    assert torch.equal(one.record.row, before)
    one.step.is_replay = False
    x, seen = inputs(3), balancing(CONFIG, one.weight, inputs().flatten(0, 1))[1]
    counts = [a + b for a, b in zip(seen, balancing(CONFIG, one.weight, x.flatten(0, 1))[1], strict=True)]
    expected, _ = balancing(CONFIG, one.weight, x.flatten(0, 1), choices=counts)
    torch.testing.assert_close(one.losses(one.logits(x))["global_aux_loss"].double(), expected, rtol=1e-5, atol=1e-6)


def test_the_bias_moves_towards_even_load():
    one = router(moe_router_enable_expert_bias=True, moe_router_bias_update_rate=0.25)
    one.update_expert_bias(torch.tensor([10.0, 4.0, 6.0, 0.0, 10.0]))
    assert one.expert_bias.tolist() == [-0.25, 0.25, 0.0, 0.25, -0.25]
    one.weight.requires_grad = False
    one.update_expert_bias(torch.tensor([10.0, 4.0, 6.0, 0.0, 10.0]))
    assert one.expert_bias.tolist() == [-0.25, 0.25, 0.0, 0.25, -0.25]


def test_coefficients_belong_to_their_types():
    assert loss_coefficients(dataclasses.replace(CONFIG, **ALL)) == {
        "aux_loss": 0.5,
        "seq_aux_loss": 0.25,
        "global_aux_loss": 0.125,
        "z_loss": 0.01,
    }
    assert loss_coefficients(dataclasses.replace(CONFIG, moe_router_load_balancing_type="none")) == {}
    assert loss_coefficients(dataclasses.replace(CONFIG, moe_aux_loss_coeff=0.1)) == {"aux_loss": 0.1}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_bias_stays_float32_and_goes_on_moving_in_a_half_precision_model(dtype):
    one = router(moe_router_enable_expert_bias=True)
    one.expert_bias.fill_(0.3)
    one.update_expert_bias(torch.tensor([9.0, 0.0, 5.0, 5.0, 6.0]))
    before = one.expert_bias.clone()
    one.to(dtype)
    assert (one.expert_bias.dtype, one.weight.dtype) == (torch.float32, dtype)
    assert torch.equal(one.expert_bias, before)
    one.update_expert_bias(torch.tensor([9.0, 0.0, 5.0, 5.0, 6.0]))
    torch.testing.assert_close(one.expert_bias, torch.tensor([0.298, 0.302, 0.3, 0.3, 0.298]))
    assert "expert_bias" in one.state_dict()
    assert one.to_empty(device="meta").expert_bias.dtype == torch.float32
