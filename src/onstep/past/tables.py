"""Shows an examined step: as lines for a terminal, and as a section of a report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from onstep.analysis.reports.sections import rewound_step
from onstep.analysis.text_tables import printable, shortened, table
from onstep.past.blame import Blame, Dropped
from onstep.past.layers import LayerNorms
from onstep.past.samples import Sample
from onstep.past.view import StepView

MOST_SAMPLES = 10
"""Samples that are shown, unless all are asked for."""
_TEXT = 160


def step_lines(view: StepView, *, shows_all: bool = False) -> list[str]:
    """The examined step for a terminal."""
    lines = [view.comparison["summary"], "", *_facts(view), ""]
    samples = view.ranked if shows_all else view.ranked[:MOST_SAMPLES]
    rows = [sample_cells(number, one) for number, one in enumerate(samples, 1)]
    more = len(view.samples) - len(samples)
    lines += [f"samples, the largest share of the loss first{f'; {more} more: --all or --json' * bool(more)}"]
    lines += table([SAMPLE_HEAD, *rows], "><>>>>>")
    unusual = [one for one in enumerate(view.ranked, 1) if one[0] > len(samples) and one[1].unusual]
    for number, sample in [*enumerate(samples, 1), *unusual[:MOST_SAMPLES]]:
        lines += ["", *_sample_lines(number, sample)]
    lines += ["", f"layers{f', beside their mean of the {view.num_means} steps before' if view.num_means else ''}"]
    lines += table([LAYER_HEAD, *(layer_cells(one) for one in view.layers)], "<>>>>>>>", shrink=0)
    if view.decisions:
        lines += ["", "decisions and commands near it"]
        lines += [f"  step {one['step']}: {printable(one['text'])}" for one in view.decisions]
    return [*lines, *(["", *(f"note: {printable(one)}" for one in view.warnings)] if view.warnings else [])]


def report_section(view: StepView) -> str:
    """The examined step as a section of a report, in HTML."""
    notes = [(f"{number}. {sample_name(one)}", _note(one)) for number, one in enumerate(view.ranked, 1)]
    return rewound_step(
        f"Step {view.step:,} of the past",
        [view.comparison["summary"], *_facts(view)],
        [SAMPLE_HEAD, *(sample_cells(number, one) for number, one in enumerate(view.ranked, 1))],
        [pair for pair in notes if pair[1]],
        [LAYER_HEAD, *(layer_cells(one) for one in view.layers)],
    )


SAMPLE_HEAD = ["", "sample", "loss", "share", "gradient", "of step's", "labels"]
LAYER_HEAD = ["layer", "weight", "gradient", "mean", "update", "mean", "activation", "logit"]


def sample_cells(number: int, sample: Sample) -> list[str]:
    """A sample's row of the table."""
    share = None if sample.grad_share is None else f"{sample.grad_share:.1%}"
    labels = "-" if sample.num_labels is None else f"{sample.num_labels:,}"
    name, loss = sample_name(sample), _shown(sample.loss)
    return [str(number), name, loss, f"{sample.share:.1%}", _shown(sample.grad_norm), share or "-", labels]


def layer_cells(layer: LayerNorms) -> list[str]:
    """A layer's row of the table."""
    values = (
        layer.weight,
        layer.gradient,
        layer.mean_gradient,
        layer.update,
        layer.mean_update,
        layer.activation,
        layer.attention_logit,
    )
    return [layer.name, *map(_shown, values)]


def sample_name(sample: Sample) -> str:
    """Its dataset index, or its place in the step."""
    if sample.index is not None:
        return f"index {sample.index}"
    row = "" if sample.row < 0 else f", row {sample.row}"
    return f"rank {sample.rank}, micro-batch {sample.micro_batch}{row}"


def _facts(view: StepView) -> list[str]:
    clip = "" if view.clip_factor is None or view.clip_factor > 1 - 1e-6 else f", clipped by {view.clip_factor:.3g}"
    scale = "" if view.loss_scale is None else f", loss scale {view.loss_scale:g}"
    line = f"step {view.step}: loss {_shown(view.loss)}, gradient norm {_shown(view.grad_norm)}{clip}"
    facts = f"{line}, learning rate {_shown(view.learning_rate)}{scale}, epoch {view.epoch:.4g}"
    return [facts, f"repeating took {view.seconds:.3g} s, without loading"]


def _sample_lines(number: int, sample: Sample) -> list[str]:
    lines = [f"  {number}. {sample_name(sample)}, epoch {sample.epoch}{f': {sample.place}' if sample.place else ''}"]
    lines += [f"     unusual: {printable('; '.join(sample.unusual))}"] if sample.unusual else []
    lines += [f"     {printable(key)}: {printable(value)}" for key, value in sample.fields.items()]
    if sample.text is not None:
        lines.append(f"     {shortened(printable(repr(sample.text)), _TEXT)}")
    worst: Sequence[Any] = sorted(sample.documents, key=lambda one: -one.share)[:3]
    lines += [
        f"     document from position {one.first}: loss {_shown(one.loss)}, share {one.share:.1%}"
        + (f", {one.place}" if one.place else "")
        for one in worst
    ]
    return lines


def _note(sample: Sample) -> str:
    return "\n".join(line.strip() for line in _sample_lines(0, sample)[1:])


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def blame_lines(blame: Blame) -> list[str]:
    """What dropping each sample of a step would have given, for a terminal."""
    number = len(blame.happened)
    last = f"step {blame.step + 1}" if number == 1 else f"steps {blame.step + 1} to {blame.step + number}"
    is_equal = blame.repeated == blame.happened
    check = "equal to the bit" if is_equal else f"{_shown(sum(blame.repeated) / number)}, so not to the bit"
    lines = [
        f"mean loss of {last}: {_shown(blame.mean)} as it happened; trained again with all samples: {check}",
        f"without each sample of step {blame.step} in turn, the lowest loss first",
    ]
    rows = [
        [str(rank), _dropped_name(one), f"{one.mean:.6g}", f"{one.mean - blame.mean:+.3g}"]
        for rank, one in enumerate(blame.dropped, 1)
    ]
    return [*lines, *table([["", "without", "next loss", "difference"], *rows], "><>>")]


def _dropped_name(one: Dropped) -> str:
    return f"rank {one.rank}, {one.micro_batch}.{one.row}" if one.index is None else str(one.index)
