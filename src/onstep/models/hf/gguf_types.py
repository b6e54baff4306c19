"""Names the types in which GGUF files store weights, and converts tensors to them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from onstep.config.suggestions import nearest
from onstep.errors import ConfigError, DataError, MissingExtraError

DTYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
"""GGUF's names of dtypes."""


def import_gguf() -> Any:
    """The `gguf` package.

    Raises:
        MissingExtraError: if it is not installed.
    """
    try:
        import gguf
    except ImportError as error:
        raise MissingExtraError("GGUF files require the library 'gguf': pip install 'onstep[gguf]'") from error
    return gguf


def file_type_of(kind: str) -> int:
    """llama.cpp's number for a file whose matrices are of the type `kind`."""
    gguf = import_gguf()
    return int(gguf.LlamaFileType["ALL_F32" if kind == "F32" else f"MOSTLY_{kind}"])


def writable_types() -> list[str]:
    """The types that the `gguf` package can convert weights to."""
    gguf = import_gguf()
    row = torch.zeros(1, 256).numpy()
    found = []
    for kind in gguf.GGMLQuantizationType:
        if f"MOSTLY_{kind.name}" in gguf.LlamaFileType.__members__ or kind.name == "F32":
            try:
                gguf.quants.quantize(row, kind)
            except NotImplementedError:
                continue
            found.append(str(kind.name))
    return found


def check_type(name: str, out: str) -> str:
    """The type that `name` names, in any case.

    Args:
        out: the file to write, for the commands in the error.

    Raises:
        ConfigError: for a type that only llama.cpp can write, with its command, and for an unknown one.
    """
    gguf = import_gguf()
    kind, known = name.upper(), writable_types()
    if kind in known:
        return kind
    of_llama_cpp = [one.removeprefix("MOSTLY_") for one in gguf.LlamaFileType.__members__ if one.startswith("MOSTLY_")]
    if kind in of_llama_cpp or kind in gguf.GGMLQuantizationType.__members__:
        stem = out.removesuffix(".gguf")
        raise ConfigError(
            f"--quantization {kind} requires llama.cpp: write {stem}-BF16.gguf with --quantization BF16, then run its "
            f"llama-quantize {stem}-BF16.gguf {out} {kind}. Without it, choose one of {', '.join(known)}."
        )
    hint = nearest(kind, [*known, *of_llama_cpp])
    raise ConfigError(f"there is no GGUF type {name!r}; choose one of {', '.join(known)}.{hint}")


def stored_as(tensor: Tensor, name: str, kind: str) -> str:
    """The type in which a tensor is stored in a file of the type `kind`.

    Vectors, the positions of GPT-2 and the routers of experts are float32, as llama.cpp requires. In a file of fewer
    than 8 bits per weight, the embedding and the output matrix have 8; a matrix whose rows are not whole blocks of the
    type is float16.
    """
    gguf = import_gguf()
    if tensor.dim() == 1 or name.endswith(("position_embd.weight", "ffn_gate_inp.weight")):
        return "F32"
    if kind in DTYPES.values():
        return kind
    if name in ("token_embd.weight", "output.weight"):
        kind = "Q8_0"
    block = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][0]
    return kind if tensor.shape[-1] % block == 0 else "F16"


def converted(tensor: Tensor, kind: str) -> Any:
    """The bytes of a tensor in a type, as a numpy array whose rows are the tensor's."""
    gguf = import_gguf()
    dtype = next((one for one, name in DTYPES.items() if name == kind), None)
    if dtype is not None:  # numpy has no bfloat16
        return tensor.to(dtype).cpu().contiguous().view(torch.uint8).numpy()
    return gguf.quants.quantize(tensor.float().cpu().contiguous().numpy(), gguf.GGMLQuantizationType[kind])


def stored_bytes(tensor: Tensor, kind: str) -> int:
    """The bytes of a tensor in a type."""
    gguf = import_gguf()
    items, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    return int(tensor.numel() // items * size)


def check_gguf_file(path: Any) -> dict[str, int]:
    """Read the header of a GGUF file and the places of its tensors; returns the number of tensors by type.

    Raises:
        DataError: for a file that is damaged or not complete.
        MissingExtraError: if the `gguf` package is not installed.
    """
    gguf = import_gguf()
    try:
        reader = gguf.GGUFReader(path)
        kinds = [str(tensor.tensor_type.name) for tensor in reader.tensors]
    except (FileNotFoundError, PermissionError) as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    except (ArithmeticError, LookupError, MemoryError, OSError, TypeError, ValueError) as error:
        reason = str(error).partition("\n")[0][:200]
        if "GGUF" not in reason:  # numpy's words, of a place that is not in the file
            reason = "its header is damaged, or it ends before its last tensor"
        raise DataError(f"{path} is not a complete GGUF file ({reason}); export or copy it again.") from None
    if not kinds:
        raise DataError(f"{path} is not a complete GGUF file (it has no tensors); export or copy it again.")
    return {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}
