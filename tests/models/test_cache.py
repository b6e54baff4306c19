import pytest
import torch

from onstep.errors import OnstepError
from onstep.models import KeyValueCache


def test_a_layer_gets_back_all_its_positions_in_order():
    cache = KeyValueCache(num_layers=2, capacity=4)
    first, second = torch.randn(2, 1, 3, 1, 2)[:, :, :2]

    cache.append(0, first, -first)
    cache.append(1, -first, first)
    cache.advance(2)
    keys, values = cache.append(0, second, -second)

    assert torch.equal(keys, torch.cat([first, second], dim=1))
    assert torch.equal(values, -keys)


def test_room_follows_the_dtype_of_what_comes():
    keys, _ = KeyValueCache(1, 4).append(0, torch.ones(1, 1, 1, 2, dtype=torch.bfloat16), torch.ones(1, 1, 1, 2))

    assert keys.dtype == torch.bfloat16


def test_more_positions_than_the_capacity_are_refused():
    cache = KeyValueCache(num_layers=1, capacity=4)

    with pytest.raises(OnstepError, match="room for 4 positions, got 5"):
        cache.append(0, torch.ones(1, 5, 1, 2), torch.ones(1, 5, 1, 2))
