"""Tells whether losses per token of several runs can be compared, from the tokenizers in their `run.json`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from onstep.analysis.logs.run_status import run_record
from onstep.analysis.logs.training_log import TrainingLog

PER_BYTE = " per byte"


@dataclass(frozen=True)
class LossUnit:
    """What the losses of several runs are per."""

    is_common: bool = True
    """Whether the losses as logged can be compared; True as well if nothing is known of the tokenizers."""
    bytes_per_token: tuple[float, ...] = ()
    """Of each run with different tokenizers, if known of all: losses divided by them, per byte, can be compared."""

    def divisor(self, index: int, metric: str) -> float:
        """What to divide the values of a metric of run `index` by."""
        return self.bytes_per_token[index] if self.bytes_per_token and _is_loss(metric) else 1.0

    def suffix(self, metric: str) -> str:
        """An addition to the name of a metric that depends on the tokenizer."""
        if self.is_common or not (_is_loss(metric) or metric.endswith("perplexity")):
            return ""
        return PER_BYTE if self.bytes_per_token and _is_loss(metric) else " per token of different tokenizers"

    @property
    def note(self) -> str:
        """A sentence for the reader of a comparison; empty if losses as logged can be compared."""
        if self.is_common:
            return ""
        remedy = (
            "the rows per byte can be, which are loss / bytes of text per token"
            if self.bytes_per_token
            else "and the bytes of text per token are not known of all, so no run is marked as the best"
        )
        return f"the runs have different tokenizers, so losses per token and perplexities cannot be compared; {remedy}"


def loss_unit(logs: Sequence[TrainingLog]) -> LossUnit:
    """The unit in which the losses of the runs can be compared."""
    found = [tokenizer_of(run_record(log.log_path.parent)) for log in logs]
    is_known = all(one["fingerprint"] is not None for one in found)
    if len({one["fingerprint" if is_known else "configured"] for one in found}) < 2:
        return LossUnit()
    ratios = [one["bytes_per_token"] for one in found if one["bytes_per_token"] is not None]
    return LossUnit(False, tuple(ratios) if len(ratios) == len(logs) else ())


def tokenizer_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """The tokenizer of a run by its `run.json`: `fingerprint` and `bytes_per_token`, None if they are unknown, and
    `configured`, by which runs of which one has no fingerprint are compared."""
    recorded = _mapping(record.get("tokenizer"))
    fingerprint, ratio = recorded.get("fingerprint"), recorded.get("bytes_per_token")
    is_ratio = isinstance(ratio, float) and math.isfinite(ratio) and ratio > 0
    return {
        "fingerprint": fingerprint if isinstance(fingerprint, str) else None,
        "bytes_per_token": ratio if is_ratio else None,
        "configured": _configured(record),
    }


def _configured(record: Mapping[str, Any]) -> str:
    """The tokenizer of a run that recorded none; one that was trained belongs to its corpus."""
    if record.get("layout") == "hugging_face":  # a Trainer's configuration does not have its tokenizer
        return str(_mapping(record.get("tokenizer")).get("fingerprint", ""))
    identity = _mapping(record.get("identity"))
    tokenizer = _mapping(_mapping(record.get("config")).get("tokenizer"))
    corpus = identity.get("data") if tokenizer.get("tokenizer_type") == "bpe" else None
    return repr((sorted(tokenizer.items()), identity.get("tokenizer"), corpus)) if tokenizer else ""


def _is_loss(metric: str) -> bool:
    """Whether a metric is a mean over tokens; the losses of experts, such as `z_loss`, are not."""
    return metric == "loss" or (metric.startswith(("eval_", "test_")) and metric.endswith("_loss"))


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
