import math

import torch

from onstep.models.layers.rotary import RotaryTables, rotate


def turned(x, position, base=100.0):
    tables = RotaryTables(x.shape[-1], base, length=64)
    return rotate(x.view(1, 1, 1, -1), *tables(position, 1)).flatten()


def test_each_pair_of_halves_turns_by_position_times_its_frequency():
    out = turned(torch.tensor([1.0, 1.0, 0.0, 0.0]), position=3)

    angles = [3 * 100.0**0, 3 * 100.0**-0.5]
    expected = [math.cos(angles[0]), math.cos(angles[1]), math.sin(angles[0]), math.sin(angles[1])]
    torch.testing.assert_close(out, torch.tensor(expected))


def test_products_depend_on_the_distance_of_positions_only():
    query, key = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))

    near = turned(query, 7) @ turned(key, 3)
    far = turned(query, 47) @ turned(key, 43)

    torch.testing.assert_close(near, far)


def test_rotation_keeps_the_dtype():
    tables = RotaryTables(8, 10000.0, length=4)
    x = torch.randn(1, 4, 2, 8, dtype=torch.bfloat16)

    assert rotate(x, *tables(0, 4)).dtype == torch.bfloat16


def test_tables_grow_for_longer_sequences():
    tables = RotaryTables(8, 10000.0, length=4)

    cos, sin = tables(3, 20)

    expected_cos, expected_sin = RotaryTables(8, 10000.0, length=64)(3, 20)
    assert torch.equal(cos, expected_cos)
    assert torch.equal(sin, expected_sin)


def test_tables_that_grew_in_inference_mode_serve_training():
    tables = RotaryTables(8, 10000.0, length=4)
    with torch.inference_mode():
        tables(0, 16)
    x = torch.randn(1, 16, 2, 8, requires_grad=True)

    rotate(x, *tables(0, 16)).sum().backward()

    assert x.grad is not None


def test_tables_stay_exact_through_low_precision_and_the_meta_device():
    expected = RotaryTables(8, 10000.0, length=16).cos
    with torch.device("meta"):
        on_meta = RotaryTables(8, 10000.0, length=16)

    assert torch.equal(RotaryTables(8, 10000.0, length=16).bfloat16().cos, expected)
    assert torch.equal(on_meta.to_empty(device="cpu").cos, expected)


def test_tables_are_no_part_of_the_state_dict():
    assert not RotaryTables(8, 10000.0, length=16).state_dict()
