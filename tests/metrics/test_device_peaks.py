"""The peak of a device, found by the name that torch gives it."""

from __future__ import annotations

import pytest

from onstep.metrics.device_peaks import DEVICE_PEAKS, peak_of


@pytest.mark.parametrize(
    ("device_name", "tera"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H200", 989.4),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100-PCIE-40GB", 312),
        ("NVIDIA A10G", 70),
        ("NVIDIA A10", 125),
        ("Tesla V100-SXM2-16GB", 125),
        ("Tesla V100-PCIE-32GB", 112),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("AMD Instinct MI300X", 1307.4),
    ],
)
def test_a_known_device_has_its_peak(device_name: str, tera: float) -> None:
    peak = peak_of(device_name)
    assert peak is not None
    assert peak.flops_per_second == tera * 1e12


@pytest.mark.parametrize(
    "device_name",
    ["cpu", "", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA A100-SXM4-40GB MIG 3g.20gb", "NVIDIA A1000", "Z9"],
)
def test_an_unknown_or_lesser_device_has_none(device_name: str) -> None:
    assert peak_of(device_name) is None


def test_every_peak_names_its_source() -> None:
    assert all(peak.source.startswith(("NVIDIA", "AMD")) for peak in DEVICE_PEAKS)
