"""Lists the peak FLOP/s of GPUs by device name, the denominator of model FLOPs utilization."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DevicePeak:
    """The peak of one kind of device."""

    name: str
    """Words that must all occur in torch's name of the device."""
    flops_per_second: float
    """Dense bfloat16 matrix products (float16 on devices without bfloat16), accumulated in float32; no sparsity."""
    source: str
    """The manufacturer's document that states the peak."""


# The first entry whose words all occur in the device's name applies, so variants precede the plain name. For data
# sheets that only state a rate with 2:4 sparsity, the rate is halved here.
DEVICE_PEAKS: tuple[DevicePeak, ...] = (
    DevicePeak("GB300", 2.5e15, "NVIDIA GB300 NVL72 data sheet (dense: half of the stated rate with sparsity)"),
    DevicePeak("GB200", 2.5e15, "NVIDIA GB200 NVL72 data sheet (dense: half of the stated rate with sparsity)"),
    DevicePeak("B300", 2.25e15, "NVIDIA HGX data sheet, HGX B300 (dense: half of the stated rate with sparsity)"),
    DevicePeak("B200", 2.25e15, "NVIDIA HGX data sheet, HGX B200 (dense: half of the stated rate with sparsity)"),
    DevicePeak("GH200", 989.4e12, "NVIDIA GH200 Grace Hopper Superchip data sheet"),
    DevicePeak("H200 NVL", 835.5e12, "NVIDIA H200 data sheet, H200 NVL (half of the stated rate with sparsity)"),
    DevicePeak("H200", 989.4e12, "NVIDIA H200 data sheet, H200 SXM (half of the stated rate with sparsity)"),
    DevicePeak("H100 NVL", 835.5e12, "NVIDIA H100 data sheet, H100 NVL (half of the stated rate with sparsity)"),
    DevicePeak("H100 PCIe", 756e12, "NVIDIA H100 data sheet, H100 PCIe"),
    DevicePeak("H100", 989.4e12, "NVIDIA H100 Tensor Core GPU architecture white paper, H100 SXM5"),
    DevicePeak("H800 PCIe", 756e12, "NVIDIA H800 data sheet, the compute of the H100 PCIe"),
    DevicePeak("H800", 989.4e12, "NVIDIA H800 data sheet, the compute of the H100 SXM5"),
    DevicePeak("H20", 148e12, "NVIDIA H20 data sheet"),
    DevicePeak("A100", 312e12, "NVIDIA A100 Tensor Core GPU data sheet"),
    DevicePeak("A800", 312e12, "NVIDIA A800 data sheet, the compute of the A100"),
    DevicePeak("A6000", 154.8e12, "NVIDIA RTX A6000, Ampere GA102 GPU architecture white paper"),
    DevicePeak("A40", 149.7e12, "NVIDIA A40 data sheet"),
    DevicePeak("A30", 165e12, "NVIDIA A30 data sheet"),
    DevicePeak("A10G", 70e12, "NVIDIA A10G, as stated for AWS EC2 G5"),
    DevicePeak("A10", 125e12, "NVIDIA A10 data sheet"),
    DevicePeak("L40S", 362.05e12, "NVIDIA L40S data sheet"),
    DevicePeak("L40", 181.05e12, "NVIDIA L40 data sheet"),
    DevicePeak("L4", 121e12, "NVIDIA L4 data sheet (half of the stated rate with sparsity)"),
    DevicePeak("RTX 4090", 165.2e12, "NVIDIA Ada GPU architecture white paper, float32 accumulation"),
    DevicePeak("RTX 3090", 71e12, "NVIDIA Ampere GA102 GPU architecture white paper, float32 accumulation"),
    DevicePeak("V100 PCIE", 112e12, "NVIDIA V100 data sheet, float16"),
    DevicePeak("V100", 125e12, "NVIDIA V100 data sheet, float16"),
    DevicePeak("T4", 65e12, "NVIDIA T4 data sheet, float16"),
    DevicePeak("MI325X", 1307.4e12, "AMD Instinct MI325X data sheet"),
    DevicePeak("MI300X", 1307.4e12, "AMD Instinct MI300X data sheet"),
    DevicePeak("MI300A", 980.6e12, "AMD Instinct MI300A data sheet"),
)
"""Known peaks. Devices not listed have no peak: a utilization relative to a guessed peak is meaningless."""

_LESSER = frozenset({"LAPTOP", "MAX", "MIG", "D"})
"""Words in the names of slower variants of a device: mobile versions, MIG slices, export versions."""


def peak_of(device_name: str) -> DevicePeak | None:
    """The peak of a device by its name from `torch.cuda.get_device_name`; None if unknown.

    >>> peak_of("NVIDIA H100 80GB HBM3").flops_per_second
    989400000000000.0

    Args:
        device_name: the name, such as "NVIDIA H100 80GB HBM3".
    """
    words = set(device_name.upper().replace("-", " ").replace("_", " ").split())
    if words & _LESSER:
        return None
    return next((peak for peak in DEVICE_PEAKS if set(peak.name.upper().split()) <= words), None)
