"""Says what is unusual about samples: beside the others of their step, and beside those of the repeated steps."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from onstep.data import Batch
from onstep.distributed import World
from onstep.past.passages import Passages
from onstep.past.samples import Sample, tokens_of
from onstep.training.compute.rows import rows_of
from onstep.training.compute.step import Step

_NGRAM = 4
_REPEATED = 0.5
"""Share of a text's n-grams that occur before in it, from which on it repeats itself, if the others do not."""
_SEEN = 0.25
"""Share of a text that is in other samples, from which on that is unusual, if less of the others is."""
_TIMES = 3.0
"""A value this many times the median of the others is unusual."""
_DIGITS = 4


class Seen:
    """The tokens and the contents of the samples of the repeated steps, up to the step before the one that is held."""

    def __init__(self) -> None:
        self.num_steps = 0
        self._tokens: npt.NDArray[np.bool_] = np.zeros(0, dtype=np.bool_)
        self._places: dict[bytes, dict[int | None, int]] = {}
        """By content: the last step of each index that has it."""
        self.passages = Passages()
        self._waiting: list[tuple[npt.NDArray[np.int32], int, Sequence[int] | None]] = []

    def add(self, step: Step) -> None:
        """Count a step."""
        self.num_steps += 1
        for number, batch in enumerate(step.micro_batches):
            ids = None if step.sample_ids is None else step.sample_ids[number]
            if (tokens := tokens_of(batch)) is not None:
                self._waiting.append((tokens.astype(np.int32), step.number, ids))
            else:
                self._keep(_digests(batch), step.number, ids)

    def _keep(self, digests: Iterable[bytes], step: int, ids: Sequence[int] | None) -> None:
        for row, digest in enumerate(digests):
            index = None if ids is None or row >= len(ids) else ids[row]
            self._places.setdefault(digest, {})[index] = step

    def settle(self) -> None:
        """Look at the token sequences that were added; steps that are repeated do not wait for that."""
        waiting, self._waiting = self._waiting, []
        for tokens, step, ids in waiting:
            if not tokens.size:
                continue
            if (most := int(tokens.max()) + 1) > self._tokens.size:
                self._tokens = np.pad(self._tokens, (0, most - self._tokens.size))
            self._tokens[tokens.ravel()] = True
            self._keep(map(_digest_of_tokens, tokens), step, ids)
            for row, sequence in enumerate(tokens):
                self.passages.add(sequence, step, None if ids is None or row >= len(ids) else ids[row])

    def with_step(self, step: Step, world: World) -> Seen:
        """What all ranks have seen, and the contents of the samples of a further step. Collective."""
        current = Seen()
        current.add(step)
        self.settle()
        current.settle()
        merged = Seen()
        merged.num_steps = self.num_steps
        for seen, now in world.data.gather((self, current)):
            size = max(merged._tokens.size, seen._tokens.size)
            masks = [np.pad(one._tokens, (0, size - one._tokens.size)) for one in (merged, seen)]
            merged._tokens = masks[0] | masks[1]
            for one in (seen, now):
                merged.passages.extend(one.passages)
                for digest, places in one._places.items():
                    known = merged._places.setdefault(digest, {})
                    known |= {index: max(number, known.get(index, 0)) for index, number in places.items()}
        return merged

    def num_new(self, tokens: npt.NDArray[Any]) -> int:
        """How many of the different tokens were never in a repeated step."""
        distinct = np.unique(tokens)
        known = distinct < self._tokens.size
        return int(distinct.size - self._tokens[distinct[known]].sum())

    def place_of(self, batch: Batch, own_index: int | None, own_step: int) -> str:
        """The last repeated step with another sample of the same content, in words; empty without any."""
        found = [places for digest in _digests(batch) for places in (self._places.get(digest),) if places]
        others = [
            (step, index)
            for one in found
            for index, step in one.items()
            if (index != own_index if index is not None else step != own_step)
        ]
        if not others:
            return ""
        step, index = max(others, key=lambda one: one[0])
        return f"the same content as a sample of step {step}{'' if index is None else f' (index {index})'}"


def mark(samples: Sequence[Sample], batches: Sequence[Batch], seen: Seen, step: int) -> None:
    """Set `unusual` of samples, which `batches` hold one by one, and `fields` of those that are not text."""
    tokens = [tokens_of(batch) for batch in batches]
    first_of: dict[bytes, int] = {}
    repeated = [0.0 if one is None else _repetition(one[0]) for one in tokens]
    new = [0 if one is None else seen.num_new(one) for one in tokens]
    shares = [
        (0.0, "") if one is None else seen.passages.shared(one[0], sample.index, step)
        for one, sample in zip(tokens, samples, strict=True)
    ]
    for number, (sample, batch) in enumerate(zip(samples, batches, strict=True)):
        notes = sample.unusual
        if sample.num_labels == 0:
            notes.append("no labels: all padding or prompt")
        if (ids := tokens[number]) is not None:
            if ids.size > 1 and np.unique(ids).size == 1:
                notes.append(f"one token {ids.size:,} times")
            elif repeated[number] > max(_REPEATED, 1.5 * _median_without(repeated, number)):
                notes.append(f"repeats itself: {repeated[number]:.0%} of its {_NGRAM}-grams occur before in it")
            if seen.num_steps and new[number] > max(2, _TIMES * _median_without(new, number)):
                notes.append(f"{new[number]} tokens that none of the {seen.num_steps} repeated steps before has")
        else:
            sample.fields = _fields(batch)
        digest = next(iter(_digests(batch)), b"")
        if digest and digest in first_of:
            notes.append(f"the same content as sample {first_of[digest] + 1} of this step")
        elif place := seen.place_of(batch, sample.index, step):
            notes.append(place)
        elif shares[number][0] > max(_SEEN, 1.5 * _median_without([one[0] for one in shares], number)):
            share, words = shares[number]
            notes.append(f"{share:.0%} of its text is in {words} too")
        first_of.setdefault(digest, number)
    _mark_values(samples, batches)


def mark_measures(samples: Sequence[Sample]) -> None:
    """Mark samples whose loss, gradient or number of labels is far from that of the others, of all ranks."""
    for words, value_of in _MEASURES:
        _mark_large(samples, words, value_of)
    _mark_lengths(samples)


_MEASURES: tuple[tuple[str, Callable[[Sample], float | None]], ...] = (
    ("loss", lambda one: one.loss),
    ("gradient", lambda one: one.grad_norm),
)


def _mark_large(samples: Sequence[Sample], words: str, value_of: Callable[[Sample], float | None]) -> None:
    values = [value_of(one) for one in samples]
    for number, (sample, value) in enumerate(zip(samples, values, strict=True)):
        others = [one for at, one in enumerate(values) if one is not None and at != number]
        if value is None or not others:
            continue
        usual = median(others)
        if not np.isfinite(value):
            sample.unusual.append(f"{words} {value}")
        elif value > _TIMES * usual > 0:
            sample.unusual.append(f"{words} {value / usual:.1f} times the median of the others")


def _mark_lengths(samples: Sequence[Sample]) -> None:
    counts = [one.num_labels for one in samples if one.num_labels is not None]
    if len(counts) < len(samples) or len(counts) < 2:
        return
    for number, sample in enumerate(samples):
        usual, own = _median_without(counts, number), counts[number]
        if own and not usual / _TIMES <= own <= usual * _TIMES:
            sample.unusual.append(f"{own:,} labels, the others have {usual:,.0f}")


def _mark_values(samples: Sequence[Sample], batches: Sequence[Batch]) -> None:
    """Mark fields of real numbers whose largest magnitude is far above that of the other samples."""
    largest = [{key: _largest(value) for key, value in _real(batch)} for batch in batches]
    for number, sample in enumerate(samples):
        for key, value in largest[number].items():
            others = [one[key] for at, one in enumerate(largest) if at != number and key in one]
            if others and not value <= _TIMES * max(median(others), 1e-30):
                sample.unusual.append(f"|{key}| up to {value:.{_DIGITS}g}, the others' median is {median(others):.3g}")


def _largest(value: Tensor) -> float:
    return float(value.detach().abs().max()) if value.numel() else 0.0


def _real(batch: Batch) -> Iterator[tuple[str, Tensor]]:
    for key, value in _named(batch):
        if isinstance(value, Tensor) and value.is_floating_point():
            yield key, value


def _named(batch: Batch) -> Iterator[tuple[str, Any]]:
    if isinstance(batch, Mapping):
        yield from batch.items()
    elif isinstance(batch, (list, tuple)):
        yield from ((str(number), value) for number, value in enumerate(batch))
    else:
        yield "value", batch


def _fields(batch: Batch) -> dict[str, str]:
    """What the fields of a batch of one sample hold, in words."""
    found = {}
    for key, value in _named(batch):
        if not isinstance(value, Tensor):
            found[key] = str(value)[:200]
        elif value.numel() <= 8:
            numbers = [one if isinstance(one, int) else f"{one:.{_DIGITS}g}" for one in value.flatten().tolist()]
            found[key] = ", ".join(map(str, numbers))
        else:
            low, high = float(value.min()), float(value.max())
            found[key] = f"{tuple(value.shape[1:])} from {low:.{_DIGITS}g} to {high:.{_DIGITS}g}"
    return found


def _repetition(tokens: npt.NDArray[Any]) -> float:
    """Share of the n-grams that occur before in the text."""
    if tokens.size < 2 * _NGRAM:
        return 0.0
    grams = np.lib.stride_tricks.sliding_window_view(tokens, _NGRAM)
    return 1.0 - len(np.unique(grams, axis=0)) / len(grams)


def _digests(batch: Batch) -> Iterator[bytes]:
    """A digest of the content of each sample; of text that of its tokens, padding included."""
    if (tokens := tokens_of(batch)) is not None:
        yield from map(_digest_of_tokens, tokens.astype(np.int32))
        return
    for row in rows_of(batch):
        hasher = hashlib.blake2b(digest_size=16)
        for key, value in _named(row):
            if isinstance(value, Tensor) and value.device.type != "meta":
                hasher.update(key.encode())
                hasher.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        yield hasher.digest()


def _digest_of_tokens(tokens: npt.NDArray[np.int32]) -> bytes:
    return hashlib.blake2b(np.ascontiguousarray(tokens).tobytes(), digest_size=16).digest()


def _median_without(values: Sequence[float], number: int) -> float:
    others = [one for at, one in enumerate(values) if at != number]
    return float(median(others)) if others else 0.0
