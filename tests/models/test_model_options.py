import pytest
import torch

from onstep.config import ModelConfig
from onstep.errors import ConfigError
from onstep.models import KeyValueCache, build_transformer, generate

GPT2 = {
    "normalization": "LayerNorm",
    "position_embedding_type": "learned_absolute",
    "gated_linear_unit": False,
    "activation_func": "gelu_tanh",
    "add_bias_linear": True,
    "add_qkv_bias": True,
    "share_embeddings_and_output_weights": True,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}
OPTIONS = {
    "default": {},
    "gpt2": GPT2,
    "no positions": {"position_embedding_type": "none"},
    "q/k-norm": {"qk_layernorm": True, "num_query_groups": 2},
    "q/k-LayerNorm": {"qk_layernorm": True, "normalization": "LayerNorm"},
    "biases": {"add_bias_linear": True},
    "dynamic": {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
    "yarn": {"rope_scaling": YARN},
    "ungated": {"gated_linear_unit": False, "activation_func": "relu2"},
}
EVERY_OPTION = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


def model_of(options, seed=0, **changes):
    sizes = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "vocab_size": 31, "seq_length": 12}
    model = build_transformer(ModelConfig(**(sizes | {"init_method_std": 0.3} | options | changes)), seed=seed)
    with torch.no_grad():  # biases and norms start at 0 and 1, where a mistake in them would not show
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.linspace(-0.4, 0.4, parameter.numel()))
    return model


def some_tokens(*shape, seed=0):
    return torch.randint(0, 31, shape, generator=torch.Generator().manual_seed(seed))


@EVERY_OPTION
@pytest.mark.parametrize("pieces", [[12], [5, 1, 1, 1, 4], [1, 3, 8]])
def test_logits_with_a_cache_are_those_without(options, pieces):
    model = model_of(options).double()
    tokens = some_tokens(3, 12)
    cache = KeyValueCache(num_layers=2, capacity=12)

    with torch.no_grad():
        cached = [model(piece, cache=cache) for piece in tokens.split(pieces, dim=1)]
        torch.testing.assert_close(torch.cat(cached, dim=1), model(tokens), rtol=0, atol=1e-10)


@EVERY_OPTION
def test_generation_takes_the_most_likely_token_of_the_whole_text_so_far(options):
    is_dynamic = (options.get("rope_scaling") or {}).get("rope_type") == "dynamic"
    model = model_of(options, seq_length=8 if is_dynamic else 12)  # dynamic angles change from length 9 on
    text = generate(model, some_tokens(2, 4), max_new_tokens=8, temperature=0)

    for end in range(4, 12):
        assert torch.equal(text[:, end], model(text[:, :end])[:, -1].argmax(-1))


@EVERY_OPTION
def test_packed_documents_come_out_as_each_on_its_own(options):
    model = model_of(options).double()
    lengths = [[3, 5, 4], [1, 11]]
    tokens, labels = some_tokens(2, 12), some_tokens(2, 12, seed=1)
    document_ids = torch.stack([torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in lengths])

    losses = model(tokens, labels, document_ids=document_ids)
    losses.sum().backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]

    model.zero_grad()
    for row, sizes in enumerate(lengths):
        start = 0
        for size in sizes:
            own = slice(start, start + size)
            alone = model(tokens[row : row + 1, own], labels[row : row + 1, own])
            torch.testing.assert_close(losses[row, own], alone[0], rtol=0, atol=1e-10)
            alone.sum().backward()
            start += size
    for found, parameter in zip(gradients, model.parameters(), strict=True):
        torch.testing.assert_close(found, parameter.grad, rtol=0, atol=1e-5)  # the loss is float32


@EVERY_OPTION
def test_given_positions_replace_those_of_the_sequence(options):
    model = model_of(options).double()
    tokens = some_tokens(2, 6)

    same = model(tokens, position_ids=torch.arange(6).expand(2, 6))
    moved = model(tokens, position_ids=torch.tensor([0, 1, 2, 5, 6, 9]).expand(2, 6))

    torch.testing.assert_close(same, model(tokens), rtol=0, atol=1e-6)
    has_positions = options.get("position_embedding_type") != "none"
    assert ((moved - model(tokens)).abs().max() > 1e-3) == has_positions


@EVERY_OPTION
def test_every_parameter_gets_a_gradient(options):
    model = model_of(options)
    model(some_tokens(2, 6), some_tokens(2, 6, seed=1), reduction="sum").backward()

    assert [name for name, one in model.named_parameters() if one.grad is None or not one.grad.any()] == []


def loss_and_gradients(model, seed):
    torch.manual_seed(seed)
    model.zero_grad()
    loss = model(some_tokens(3, 12), some_tokens(3, 12, seed=1), reduction="sum")
    loss.backward()
    return [loss.detach(), torch.rand(1), *(parameter.grad for parameter in model.parameters())]


@EVERY_OPTION
def test_recomputing_gives_the_same_bits_with_dropout(options):
    dropout = {"hidden_dropout": 0.2, "attention_dropout": 0.3}
    kept, recomputed = model_of(options, **dropout), model_of(options, **dropout, recompute_granularity="full")

    pairs = zip(loss_and_gradients(kept, 5), loss_and_gradients(recomputed, 5), strict=True)

    assert all(torch.equal(one, other) for one, other in pairs)


def test_recomputing_keeps_fewer_activations():
    def kept_bytes(granularity):
        found = 0

        def count(tensor):
            nonlocal found
            found += tensor.nbytes
            return tensor

        model = model_of({}, recompute_granularity=granularity, num_layers=8)
        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            model.hidden_states(some_tokens(4, 12))
        return found

    assert kept_bytes("full") < kept_bytes(None) / 4


def test_activation_functions_are_those_of_their_names():
    x = torch.linspace(-3, 3, 50, dtype=torch.float64)
    expected = {
        "silu": x / (1 + torch.exp(-x)),
        "gelu": x * 0.5 * (1 + torch.erf(x / 2**0.5)),
        "gelu_tanh": 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))),
        "relu": x.clamp(min=0),
        "relu2": x.clamp(min=0) ** 2,
    }
    for name, values in expected.items():
        for is_gated in (True, False):
            model = model_of({"activation_func": name, "gated_linear_unit": is_gated, "ffn_hidden_size": 16}).double()
            block = model.layers[0].feed_forward
            with torch.no_grad():
                for matrix in (block.up, block.down, *([block.gate] if is_gated else [])):
                    matrix.weight.copy_(torch.eye(16))
                found = block(x[:48].view(1, 3, 16)).flatten()
            torch.testing.assert_close(found, (values * x if is_gated else values)[:48])


def test_a_layer_norm_centres_and_scales():
    norm = model_of({"normalization": "LayerNorm"}).double().final_norm
    x = torch.randn(5, 16, dtype=torch.float64)

    centred = x - x.mean(-1, keepdim=True)
    expected = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight + norm.bias

    torch.testing.assert_close(norm(x), expected)


def test_q_and_k_norms_bound_the_attention_logits():
    def largest(**options):
        model = model_of({}, log_max_attention_logit=True, init_method_std=5.0, **options)
        model(some_tokens(2, 12))
        return float(model.max_attention_logit)

    # a normed vector of width 4 with a scale of at most 1.4 is at most 1.4 * 2 long, and logits are divided by 2
    assert largest(qk_layernorm=True) <= 1.4**2 * 2 + 1e-4 < 20 < largest()


def reference_largest_logit(model, tokens, document_ids=None):
    """Of the first layer, by the definition."""
    attention = model.layers[0].attention
    x = model.layers[0].attention_norm(model.embedding(tokens))
    heads = [layer(x).unflatten(-1, (-1, 4)).transpose(1, 2) for layer in (attention.query, attention.key)]
    query, key = heads[0], heads[1].repeat_interleave(4 // heads[1].shape[1], dim=1)
    scores = query @ key.transpose(-1, -2) / 2
    seen = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).tril()[None, None]
    if document_ids is not None:
        seen = seen & (document_ids[:, None, :, None] == document_ids[:, None, None, :])
    return scores.masked_fill(~seen, -torch.inf).max()


@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("packed", [False, True])
def test_the_largest_attention_logit_is_that_of_the_pairs_that_are_looked_at(groups, packed):
    options = {"position_embedding_type": "none", "num_query_groups": groups}
    model = model_of(options, num_layers=1, log_max_attention_logit=True).double()
    document_ids = torch.tensor([[0] * 5 + [1] * 7, [0] * 12]) if packed else None

    for seed in range(5):
        tokens = some_tokens(2, 12, seed=seed)
        model(tokens, document_ids=document_ids)
        expected = reference_largest_logit(model, tokens, document_ids)
        torch.testing.assert_close(model.max_attention_logit, expected)


def test_logits_in_blocks_are_those_of_the_whole():
    from onstep.models.layers.layer import largest_logit

    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(3, 4, 17, 8, generator=generator), torch.randn(3, 2, 17, 8, generator=generator)
    first = torch.randint(0, 17, (3, 17), generator=generator).minimum(torch.arange(17))

    for given in (None, first):
        whole = largest_logit(query, key, given)
        for block in (1, 700, 10**6):
            torch.testing.assert_close(largest_logit(query, key, given, block_elements=block), whole)


@pytest.mark.parametrize("recompute", [None, "full"])
def test_watching_the_logits_changes_no_number_and_takes_the_largest_of_all_layers(recompute):
    options = {"hidden_dropout": 0.2, "recompute_granularity": recompute}
    plain, watching = model_of(options), model_of(options, log_max_attention_logit=True)

    pairs = zip(loss_and_gradients(plain, 5), loss_and_gradients(watching, 5), strict=True)

    assert all(torch.equal(one, other) for one, other in pairs)
    assert plain.max_attention_logit is None
    each = [layer.attention.largest_logit for layer in watching.layers]
    assert watching.max_attention_logit == max(each)
    assert not watching.max_attention_logit.requires_grad


def test_learned_positions_end_where_their_table_ends_and_generation_slides_on():
    model = model_of(GPT2)

    with pytest.raises(ConfigError, match=r"13 positions, but learned positions end at model.seq_length=12"):
        model(some_tokens(1, 13))
    assert generate(model, some_tokens(1, 4), max_new_tokens=30).shape == (1, 34)


def test_a_cache_beyond_the_length_where_dynamic_angles_change_is_refused():
    model = model_of(OPTIONS["dynamic"])
    cache = KeyValueCache(2, 20)
    model(some_tokens(1, 12), cache=cache)

    with pytest.raises(ConfigError, match="all positions of a sequence of 13 tokens"):
        model(some_tokens(1, 1), cache=cache)


def test_documents_with_a_cache_are_refused():
    with pytest.raises(ConfigError, match="document_ids cannot be combined with a key/value cache"):
        model_of({})(some_tokens(1, 3), cache=KeyValueCache(2, 3), document_ids=torch.zeros(1, 3, dtype=torch.long))


def test_parameters_of_the_options_are_counted():
    hidden, ffn, vocabulary, length = 16, 64, 31, 12
    layer = 4 * hidden**2 + 4 * hidden + 2 * hidden * ffn + ffn + hidden + 2 * 2 * hidden
    everything = 2 * layer + 2 * hidden + vocabulary * hidden + length * hidden
    model = model_of(GPT2)

    assert model.num_parameters() == everything
    assert model.num_parameters(exclude_embeddings=True) == 2 * layer + 2 * hidden
    assert model_of({"qk_layernorm": True}).num_parameters() == model_of({}).num_parameters() + 2 * 2 * 4


def test_learned_positions_are_drawn_like_embeddings():
    model = build_transformer(ModelConfig(**GPT2, vocab_size=31, seq_length=256, init_method_std=0.05), seed=1)

    assert model.position_embedding.weight.std().item() == pytest.approx(0.05, rel=0.03)


@pytest.mark.parametrize("ids", [[5, 12], [-1, 3]])
def test_position_ids_outside_the_table_are_refused(ids):
    model = model_of({"position_embedding_type": "learned_absolute"})
    with pytest.raises(ConfigError, match=rf"from {ids[0]} to {ids[1]}, but learned positions only exist from 0 to 11"):
        model(some_tokens(1, 2), position_ids=torch.tensor([ids]))


def test_documents_beyond_the_length_of_dynamic_angles_are_refused():
    model = model_of({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}})
    ids = torch.zeros(1, 13, dtype=torch.long)
    model(some_tokens(1, 12), document_ids=ids[:, :12])
    with pytest.raises(ConfigError, match="document_ids of a sequence of 13 tokens cannot be combined with"):
        model(some_tokens(1, 13), document_ids=ids)
