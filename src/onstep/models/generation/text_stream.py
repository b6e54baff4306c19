"""Decodes tokens as they are generated."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

_INCOMPLETE = "\ufffd"
"""What decoders put in place of bytes that are not a character, such as the first bytes of a longer one."""


_CONTEXT = 8
"""Number of earlier tokens that the first ones are decoded with."""


def text_pieces(ids: Iterable[int], decode: Callable[[Sequence[int]], str], after: Sequence[int] = ()) -> Iterator[str]:
    """The text of `ids`, which follow those of `after`, in pieces, each as soon as its characters are complete.

    A few tokens are decoded at a time, together with those before them, since the text of a token can depend on its
    neighbors: decoders drop the space before the first word, and characters can have several tokens.

    Source: the incremental decoding of Hugging Face's text-generation-inference.
    """
    known = list(after[-_CONTEXT:])
    begin, read = 0, len(known)  # tokens from `begin` are decoded; the text of those before `read` is known
    for token in ids:
        known.append(token)
        before, now = decode(known[begin:read]), decode(known[begin:])
        if len(now) > len(before) and not now.endswith(_INCOMPLETE):
            yield now[len(before) :]
            begin, read = read, len(known)
    if rest := decode(known[begin:])[len(decode(known[begin:read])) :]:
        yield rest
