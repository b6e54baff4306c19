import copy
import dataclasses

import pytest
import torch
from torch.nn.functional import cross_entropy

from onstep.config import ModelConfig
from onstep.errors import ConfigError
from onstep.metrics.model_shape import ModelShape
from onstep.models import build_transformer, generate, make_value_model

CONFIG = ModelConfig(
    num_layers=2,
    hidden_size=16,
    num_attention_heads=2,
    ffn_hidden_size=24,
    vocab_size=30,
    seq_length=12,
    init_method_std=0.2,
    mtp_num_layers=2,
    mtp_loss_scaling_factor=0.5,
)


def batch():
    tokens = torch.randint(0, 30, (3, 13), generator=torch.Generator().manual_seed(0))
    tokens, labels = tokens[:, :-1], tokens[:, 1:].clone()
    labels[1, 4:7] = -100
    labels[2, :] = -100
    return tokens, labels


def depth_losses(model, tokens, labels, documents=None):
    """The sums of the depths' losses, position by position: the targets and tokens `depth` places further on."""
    hidden = model.hidden_states(tokens, document_ids=documents)
    sums, counts = [], []
    for depth, module in enumerate(model.mtp.depths, start=1):
        later = torch.zeros_like(tokens)
        later[:, :-depth] = tokens[:, depth:]
        embedded = model.embedding(later)
        if model.position_embedding is not None:
            embedded = embedded + model.position_embedding.weight[positions_of(tokens, documents, depth)]
        x = torch.cat([module.embedding_norm(embedded), module.hidden_norm(hidden)], dim=-1)
        x = module.projection(x)
        context = context_of(model, tokens, documents)
        hidden = module.final_norm(module.layer(x, context))
        logits = model.logits(hidden)
        total, count = 0.0, 0
        for row in range(tokens.shape[0]):
            for t in range(tokens.shape[1] - depth):
                target = int(labels[row, t + depth])
                crosses = documents is not None and documents[row, t] != documents[row, t + depth]
                if target != -100 and not crosses:
                    total, count = total + cross_entropy(logits[row, t], torch.tensor(target)), count + 1
        sums.append(total)
        counts.append(count)
    return sums, counts


def positions_of(tokens, documents, depth):
    """Of the token `depth` places further on, counted in its own document; 0 behind the end."""
    ids = torch.zeros_like(tokens) if documents is None else documents
    rows = [[[int(one) for one in row[:t]].count(int(row[t])) for t in range(len(row))] for row in ids]
    return torch.tensor([row[depth:] + [0] * depth for row in rows])


def context_of(model, tokens, documents):
    from onstep.models.layers.sequence_context import chosen_positions, sequence_context

    return sequence_context(model.rotary, tokens, None, chosen_positions(None, documents), documents)


def gradients(model):
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("reduction", ["sum", "none"])
@pytest.mark.parametrize("recompute", [None, "full"])
@pytest.mark.parametrize("positions", ["rope", "learned_absolute"])
def test_gradients_are_those_of_the_main_loss_and_the_weighted_depths(reduction, packed, recompute, positions):
    options = {"recompute_granularity": recompute, "position_embedding_type": positions}
    model = build_transformer(dataclasses.replace(CONFIG, **options), seed=0).double()
    tokens, labels = batch()
    documents = (torch.arange(12) // 5).expand(3, 12).contiguous() if packed else None
    reference = copy.deepcopy(model)
    loss = model(tokens, labels, reduction=reduction, document_ids=documents).sum()
    (loss / 17).backward()

    main = cross_entropy(
        reference.logits(reference.hidden_states(tokens, document_ids=documents)).flatten(0, 1).float(),
        labels.flatten(),
        reduction="sum",
    )
    sums, counts = depth_losses(reference, tokens, labels, documents)
    ((main + 0.5 / 2 * sum(sums)) / 17).backward()
    torch.testing.assert_close(loss, main)
    expected = gradients(reference)
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-6, msg=name)
    assert model.mtp.record[:, 0].tolist() == pytest.approx([one.item() for one in sums], rel=1e-5)
    assert model.mtp.record[:, 1].tolist() == counts


def test_an_evaluation_has_the_main_loss_alone_and_generation_the_main_logits():
    model, plain = build_transformer(CONFIG, seed=0), build_transformer(CONFIG, seed=0)
    plain.mtp = None
    tokens, labels = batch()
    model.eval()
    with torch.no_grad():
        assert torch.equal(model(tokens, labels, reduction="sum"), plain(tokens, labels, reduction="sum"))
        assert torch.equal(model(tokens), plain(tokens))
        prompt = tokens[:1, :4]
        options = {"max_new_tokens": 4, "temperature": 0.0}
        assert generate(model, prompt, **options).tolist() == generate(plain, prompt, **options).tolist()
    assert model.mtp.record is None


def test_a_depth_is_a_projection_three_norms_and_a_layer():
    model = build_transformer(CONFIG, seed=0)
    plain = build_transformer(dataclasses.replace(CONFIG, mtp_num_layers=None, mtp_loss_scaling_factor=0.1), seed=0)
    layer = sum(p.numel() for p in plain.layers[-1].parameters())
    joining = 2 * 16**2 + 3 * 16
    assert model.num_parameters() == plain.num_parameters() + 2 * (layer + joining)
    shape = ModelShape.of(CONFIG)
    assert shape is not None
    assert shape.mtp_depth == 2


def test_a_depth_has_experts_where_the_last_layer_has():
    options = {"num_moe_experts": 4, "moe_ffn_hidden_size": 8}
    with_experts = build_transformer(dataclasses.replace(CONFIG, **options, moe_layer_freq=[0, 1]), seed=0)
    without = build_transformer(dataclasses.replace(CONFIG, **options, moe_layer_freq=[1, 0]), seed=0)
    assert hasattr(with_experts.mtp.depths[0].layer.feed_forward, "router")
    assert with_experts.mtp.depths[1].layer.feed_forward.router.layer_index == 3
    assert not hasattr(without.mtp.depths[0].layer.feed_forward, "router")


def test_training_it_without_labels_is_refused_and_all_else_is_not():
    model = build_transformer(CONFIG, seed=0)
    tokens, labels = batch()
    with pytest.raises(ConfigError, match=r"mtp_num_layers=2 require labels.*pass labels, or set model.mtp_num_layers"):
        model(tokens)
    model(tokens, labels)
    with torch.no_grad():
        model(tokens)
    model.mtp.requires_grad_(False)
    model(tokens).sum().backward()
    model.mtp.requires_grad_(True)
    model.eval()(tokens).sum().backward()


def test_a_value_head_takes_the_place_of_the_depths_too():
    model = build_transformer(CONFIG, seed=0)
    make_value_model(16, False)(model)
    model(batch()[0]).sum().backward()
    assert model.mtp is None
    assert not any(name.startswith("mtp") for name in model.state_dict())
    assert model.config == dataclasses.replace(CONFIG, mtp_num_layers=None, mtp_loss_scaling_factor=0.1)
