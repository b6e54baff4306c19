"""`onstep diloco simulate`: predicts round times and traffic of a run at several sites."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Callable

    from onstep.diloco.simulator.comparison import Compared

BAR_DELAY_SECONDS = 1.0


def simulate(
    scenario: Annotated[Path, typer.Argument(metavar="SCENARIO.yaml", help="Sites, server, model and settings.")],
    vary: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=A,B",
            help="Simulate each of several values, as sync_every=50,100 or 'sites.*.upload_mbit=10,100'; repeatable.",
        ),
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Image to draw: png, svg or pdf.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with every round.")] = False,
) -> None:
    """Simulate a run at several sites: round times, traffic, late and lost work, idle time.

    It runs the protocol of `onstep diloco server` and its workers on a virtual clock and network, without any training.
    It does not model how the settings affect the loss.
    """
    from onstep.config import load_yaml
    from onstep.diloco.simulator.comparison import compare, comparison_text
    from onstep.diloco.simulator.reading import variations

    several = variations(load_yaml(scenario), vary or [])
    with _bar(sum(one.scenario.total_rounds for one in several)) as on_round:
        compared = compare(several, on_round)
    if as_json:
        print(json.dumps([{"choices": one.variation.choices} | one.report.as_dict() for one in compared]))
    elif vary:
        print(comparison_text(compared))
    else:
        print(compared[0].report.text())
    if output is not None:
        _draw(compared, output)


def _draw(compared: list[Compared], output: Path) -> None:
    from onstep.analysis.plots.output import save
    from onstep.diloco.simulator.figures import draw_comparison, draw_report

    figure = draw_comparison(compared) if compared[0].variation.choices else draw_report(compared[0].report)
    save(figure, output)


@contextmanager
def _bar(total: int) -> Iterator[Callable[[int], None]]:
    """A progress bar on a terminal, for simulations of more than a second."""
    from tqdm import tqdm

    bar: Any
    with tqdm(total=total, unit=" rounds", leave=False, disable=None, delay=BAR_DELAY_SECONDS) as bar:
        yield lambda _: bar.update()
