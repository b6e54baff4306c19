"""Computes how many bytes submissions and versions have."""

from __future__ import annotations

from onstep.diloco.protocol.messages import ParameterSpec, Ready, Reply
from onstep.diloco.sizes import encoded_bytes


class Payload:
    """Sizes of bodies, for a model whose fragments are equally large; HTTP's and TCP's own bytes are not counted."""

    def __init__(self, parameters: int, num_fragments: int, codec: str) -> None:
        counts = [parameters // num_fragments + (one < parameters % num_fragments) for one in range(num_fragments)]
        self.encoded = [_bytes(count, codec) for count in counts]
        """Of a submission or an update, by fragment."""
        self.full = [_bytes(count, "fp32") for count in counts]
        """Of all parameters of a fragment."""

    def of_reply(self, reply: Reply) -> int:
        """Bytes of a reply's body."""
        if type(reply) is not Ready:
            return 0
        return (self.encoded if reply.kind == "update" else self.full)[reply.fragment]


def _bytes(count: int, codec: str) -> int:
    return encoded_bytes([ParameterSpec("fragment", (count,), "F32")], codec)
