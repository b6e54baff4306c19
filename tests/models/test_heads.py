import pytest
import torch
from torch import nn

from onstep.config import ModelConfig
from onstep.errors import ConfigError
from onstep.models import (
    LinearForLastLayer,
    build_transformer,
    create_value_head_hook,
    generate,
    hf_obstacle,
    make_value_model,
    save_hf,
)
from onstep.training import _ensure_model_list, _register_linear_for_last_layer_mapping

TOKENS = torch.randint(0, 31, (2, 6), generator=torch.Generator().manual_seed(0))


def model_of(**options):
    sizes = {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 4, "vocab_size": 31, "seq_length": 12}
    return build_transformer(ModelConfig(**(sizes | {"init_method_std": 0.3} | options)), seed=0)


class Chunk(nn.Module):
    """A pipeline stage with Megatron's names."""

    def __init__(self, post_process=None):
        super().__init__()
        self.output_layer = nn.Linear(8, 31)
        if post_process is not None:
            self.post_process = post_process


def test_a_head_gives_float32_values_and_none():
    head = LinearForLastLayer(8, 3, sequence_parallel=False, bias=True).bfloat16()
    x = torch.randn(5, 2, 8, dtype=torch.bfloat16)

    values, nothing = head(x, torch.zeros(3, 8), True)

    assert nothing is None
    assert (values.dtype, values.shape) == (torch.float32, (5, 2, 3))
    torch.testing.assert_close(
        values, (x.double() @ head.weight.T.double() + head.bias.double()).float(), atol=0.02, rtol=0
    )
    assert LinearForLastLayer(8, 3, False, output_in_fp32=False).bfloat16()(x)[0].dtype == torch.bfloat16


def test_a_head_has_no_bias_unless_asked():
    assert LinearForLastLayer(8, 3, False).bias is None
    assert [*dict(LinearForLastLayer(8, 3, False, bias=True).named_parameters())] == ["weight", "bias"]


def test_dropout_of_a_head_scales_what_is_left_and_acts_in_training_only():
    head = LinearForLastLayer(4000, 1, False, dropout=0.25, init_method=nn.init.ones_).double()
    x = torch.ones(1, 4000, dtype=torch.float64)

    torch.manual_seed(0)
    kept = head(x)[0].item() * 0.75

    assert kept == pytest.approx(round(kept), abs=1e-2)
    assert 2850 < kept < 3150
    assert head.eval()(x)[0].item() == 4000
    with pytest.raises(ConfigError, match=r"dropout of a head must be at least 0 and below 1, got 1.0"):
        LinearForLastLayer(4, 1, False, dropout=1.0)


def test_weights_of_a_head_are_drawn_as_asked_also_after_the_meta_device():
    options = {"bias": True, "init_method": lambda weight: nn.init.constant_(weight, 0.25)}
    with torch.device("meta"):
        head = LinearForLastLayer(4, 2, True, **options)
    head.to_empty(device="cpu")

    head.reset_parameters()

    assert head.weight.unique().tolist() == [0.25]
    assert head.bias.tolist() == [0, 0]
    assert head.weight.sequence_parallel
    assert head.bias.sequence_parallel
    assert not hasattr(LinearForLastLayer(4, 2, False).weight, "sequence_parallel")


def test_a_head_without_initialisation_keeps_what_it_holds():
    head = LinearForLastLayer(4, 2, False, perform_initialization=False)
    with torch.no_grad():
        head.weight.fill_(7)

    head.reset_parameters()

    assert head.weight.unique().tolist() == [7]


def test_a_sequence_parallel_head_alone_holds_the_whole_sequence():
    head = LinearForLastLayer(4, 2, sequence_parallel=True)
    x = torch.randn(3, 1, 4)

    torch.testing.assert_close(head(x)[0], x @ head.weight.T)


def test_a_list_of_chunks_stays_the_same_list():
    chunks = [nn.Linear(1, 1)]

    assert _ensure_model_list(chunks) is chunks
    assert _ensure_model_list(chunks[0]) == chunks


@pytest.mark.parametrize("tied", [False, True])
def test_the_hook_gives_a_transformer_values(tied):
    model = model_of(share_embeddings_and_output_weights=tied)
    body = {name: tensor.clone() for name, tensor in model.state_dict().items() if not name.startswith("output")}
    chunks = [model]

    assert create_value_head_hook(16, False, output_size=3)(chunks) is chunks

    values = model(TOKENS)
    assert (values.shape, values.dtype) == ((2, 6, 3), torch.float32)
    torch.testing.assert_close(values, model.hidden_states(TOKENS) @ model.output.weight.T)
    assert model.output_layer is model.output
    assert model.state_dict().keys() == {*body, "output.weight"}
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in body.items())


def test_the_hook_takes_a_chunk_alone_and_makes_one_value():
    model = model_of()

    (chunk,) = make_value_model(16, False)(model)

    assert chunk is model
    assert model(TOKENS).shape == (2, 6, 1)


def test_the_gradient_of_values_reaches_the_whole_model():
    model = model_of()
    make_value_model(16, False)(model)

    (model(TOKENS) - 1).square().sum().backward()

    assert [name for name, one in model.named_parameters() if one.grad is None or not one.grad.any()] == []


def test_only_the_chunk_of_the_last_stage_gets_a_head():
    chunks = [Chunk(post_process=False), Chunk(post_process=True)]
    first = chunks[0].output_layer

    create_value_head_hook(8, False)(chunks)

    assert chunks[0].output_layer is first
    assert isinstance(chunks[1].output_layer, LinearForLastLayer)
    assert chunks[1].output_layer.weight.shape == (1, 8)


def test_chunks_that_do_not_say_which_is_last_are_refused():
    for number, chunks in enumerate(([Chunk(), Chunk()], [Chunk(), Chunk(post_process=True)])):
        with pytest.raises(ValueError, match=f"post_process is a bool in {number} of the model's 2 chunks; give each"):
            create_value_head_hook(8, False)(chunks)


def test_a_model_without_an_output_layer_is_refused():
    with pytest.raises(ConfigError, match="Linear has no output_layer"):
        create_value_head_hook(8, False)([nn.Linear(8, 8)])


def test_a_value_model_has_no_losses_of_labels_and_generates_nothing():
    model = model_of()
    make_value_model(16, False)(model)

    with pytest.raises(ConfigError, match=r"ends in a value head.*without labels"):
        model(TOKENS, TOKENS)
    with pytest.raises(ConfigError, match="value head, which does not score tokens"):
        generate(model, TOKENS, max_new_tokens=1)


def test_conversion_names_the_head_that_has_no_counterpart(tmp_path):
    _register_linear_for_last_layer_mapping()
    _register_linear_for_last_layer_mapping()
    model = model_of()
    assert hf_obstacle(model) is None
    make_value_model(16, False)(model)

    with pytest.raises(
        ConfigError, match=r"'output' is a value head \(LinearForLastLayer\).*LlamaForCausalLM does not have"
    ):
        save_hf(model, tmp_path / "out")
    assert "LinearForLastLayer" in hf_obstacle(model)
    assert not (tmp_path / "out").exists()


def test_setting_the_output_layer_by_megatrons_name_replaces_the_output():
    model = model_of()
    model.output_layer = nn.Linear(16, 5)

    assert model(TOKENS).shape == (2, 6, 5)
    assert [name for name, _ in model.named_modules() if "output" in name and "layers" not in name] == ["output"]


def test_a_head_of_another_width_is_refused_by_the_hook_with_both():
    with pytest.raises(ConfigError, match=r"hidden_size=32 does not fit Transformer, which has hidden size 16"):
        make_value_model(32, False)(model_of(share_embeddings_and_output_weights=True))
    with pytest.raises(ConfigError, match=r"hidden_size=16 does not fit Chunk, which has hidden size 8"):
        make_value_model(16, False)(Chunk())
