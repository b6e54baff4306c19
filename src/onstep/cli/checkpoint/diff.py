"""`onstep checkpoint diff`: compares two checkpoints side by side."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable

from onstep.analysis.text_tables import printable, shortened, table, terminal_width
from onstep.checkpoint import CheckpointInfo
from onstep.checkpoint.compare import Comparison, TensorDifference, ValueDifference, compare
from onstep.cli.cells import counted, date_shown, number_shown, size_shown
from onstep.config import ChangeClass, from_dict
from onstep.config.differences import changes, describe, fill_stored
from onstep.errors import ConfigError
from onstep.stores.urls import with_urls

TENSORS_SHOWN = 10
"""Per component, and per rank if a component is saved by several ranks."""
VALUES_SHOWN = 8
_VALUE_WIDTH = 40
_INDEX = re.compile(r"\.[0-9]+(\.|$)")


def report(a: CheckpointInfo, b: CheckpointInfo, *, everything: bool) -> tuple[list[str], bool]:
    """Compare two verified checkpoints: the lines to print, and whether the two are equal.

    Raises:
        CheckpointError: if a file is not in Onstep's checkpoint format.
    """
    found = compare(a, b, everything=everything)
    config_lines, same_config = _config(a, b)
    names = [with_urls(str(info.path)) for info in (a, b)]
    width = max(map(len, names))
    heads = [
        f"{letter}  {name:<{width}}  step {info.step}, {date_shown(info.manifest.created_at)}, "
        f"{counted(info.manifest.world_size, 'rank')}, run {info.manifest.run_id[:8] or '-'}"
        for letter, name, info in zip("AB", names, (a, b), strict=True)
    ]
    sections = [
        heads,
        config_lines,
        _components(found),
        _tensors(found, everything),
        _values(found, everything),
    ]
    lines = [line for section in sections if section for line in ("", *section)][1:]
    is_equal = found.is_equal and same_config
    result = "The checkpoints are equal." if is_equal else "The checkpoints differ."
    return [printable(line) for line in lines] + ["", result + _left_out(found, everything)], is_equal


def _config(a: CheckpointInfo, b: CheckpointInfo) -> tuple[list[str], bool]:
    """The table of changed keys, and whether none of them affects training results."""
    if a.manifest.config == b.manifest.config:
        return ["configuration: the same"], True
    try:
        found = changes(a.manifest.config, fill_stored(from_dict(b.manifest.config)))
    except ConfigError as error:
        return [f"configuration: different, but this version of Onstep cannot compare the two: {error}"], False
    is_same = all(one.kind is ChangeClass.SAFE for one in found)
    described = [f"  {line}" for line in describe(found).splitlines()]
    title = "differs only in keys that do not affect training results" if is_same else "different"
    return [f"configuration: {title} (A: old, B: new)", *_fitting(described)], is_same


def _components(found: Comparison) -> list[str]:
    rows = [("component", "shared", "saved by", "size A", "size B", "content")]
    for one in found.components:
        shared = " / ".join(dict.fromkeys(text for text in one.patterns if text))
        ranks = " / ".join(dict.fromkeys(counted(number, "rank") for number in one.ranks if number is not None))
        content = "only in B" if one.sizes[0] is None else "only in A" if one.sizes[1] is None else ""
        content = content or ("equal" if one.is_equal else "different")
        rows.append((one.key, shared, ranks, size_shown(one.sizes[0]), size_shown(one.sizes[1]), content))
    return ["components", *table(rows, "<<<>><", shrink=0)]


def _tensors(found: Comparison, everything: bool) -> list[str]:
    different = [one for one in found.tensors if not one.is_equal]
    title = f"tensors: {len(different)} of {found.num_tensors} differ"
    shown = found.tensors if everything else _most_different(different)
    if not shown:
        return [title]
    rows = [("tensor", "shape", "max |a-b|", "relative", "norm A", "norm B"), *map(_tensor_row, shown)]
    lines = [title, *table(rows, "<<>>>>", shrink=0)]
    more = len(different) - len(shown)
    return (
        [*lines, f"  ... and {more} with smaller differences; use --all to show them"]
        if not everything and more
        else lines
    )


def _most_different(found: list[TensorDifference]) -> list[TensorDifference]:
    """The tensors of each state with the largest relative differences, largest first."""
    states = dict.fromkeys(one.state for one in found)
    return [
        one
        for state in states
        for one in sorted((one for one in found if one.state == state), key=_by_difference)[:TENSORS_SHOWN]
    ]


def _by_difference(one: TensorDifference) -> tuple[bool, float]:
    """Sort key; tensors that cannot be subtracted or contain NaN come first."""
    is_number = one.relative is not None and not math.isnan(one.relative)
    return (is_number, -one.relative if one.relative is not None and is_number else 0.0)


def _tensor_row(one: TensorDifference) -> tuple[str, ...]:
    texts = ("missing" if shape is None else "x".join(map(str, shape)) or "()" for shape in one.shapes)
    shapes = list(dict.fromkeys(texts))
    dtypes = list(dict.fromkeys(str(dtype).removeprefix("torch.") for dtype in one.dtypes if dtype is not None))
    shape = " / ".join(shapes) + (f" {' / '.join(dtypes)}" if len(dtypes) > 1 else "")
    largest = "equal" if one.is_equal else number_shown(one.largest)
    relative = "" if one.is_equal else number_shown(one.relative)
    return (f"{one.state} {one.name}", shape, largest, relative, number_shown(one.norms[0]), number_shown(one.norms[1]))


def _values(found: Comparison, everything: bool) -> list[str]:
    shown = [one for one in found.values if everything or not one.is_incidental]
    if not shown:
        return []
    states = list(dict.fromkeys(one.state for one in shown))
    lines = [line for state in states for line in _values_of([one for one in shown if one.state == state], everything)]
    return ["values", *_fitting(lines)]


def _values_of(found: list[ValueDifference], everything: bool) -> Iterable[str]:
    """One line per difference; without `everything`, differences whose paths differ only in an index are merged."""
    state = found[0].state
    alike = Counter((one.path if everything else _INDEX.sub(r".*\1", one.path), one.old, one.new) for one in found)
    incidental = {one.path for one in found if one.is_incidental}
    shown = list(alike.items())[: None if everything else VALUES_SHOWN]
    for (path, old, new), number in shown:
        times = f"  ({number} times)" if number > 1 else "  (not counted)" if path in incidental else ""
        change = f"{shortened(old, _VALUE_WIDTH)} -> {shortened(new, _VALUE_WIDTH)}"
        yield f"  {f'{state} {path}'.rstrip()}: {change}{times}"
    if len(alike) > len(shown):
        yield f"  {state}: ... and {len(alike) - len(shown)} more; use --all to show them"


def _left_out(found: Comparison, everything: bool) -> str:
    incidental = sum(one.is_incidental for one in found.values)
    if not incidental:
        return ""
    where = "" if everything else "; use --all to show them"
    return (
        f" Not counted: {counted(incidental, 'difference')} in timings or in paths of the run's own directory{where}."
    )


def _fitting(lines: list[str]) -> list[str]:
    width = terminal_width()
    return lines if width is None else [line if len(line) <= width else f"{line[: width - 3]}..." for line in lines]
