"""Models without values: what they are built of, how their values are drawn later, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from onstep.config import ConfigContainer, ModelConfig
from onstep.distributed import World
from onstep.distributed.pipeline.seats import Seat
from onstep.errors import ConfigError, OnstepError
from onstep.models.stages import cut
from onstep.models.transformer import Transformer, build_transformer
from onstep.models.weight_values import Give, value_of
from onstep.models.without_values import CannotRedrawError, redraw, without_values
from onstep.training.setup.filling import Filling, PendingWeights
from onstep.training.setup.outlines import is_redrawn_exactly, outline_of, with_stand_ins
from tests.support.small_configs import SIZES

CPU = torch.device("cpu")


class Tied(nn.Module):
    """A model with a shared weight, one that is drawn twice, and buffers."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4, padding_idx=2)
        self.inner, self.out = nn.Linear(4, 4), nn.Linear(4, 7, bias=False)
        self.scale = nn.Parameter(torch.rand(3))
        self.register_buffer("kept", torch.arange(3.0))
        self.register_buffer("computed", torch.rand(2), persistent=False)
        nn.init.trunc_normal_(self.inner.weight, std=scale)
        nn.init.zeros_(self.inner.weight[1:])
        self.out.weight = self.embed.weight


def seeded() -> Tied:
    torch.manual_seed(3)
    return Tied()


def outline() -> tuple[Tied, list[nn.Parameter]]:
    seen: list[nn.Parameter] = []
    with without_values(lambda parameter, values: seen.append(parameter)):
        return Tied(), seen


def filled(values: dict[str, Tensor]) -> Tied:
    """The model, with these values under their names."""

    def give_all(give: Give) -> None:
        for name, tensor in values.items():
            give(name, value_of(tensor))

    model, _ = outline()
    Filling([model], PendingWeights(model, give_all)).fill(CPU)
    return model


def test_parameters_have_no_values_but_buffers_do_and_what_is_shared_stays_shared() -> None:
    model, seen = outline()
    assert all(one.is_meta for one in model.parameters())
    assert model.out.weight is model.embed.weight
    assert torch.equal(model.kept, torch.arange(3.0))
    assert len(seen) == 5, "the weight that is replaced by a shared one too"
    assert not nn.Linear(2, 2).weight.is_meta, "the context is over"


def test_values_are_drawn_again_as_they_would_have_been() -> None:
    whole, (model, seen) = seeded(), outline()
    names = {id(one): name for name, one in model.named_parameters()}
    held: dict[str, Tensor] = {}
    twin = redraw(seeded, lambda number, values: held.update({names.get(id(seen[number]), "dropped"): values.clone()}))
    for name, parameter in whole.named_parameters():
        assert torch.equal(held[name], parameter), name
    assert torch.equal(twin.computed, whole.computed), "drawn by the same generator in the same order"


def test_a_value_that_depends_on_one_that_is_not_held_cannot_be_drawn_again() -> None:
    def build() -> nn.Module:
        first, second = nn.Linear(3, 3), nn.Linear(3, 3)
        with torch.no_grad():
            second.weight.add_(first.weight)
        return second

    with pytest.raises(CannotRedrawError, match=r"needs the values that a parameter of \(3, 3\) had"):
        redraw(build, lambda number, values: None)


def test_a_model_has_the_values_that_it_is_given_and_its_own_ties() -> None:
    values = {name: one.detach() for name, one in seeded().state_dict().items() if name != "embed.weight"}
    model = filled(values)
    assert model.out.weight is model.embed.weight
    assert torch.equal(model.embed.weight, values["out.weight"])
    assert torch.equal(model.scale, values["scale"])


def test_what_has_no_value_or_one_of_another_shape_is_named() -> None:
    values = {name: one.detach() for name, one in seeded().state_dict().items()}
    lacking = {name: one for name, one in values.items() if not name.startswith("inner")}
    with pytest.raises(ConfigError, match=r"inner.bias, inner.weight got no value"):
        filled(lacking)
    with pytest.raises(OnstepError, match=r"value of scale has the shape \(4,\), but the model's has \(3,\)"):
        filled(values | {"scale": torch.ones(4)})
    with pytest.raises(OnstepError, match=r"a value for other, which the model does not have"):
        filled(values | {"other": torch.ones(4)})


@pytest.mark.parametrize("own", [(0,), (1,), (3,), (0, 3)])
def test_the_stages_of_a_rank_get_the_values_of_one_process_and_the_rest_of_the_model_none(
    own: tuple[int, ...],
) -> None:
    tied = ModelConfig(**{**SIZES, "num_layers": 4, "share_embeddings_and_output_weights": True})
    whole, weights = outline_of(ConfigContainer(model=tied), World(), None)
    assert isinstance(whole, Transformer)
    stages = cut(whole, [Seat(stage, tuple(range(n, n + 1) for n in range(4))) for stage in own])
    Filling(stages, weights).fill(CPU)
    expected = dict(build_transformer(tied, seed=ConfigContainer().rng.seed).named_parameters())
    here = {name: one for stage in stages for name, one in stage.named_parameters()}
    assert all(torch.equal(one, expected[name]) for name, one in here.items())
    assert len(here) < len(expected)
    assert [name for name, one in whole.named_parameters() if not one.is_meta] == [
        name for name in expected if name in here
    ]


def test_a_buffer_without_values_is_named() -> None:
    with without_values(), torch.device("meta"):
        model = nn.BatchNorm1d(2)
    with pytest.raises(ConfigError, match="running_mean"):
        Filling([model], PendingWeights(model, lambda give: give("weight", value_of(torch.ones(2))))).fill(CPU)


def test_values_are_rounded_to_the_type_that_the_model_was_built_in() -> None:
    model, _ = outline()
    weights = PendingWeights(model.to(torch.bfloat16), lambda give: None)
    values = {name: one.detach() for name, one in seeded().named_parameters()}
    weights.give_all = lambda give: [give(name, value_of(one)) for name, one in values.items()] and None
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.float32)
    Filling([model], weights).fill(CPU)
    assert model.scale.dtype == torch.float32
    assert torch.equal(model.scale, values["scale"].bfloat16().float())


def test_stand_ins_let_others_add_to_a_model_without_values() -> None:
    model, _ = outline()
    embedding = model.embed.weight
    with with_stand_ins(model):
        assert model.inner.weight.device == CPU
        assert model.out.weight is model.embed.weight
        model.embed.weight.requires_grad_(False)
        model.added = nn.Linear(2, 2)
    assert model.embed.weight is embedding
    assert model.inner.weight.is_meta
    assert not embedding.requires_grad
    assert not model.added.weight.is_meta


def test_it_is_known_on_a_small_copy_whether_a_class_can_be_drawn_again() -> None:
    sizes = {"vocab_size": 67, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    for kind, is_exact in (("phi", True), ("rwkv", False)):
        content = {"model_type": kind, "intermediate_size": 16, **sizes}
        state = torch.get_rng_state()
        config = ModelConfig(hf_config=content, vocab_size=67, seq_length=32)
        assert is_redrawn_exactly(config, 1, torch.bfloat16) is is_exact, kind
        assert torch.equal(torch.get_rng_state(), state)
