"""The state of the random generators: what is drawn after loading is what was drawn after saving."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from onstep.checkpoint.format.codec import document_to_bytes, encode_state
from onstep.checkpoint.format.decoding import decode_state, document_from_bytes
from onstep.checkpoint.format.tensor_file import read_tensors, write_tensors
from onstep.checkpoint.states import RngState
from onstep.errors import CheckpointError

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"))]


def draws(device: str = "cpu") -> list[Any]:
    """An odd number of Gaussian draws each: the generators make them in pairs and keep the second one."""
    return [
        random.random(),
        random.gauss(0, 1),
        random.getrandbits(77),
        np.random.rand(),
        np.random.randn(),
        np.random.randint(2**31),
        torch.randn(3).tolist(),
        torch.rand(17).tolist(),
        torch.randperm(5).tolist(),
        torch.nn.functional.dropout(torch.ones(20)).tolist(),
        torch.randn(5, device=device).tolist(),
        torch.nn.functional.dropout(torch.ones(20, device=device)).tolist(),
    ]


def through_files(state: dict[str, Any], directory: Path) -> Any:
    tensors, document = encode_state(state)
    with (directory / "rank_0.safetensors").open("wb") as file:
        write_tensors(file, tensors)
    (directory / "rank_0.json").write_bytes(document_to_bytes(document))
    return decode_state(
        read_tensors(directory / "rank_0.safetensors"), document_from_bytes((directory / "rank_0.json").read_bytes())
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("drawn_before", [0, 1, 2])
def test_draws_after_loading_are_those_after_saving(device: str, drawn_before: int, tmp_path: Path) -> None:
    for _ in range(drawn_before):
        draws(device)
    state = through_files(RngState(device).state_dict(), tmp_path)
    first = draws(device)
    assert draws(device) != first
    RngState(device).load_state_dict(state)
    assert draws(device) == first


def test_the_waiting_gaussian_is_part_of_the_state() -> None:
    random.seed(0)
    np.random.seed(0)
    random.gauss(0, 1)
    np.random.randn()
    state = RngState().state_dict()
    waiting = random.gauss(0, 1), np.random.randn()
    random.seed(5)
    np.random.seed(5)
    RngState().load_state_dict(state)
    assert (random.gauss(0, 1), np.random.randn()) == waiting


def test_saving_does_not_move_the_generators() -> None:
    rng = RngState()
    state = rng.state_dict()
    expected = draws()
    rng.load_state_dict(state)
    for _ in range(3):
        encode_state(rng.state_dict())
    assert draws() == expected


def broken(**changes: Any) -> dict[str, Any]:
    return {**RngState().state_dict(), **changes}


@pytest.mark.parametrize(
    "changes",
    [
        {"python": (3, (1, 2), None)},
        {"python": [3, [0] * 625, None]},
        {"python": None},
        {"numpy": {"bit_generator": "PCG64", "state": {}}},
        {"numpy": 3},
        {"torch": torch.zeros(3, dtype=torch.uint8)},
        {"torch": torch.zeros(5056, dtype=torch.uint8)},
        {"torch": [1]},
        {"device": None},
        {"device": {"type": "cpu"}},
    ],
)
def test_a_state_that_is_none_is_refused_and_no_generator_moves(changes: dict[str, Any]) -> None:
    before = RngState().state_dict()
    expected = draws()
    RngState().load_state_dict(before)
    with pytest.raises(CheckpointError, match="random generators cannot be loaded"):
        RngState().load_state_dict(broken(**changes))
    assert draws() == expected


def test_a_missing_generator_is_refused() -> None:
    state = RngState().state_dict()
    del state["numpy"]
    with pytest.raises(CheckpointError, match="numpy"):
        RngState().load_state_dict(state)


def test_a_state_of_another_device_loads_the_rest_and_warns(caplog: pytest.LogCaptureFixture) -> None:
    state = RngState().state_dict()
    expected = draws()
    state["device"] = {"type": "cuda", "state": torch.zeros(16, dtype=torch.uint8)}
    RngState().load_state_dict(state)
    assert "on device type cuda, but this rank runs on cpu" in caplog.text
    assert draws() == expected
