"""Where tensor-parallel ranks enter and leave whole sequences, by the plan of a model."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from onstep.errors import ConfigError
from onstep.models.hf.sequence_regions import regions_of
from onstep.models.hf.tensor_styles import styles_of


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)


class Block(nn.Module):
    """A norm and a feed-forward block."""

    def __init__(self, *further: tuple[str, nn.Module]) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(4), Mlp()
        for name, module in further:
            self.add_module(name, module)


def model_of(*further: tuple[str, nn.Module], plan: dict[str, str] | None = None) -> nn.Module:
    model: Any = nn.ModuleDict({"layers": nn.ModuleList([Block(*further), Block(*further)])})
    model._tp_plan = plan or {"layers.*.mlp.up": "colwise", "layers.*.mlp.down": "rowwise"}
    return model


def test_sequences_are_divided_between_the_first_and_the_last_layer() -> None:
    model = model_of(("dropout", nn.Dropout(0.0)))
    found = regions_of(model, styles_of(model))
    assert found.layers == ("layers.0", "layers.1")
    assert found.regions == {"layers.0.mlp", "layers.1.mlp"}
    assert found.mixtures == frozenset()
    assert found.are_in_layers("layers.1.norm")
    assert not found.are_in_layers("head")


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (model_of(("mixer", nn.Linear(4, 4))), "layers.0.mixer is not a norm, and the plan divides nothing in it by"),
        (model_of(("drop", nn.Dropout(0.1))), "layers.0.drop drops values of its own; set its probability to 0"),
        (
            model_of(plan={"layers.*.mlp.up": "colwise"}),
            "no list of layers has all modules that the plan divides by ro",
        ),
        (
            model_of(("up", nn.ModuleDict({"down": nn.Linear(4, 4)})), plan={"layers.*.up.down": "rowwise"}),
            "layers.0.mlp is not a norm",
        ),
        (
            model_of(
                ("up", nn.ModuleDict({"down": nn.Linear(4, 4)})),
                plan={"layers.*.up.down": "rowwise", "layers.*.mlp.down": "rowwise"},
            ),
            "layers.0.up has no forward of whole hidden states",
        ),
    ],
)
def test_other_models_are_refused_with_the_form_of_a_plan(model: nn.Module, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as raised:
        regions_of(model, styles_of(model))
    assert 'give it a plan such as {"layers.*.self_attn.q_proj": "colwise"' in str(raised.value)
