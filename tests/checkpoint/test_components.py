"""The parts of a checkpoint: the weights of a model, who writes what, and the comparison of replicas."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from onstep.checkpoint import ModelState, SharingPattern, StateComponent, decode_state, encode_state
from onstep.checkpoint.components import Placement, Seat, find_placement
from onstep.checkpoint.replicas import fingerprints
from onstep.config import DistributedInitConfig
from onstep.distributed import World, open_world
from onstep.errors import CheckpointError, ConfigError


class Tied(nn.Module):
    """An output layer that is the embedding, and buffers of both kinds."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, width)
        self.out = nn.Linear(width, 6, bias=False)
        self.out.weight = self.embed.weight
        self.register_buffer("scale", torch.full((2,), 3.0))
        self.register_buffer("cache", torch.zeros(2), persistent=False)


def stored(state: ModelState) -> Any:
    """Through the form that a checkpoint has."""
    return decode_state(*encode_state(state.state_dict()))


def test_weights_and_persistent_buffers_are_loaded_in_place_and_tied_ones_are_stored_once() -> None:
    source, target = Tied(), Tied()
    source.scale.fill_(5.0)
    tensors, _ = encode_state(ModelState([source]).state_dict())
    assert sorted(tensors) == ["embed.weight", "scale"]
    place = target.embed.weight.data_ptr()
    ModelState([target]).load_state_dict(stored(ModelState([source])))
    assert torch.equal(target.out.weight, source.embed.weight)
    assert target.out.weight is target.embed.weight
    assert target.embed.weight.data_ptr() == place
    assert target.scale.tolist() == [5.0, 5.0]


def test_several_chunks_keep_apart_what_has_the_same_name() -> None:
    source, target = [nn.Linear(2, 2), nn.Linear(2, 2)], [nn.Linear(2, 2), nn.Linear(2, 2)]
    state = stored(ModelState(source))
    assert list(state) == ["chunk_0.weight", "chunk_0.bias", "chunk_1.weight", "chunk_1.bias"]
    ModelState(target).load_state_dict(state)
    for one, other in zip(source, target, strict=True):
        assert torch.equal(one.weight, other.weight)


@pytest.fixture
def world() -> Iterator[World]:
    world = open_world(DistributedInitConfig(device="cpu"))
    yield world
    world.close()


def test_wrappers_leave_no_trace_in_the_names(world: World) -> None:
    bare = nn.Linear(2, 2)
    wrapped = nn.parallel.DistributedDataParallel(bare)
    for model in (wrapped, torch.compile(wrapped)):
        assert list(ModelState([model]).state_dict()) == ["weight", "bias"]


def test_a_wrapper_with_weights_of_its_own_is_saved_whole() -> None:
    class DistributedDataParallel(nn.Module):  # named as Megatron names its own
        def __init__(self) -> None:
            super().__init__()
            self.module, self.head = nn.Linear(2, 2), nn.Linear(2, 1)

    source, target = DistributedDataParallel(), DistributedDataParallel()
    ModelState([target]).load_state_dict(stored(ModelState([source])))
    assert torch.equal(target.head.weight, source.head.weight)
    assert list(ModelState([nn.DataParallel(source)]).state_dict()) == [f"module.{key}" for key in source.state_dict()]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda state: state.pop("bias"), "missing bias"),
        (lambda state: state.update(extra=torch.zeros(1)), "unexpected extra"),
        (lambda state: state.update(bias=torch.zeros(3)), r"bias \(shape \(2,\) here, \(3,\) in the checkpoint\)"),
        (lambda state: state.update(bias=torch.zeros(2).half()), "bias .dtype torch.float32 here, torch.float16"),
        (lambda state: state.update(bias=None), "bias .a tensor here, NoneType in the checkpoint"),
    ],
)
def test_weights_that_do_not_fit_are_named_and_nothing_is_loaded(change: Any, named: str) -> None:
    module = nn.Linear(2, 2)
    before = module.weight.detach().clone()
    state = {name: tensor + 1 for name, tensor in module.state_dict().items()}
    change(state)
    with pytest.raises(CheckpointError, match=named):
        ModelState([module]).load_state_dict(state)
    assert torch.equal(module.weight, before)


def test_weights_that_do_not_fit_are_answered_with_the_ways_out() -> None:
    with pytest.raises(CheckpointError, match="shape") as raised:
        ModelState([nn.Linear(2, 2)]).load_state_dict(nn.Linear(3, 2).state_dict())
    for way in ("section `model`", "the tokenizer", "manifest.json", "checkpoint.load=", "run.fresh=true"):
        assert way in str(raised.value)


def test_a_long_list_of_names_is_cut() -> None:
    with pytest.raises(CheckpointError, match=r"missing 0\.weight, 0\.bias, 1\.weight, 1\.bias, 2\.weight and 3 more"):
        ModelState([nn.Sequential(*[nn.Linear(1, 1) for _ in range(4)])]).load_state_dict({})


def part(pattern: SharingPattern, group: str | None = None) -> StateComponent:
    return StateComponent("part", ModelState([]), pattern, process_group_name=group)


@pytest.mark.parametrize(
    ("component", "path", "writers"),
    [
        (part(SharingPattern.GLOBAL), ["part/state.json"] * 4, [0]),
        (part(SharingPattern.REPLICATED), ["part/state.json"] * 4, [0]),
        (part(SharingPattern.PER_RANK), [f"part/rank_{rank}.json" for rank in range(4)], [0, 1, 2, 3]),
        (part(SharingPattern.PER_NODE), [f"part/node_{node}.json" for node in (0, 0, 1, 1)], [0, 2]),
        (part(SharingPattern.PER_GROUP, "tp"), [f"part/group_tp_{group}.json" for group in (0, 1, 0, 1)], [0, 1]),
    ],
)
def test_one_rank_of_those_that_share_a_state_writes_it(
    component: StateComponent, path: list[str], writers: list[int]
) -> None:
    ranks = [Placement(r, Seat(r // 2, r // 2 * 2), {"tp": Seat(r % 2, r % 2)}) for r in range(4)]
    assert [rank.files(component).document for rank in ranks] == path
    assert [rank.rank for rank in ranks if rank.writes(component)] == writers


def test_an_unknown_group_is_named_with_those_there_are() -> None:
    placement = find_placement(World(), {"data": None, "expert": None})
    with pytest.raises(ConfigError, match=r"process_group_name='tensor' must be a group of this run \(data, expert\)"):
        placement.files(part(SharingPattern.PER_GROUP, "tensor"))


def changed(**change: Any) -> dict[str, Any]:
    state: dict[str, Any] = {"w": torch.zeros(100), "steps": 1, "names": ["a", "b"]}
    return state | change


@pytest.mark.parametrize(
    ("other", "seen_by"),
    [
        (changed(), []),
        (changed(steps=2), ["full"]),
        (changed(names=["a", "c"]), ["full"]),
        (changed(w=torch.eye(100)[99]), ["tensor", "full"]),
        (changed(w=torch.eye(100)[0]), ["quick", "tensor", "full"]),
        (changed(w=torch.zeros(99)), ["quick", "tensor", "full"]),
        (changed(w=torch.zeros(100).double()), ["quick", "tensor", "full"]),
        (changed(names=["a"]), ["quick", "tensor", "full"]),
        (changed(steps="1"), ["quick", "tensor", "full"]),
        (changed(more=None), ["quick", "tensor", "full"]),
    ],
)
def test_each_level_of_comparison_sees_what_it_should(other: dict[str, Any], seen_by: list[str]) -> None:
    levels = ["quick", "tensor", "full"]
    assert [level for level in levels if fingerprints(changed(), level) != fingerprints(other, level)] == seen_by


def test_keys_that_look_alike_have_paths_of_their_own() -> None:
    paths = [path for path, _ in fingerprints({1: 0, "1": 0, "a": {"b": 0}, "a.b": [0]}, "quick")]
    assert paths == ["", "[1]", ".1", ".a", ".a.b", ".a.b", ".a.b[0]"]
