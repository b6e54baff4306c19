"""Packed documents of families of `transformers`: computed as alone, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from onstep.errors import ConfigError
from onstep.models.hf.any_directory import load_directory
from onstep.models.hf.causal_lm import CausalLM, Separation
from onstep.models.hf.documents_probe import prepare_for_data
from tiny_families import VOCABULARY, family

LENGTHS = (20, 7, 37)


def opened(directory: Path, name: str, **settings: Any) -> CausalLM:
    family(directory, name, **settings)
    model = load_directory(directory).eval()
    assert isinstance(model, CausalLM)
    return model


@pytest.mark.parametrize(
    ("name", "separation"),
    [("gemma2", Separation.POSITIONS), ("llama4_text", Separation.POSITIONS), ("falcon", Separation.MASK)],
)
def test_packed_documents_are_computed_as_alone(tmp_path: Path, name: str, separation: Separation) -> None:
    model = opened(tmp_path, name)
    prepare_for_data(model, has_documents=True, seq_length=sum(LENGTHS))
    assert model.separation is separation
    tokens = torch.randint(VOCABULARY, (1, sum(LENGTHS)))
    ids = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))[None]
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    with torch.no_grad():
        packed = model(tokens, position_ids=positions, document_ids=ids)[0]
        alone = torch.cat([model(one[None])[0] for one in tokens[0].split(LENGTHS)])
        together = model(tokens)[0]
    assert (packed - alone).abs().max() <= 1e-5 * alone.abs().max()
    assert (together - alone).abs().max() > 1e-3 * alone.abs().max()


def test_a_recurrent_model_is_refused_with_the_remedy(tmp_path: Path) -> None:
    model = opened(tmp_path, "mamba")
    prepare_for_data(model, has_documents=False, seq_length=64)
    with pytest.raises(ConfigError, match=r"type mamba do not keep packed documents apart.*dataset\.packing=false"):
        prepare_for_data(model, has_documents=True, seq_length=64)


def test_scores_scaled_by_the_place_in_a_sequence_limit_its_length(tmp_path: Path) -> None:
    model = opened(tmp_path, "llama4_text", floor_scale=32)
    prepare_for_data(model, has_documents=True, seq_length=31)
    with pytest.raises(ConfigError, match=r"beyond 31 tokens .* or dataset\.seq_length=31"):
        prepare_for_data(model, has_documents=True, seq_length=64)


def test_an_encoder_is_refused(tmp_path: Path) -> None:
    model = opened(tmp_path, "bert")
    with pytest.raises(ConfigError, match="models of the type bert see later tokens"):
        prepare_for_data(model, has_documents=False, seq_length=64)


def test_more_tokens_than_learned_positions_are_refused(tmp_path: Path) -> None:
    model = opened(tmp_path, "opt")
    with pytest.raises(ConfigError, match=r"model\.seq_length=129 must be at most 128"):
        prepare_for_data(model, has_documents=False, seq_length=129)
