import math

import pytest
import torch
from torch.nn.functional import cross_entropy

from onstep.config import ModelConfig
from onstep.errors import ConfigError
from onstep.models import KeyValueCache, Transformer, build_transformer


def tiny(**changes):
    sizes = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "vocab_size": 31, "seq_length": 12}
    # a wide spread, so that every part of the model moves the logits
    return ModelConfig(**(sizes | {"init_method_std": 0.3} | changes))


def some_tokens(*shape, seed=0):
    return torch.randint(0, 31, shape, generator=torch.Generator().manual_seed(seed))


def test_logits_have_one_score_for_each_token_of_the_vocabulary():
    assert build_transformer(tiny(), seed=0)(some_tokens(3, 7)).shape == (3, 7, 31)


def test_a_position_sees_nothing_after_itself_and_everything_before():
    model = build_transformer(tiny(num_query_groups=2), seed=0)
    tokens = some_tokens(1, 8)
    changed = tokens.clone()
    changed[0, 4] = (tokens[0, 4] + 1) % 31

    differs = (model(tokens) - model(changed)).abs().amax(-1)[0] > 1e-6

    assert differs.tolist() == [False] * 4 + [True] * 4


def test_order_of_earlier_tokens_matters():
    model = build_transformer(tiny(num_layers=1), seed=0)

    first, second = model(torch.tensor([[3, 7, 5]])), model(torch.tensor([[7, 3, 5]]))

    assert not torch.allclose(first[0, -1], second[0, -1], atol=1e-4)


def test_losses_are_those_of_the_labels_and_zero_where_ignored():
    model = build_transformer(tiny(), seed=0)
    tokens, labels = some_tokens(2, 6), some_tokens(2, 6, seed=1)
    labels[0, 2] = labels[1, 5] = -100

    losses = model(tokens, labels)

    log_probabilities = model(tokens).log_softmax(-1)
    expected = -log_probabilities.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(losses, expected.masked_fill(labels == -100, 0.0))
    assert losses.dtype == torch.float32


def test_summed_loss_is_the_sum_of_the_losses_with_the_same_gradients():
    model = build_transformer(tiny(), seed=0)
    tokens, labels = some_tokens(2, 6), some_tokens(2, 6, seed=1)
    labels[0, 2] = -100

    def loss_and_gradient(loss):
        model.zero_grad()
        loss.backward()
        return loss.detach(), model.embedding.weight.grad.clone()

    total = loss_and_gradient(model(tokens, labels, reduction="sum"))
    each = loss_and_gradient(model(tokens, labels).sum())

    assert total[0].shape == ()
    torch.testing.assert_close(total, each)


def test_a_new_model_with_small_weights_guesses_evenly():
    model = build_transformer(tiny(init_method_std=1e-4), seed=0)

    losses = model(some_tokens(4, 12), some_tokens(4, 12, seed=1))

    assert losses.mean().item() == pytest.approx(math.log(31), abs=0.01)


@pytest.mark.parametrize("tied", [False, True])
def test_every_parameter_gets_a_gradient(tied):
    model = build_transformer(tiny(add_qkv_bias=True, share_embeddings_and_output_weights=tied), seed=0)

    model(some_tokens(2, 6), some_tokens(2, 6, seed=1), reduction="sum").backward()

    without = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    assert without == []


def test_float32_loss_under_bfloat16_autocast_is_near_the_exact_one():
    model = build_transformer(tiny(num_query_groups=2), seed=0)
    tokens, labels = some_tokens(2, 12), some_tokens(2, 12, seed=1)
    exact = model(tokens, labels)

    with torch.autocast("cpu", torch.bfloat16):
        logits, losses = model(tokens), model(tokens, labels)
    losses.sum().backward()

    assert logits.dtype == torch.bfloat16
    assert losses.dtype == torch.float32
    torch.testing.assert_close(losses, exact, rtol=0.1, atol=0.1)
    torch.testing.assert_close(
        losses, cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="none").view_as(losses)
    )


def test_a_bfloat16_model_computes_in_bfloat16_and_its_loss_in_float32():
    model = build_transformer(tiny(), seed=0).bfloat16()

    assert model(some_tokens(2, 6)).dtype == torch.bfloat16
    assert model(some_tokens(2, 6), some_tokens(2, 6)).dtype == torch.float32


def test_sequences_beyond_the_configured_length_continue_the_positions():
    short, long = tiny(seq_length=4), tiny(seq_length=64)
    tokens = some_tokens(1, 20)

    torch.testing.assert_close(build_transformer(short, seed=0)(tokens), build_transformer(long, seed=0)(tokens))


@pytest.mark.parametrize("groups", [None, 2, 1])
@pytest.mark.parametrize("pieces", [[9], [5, 1, 1, 1, 1], [4, 5], [1, 3, 5]])
def test_logits_with_a_cache_are_those_without(groups, pieces):
    model = build_transformer(tiny(num_query_groups=groups, add_qkv_bias=True), seed=0).double()
    tokens = some_tokens(3, 9)
    cache = KeyValueCache(num_layers=2, capacity=9)

    with torch.no_grad():
        cached = torch.cat([model(piece, cache=cache) for piece in tokens.split(pieces, dim=1)], dim=1)
        torch.testing.assert_close(cached, model(tokens), rtol=0, atol=1e-10)


@pytest.mark.parametrize("kind", ["attention_dropout", "hidden_dropout"])
def test_dropout_acts_in_training_only(kind):
    model = build_transformer(tiny(**{kind: 0.5}), seed=0)
    tokens = some_tokens(2, 8)

    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))
    assert torch.equal(model(tokens), build_transformer(tiny(), seed=0)(tokens))


def test_the_model_keeps_its_own_copy_of_the_config():
    config = tiny(rope_scaling={"rope_type": "linear", "factor": 2.0})
    model = Transformer(config)
    config.num_layers = 99
    config.rope_scaling["factor"] = 99.0

    assert model.config.num_layers == 2
    assert model.config.rope_scaling == {"rope_type": "linear", "factor": 2.0}


def test_a_config_without_vocabulary_is_refused():
    with pytest.raises(ConfigError, match="vocab_size is None"):
        Transformer(ModelConfig())


def test_parameters_are_counted_as_asked():
    model = build_transformer(tiny(ffn_hidden_size=10, num_query_groups=2, add_qkv_bias=True), seed=0)
    layer = 16 * 16 * 2 + 2 * 16 * 8 + (16 + 8 + 8) + 3 * 16 * 10 + 2 * 16
    everything = 2 * layer + 16 + 2 * 31 * 16

    assert model.num_parameters() == everything
    assert model.num_parameters(exclude_embeddings=True) == everything - 31 * 16
    model.layers[0].requires_grad_(False)
    assert model.num_parameters(trainable_only=True) == everything - layer


def test_tied_embeddings_are_one_matrix():
    tied = build_transformer(tiny(share_embeddings_and_output_weights=True), seed=0)
    untied = build_transformer(tiny(), seed=0)

    assert untied.num_parameters() - tied.num_parameters() == 31 * 16
    hidden = tied.hidden_states(some_tokens(1, 4))
    torch.testing.assert_close(tied(some_tokens(1, 4)), hidden @ tied.embedding.weight.T)
