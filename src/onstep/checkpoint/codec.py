"""The one form of a state in a checkpoint: tensors by name, and a typed JSON document for everything else.

A document is plain JSON where JSON is exact (None, bools, short integers, finite floats, text, lists); anything else
is an object with one member, whose name is a kind from a fixed table: `{"tuple": [1, 2]}`, `{"tensor": "exp_avg"}`.
Reading one therefore imports and calls nothing that it names; what does not fit the table is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from onstep.checkpoint.codec_decoder import Decoder
from onstep.checkpoint.codec_encoder import Encoder
from onstep.checkpoint.codec_values import shown
from onstep.checkpoint.strict_json import load_strict
from onstep.errors import CheckpointError, UnsupportedStateError

FORMAT = 1
MAX_DOCUMENT_BYTES = 1024**3


def encode_state(state: Any, where: str = "state") -> tuple[dict[str, Tensor], Any]:
    """The tensors of a state by name, and the document of all the rest.

    Exact are: None, bool, int, float, complex, str, bytes, list, tuple, set, frozenset, deque, dict with any hashable
    keys of these, OrderedDict, defaultdict of a built-in type, Counter, dense tensors, torch.Size, dtype and device,
    NumPy arrays and scalars of plain items, paths, dates. A tensor's name is its path in the state, so the tensors of
    a model keep their parameter names. The same tensor, or the same view of the same memory, is stored once and comes
    back as one object. `requires_grad` is not kept.

    The tensors share the state's memory: copy them before the state changes.

    Args:
        state: what to save.
        where: what it is called in errors.

    Raises:
        UnsupportedStateError: for what has no exact form, with its path and what to do.
    """
    encoder = Encoder(where)
    node = encoder.node(state)
    return encoder.tensors, {"onstep_state": FORMAT, "state": node}


def check_encodable(state: Any, where: str = "state") -> None:
    """Raise what `encode_state` would raise; for the start of training, where nothing is lost yet.

    Raises:
        UnsupportedStateError: for what has no exact form, with its path and what to do.
    """
    encode_state(state, where)


def decode_state(tensors: Mapping[str, Tensor], document: Any, where: str = "state") -> Any:
    """The state that `encode_state` was given. It takes over the tensors: their memory becomes the state's.

    Raises:
        CheckpointError: for a document that is malformed, or does not fit the tensors.
    """
    decoder = Decoder(tensors, where)
    if not isinstance(document, dict) or set(document) != {"onstep_state", "state"}:
        decoder.refuse("a state has the members 'onstep_state' and 'state'")
    if type(document["onstep_state"]) is not int or document["onstep_state"] != FORMAT:
        raise CheckpointError(
            f"{where}: its format is {shown(document['onstep_state'])}, this version reads {FORMAT}; load it with the "
            f"version of Onstep that wrote it."
        )
    state = decoder.node(document["state"])
    unused = sorted(set(tensors) - decoder.used)
    if unused:
        raise CheckpointError(f"{where}: {len(unused)} tensors are not in its document, the first is {unused[0]!r}.")
    return state


def document_to_bytes(document: Any, where: str = "state") -> bytes:
    """A document as the bytes of a JSON file.

    Raises:
        UnsupportedStateError: if it is too large.
    """
    text = json.dumps(document, separators=(",", ":"), allow_nan=False, ensure_ascii=False).encode()
    if len(text) > MAX_DOCUMENT_BYTES:
        raise UnsupportedStateError(
            f"{where}: its values besides tensors need {len(text)} bytes of JSON, allowed are {MAX_DOCUMENT_BYTES}; "
            f"keep long lists as tensors or NumPy arrays."
        )
    return text


def document_from_bytes(text: bytes, where: str = "state") -> Any:
    """A document from the bytes of a JSON file, for `decode_state`.

    Raises:
        CheckpointError: for anything but strict JSON.
    """
    if len(text) > MAX_DOCUMENT_BYTES:
        raise CheckpointError(f"{where}: {len(text)} bytes of JSON are more than the {MAX_DOCUMENT_BYTES} allowed.")
    return load_strict(text, where)
