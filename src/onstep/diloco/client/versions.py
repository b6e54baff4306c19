"""Reads the versions that a server sends, and compares their hashes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from onstep.diloco.client.link import Link
from onstep.diloco.codec import InvalidTensorsError, decode, digest, read_body
from onstep.diloco.protocol.messages import ParameterSpec, Ready
from onstep.diloco.protocol.session import Unsettled, WorkerSession

Tensors = dict[str, Tensor]
ATTEMPTS = 3
"""At a whole version that arrives as the server has it."""


def received(
    ready: Ready,
    body: object,
    specs: Sequence[ParameterSpec],
    version: int = -1,
    base: Mapping[str, Tensor] | None = None,
) -> Tensors | None:
    """The parameters of a version that arrived; None if they are not what the server has.

    Args:
        ready: the server's message.
        body: what came with it.
        specs: of the fragment's parameters.
        version: that the worker has, to which updates are added.
        base: its parameters.

    Raises:
        InvalidTensorsError: for a body that is not one of this fragment.
    """
    assert isinstance(body, bytes | bytearray | memoryview)
    tensors = decode(read_body(body), specs, ready.codec)
    if ready.kind == "update":
        if base is None or ready.version != version + 1:
            return None
        tensors = {name: base[name] + update for name, update in tensors.items()}
    return tensors if ready.digest in ("", digest(tensors)) else None


def fetch_version(
    link: Link, session: WorkerSession, fragment: int, specs: Sequence[ParameterSpec], bound: float
) -> tuple[Ready, Tensors] | Unsettled:
    """The newest version of a fragment with all of its parameters; Unsettled if it does not come within the bound.

    Raises:
        SessionEndedError: if the server refuses this worker.
        InvalidTensorsError: if what arrives is not what the server has, several times.
    """
    version = -1
    for _ in range(ATTEMPTS):
        answer = link.run(session.fetch(fragment, bound))
        if isinstance(answer, Unsettled):
            return answer
        ready = answer.reply
        assert isinstance(ready, Ready)
        tensors = received(ready, answer.body, specs)
        if tensors is not None:
            return ready, tensors
        version = ready.version
    raise InvalidTensorsError(
        f"version {version} of fragment {fragment} arrived {ATTEMPTS} times with another hash than the "
        "server's; check the network and the memory of both machines."
    )
