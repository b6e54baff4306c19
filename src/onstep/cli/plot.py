"""`onstep plot heatmap`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from onstep.errors import ConfigError

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    help="Draw what is logged for each parameter. Curves of a run's log: onstep logs plot",
)

FILE_NAMES = {
    "parameter_norms.json": ("ParameterNormLogger", ("norm", "spectral_norm")),
    "gradient_norms.json": ("GradNormLogger", ("grad_norm",)),
}
"""The files that are drawn, with the callback that writes each and the metrics that it may have."""


@app.callback()
def _group() -> None:
    """Keep `heatmap` a word of its own while it is the only command."""


@app.command()
def heatmap(
    log_path: Annotated[
        str | None,
        typer.Argument(
            metavar="[LOG_PATH]",
            help="parameter_norms.json, gradient_norms.json, a run's folder or name; default the newest such file.",
        ),
    ] = None,
    metric: Annotated[str | None, typer.Option(help="norm, spectral_norm or grad_norm; default what there is.")] = None,
    pattern: Annotated[
        str | None, typer.Option("--filter", "-f", metavar="REGEX", help="Only parameters whose names have it.")
    ] = None,
    step_stride: Annotated[int, typer.Option(metavar="N", help="Show every so many records.")] = 1,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="The picture; default in tmp/.")] = None,
    form: Annotated[str | None, typer.Option("--format", metavar="FORMAT", help="png, svg or pdf.")] = None,
    edit: Annotated[
        bool, typer.Option("--edit", "-e", help="Open the picture in $VISUAL, $EDITOR or a viewer.")
    ] = False,
    title: Annotated[str | None, typer.Option(help="Above the figure.")] = None,
    log_scale: Annotated[bool, typer.Option("--log-scale", help="Logarithmic colours.")] = False,
    vmin: Annotated[float | None, typer.Option(help="Value of the lowest colour.")] = None,
    vmax: Annotated[float | None, typer.Option(help="Value of the highest colour.")] = None,
    figsize: Annotated[
        tuple[float, float] | None, typer.Option(metavar="W H", help="Inches; default as large as it needs.")
    ] = None,
    show: Annotated[bool, typer.Option(help="Open the picture in the system's viewer.")] = False,
) -> None:
    """Draw a norm of every parameter over the steps, and print where the picture is."""
    from onstep.analysis.heatmap import plot_parameter_heatmap
    from onstep.cli.logs_reading import as_file_name, hand_over, output_path

    path = find_file(log_path, metric)
    name = f"{as_file_name(path.absolute().parent.name)}_heatmap_{path.stem}{f'_{metric}' if metric else ''}"
    target = output_path(output, form, name)
    plot_parameter_heatmap(
        path, metric, pattern, step_stride, log_scale, vmin, vmax, title=title, output_path=target, figsize=figsize
    )
    hand_over(target, edit=edit, show=show)


def find_file(words: str | None, metric: str | None = None) -> Path:
    """The file that the words name; of a run, or without words of the project, the one last written to.

    Args:
        words: A file, a run's folder or its name; None: any run of the project.
        metric: What the file is to have, where the words name no file; None: anything.

    Raises:
        ConfigError: when there is none.
    """
    from onstep.analysis.log_files import find_diagnostic_logs

    names = [name for name, (_, metrics) in FILE_NAMES.items() if metric in metrics] or list(FILE_NAMES)
    if words is None:
        found = find_diagnostic_logs(Path.cwd(), *names)
        if not found:
            raise ConfigError(f"there is no {' or '.join(names)} below {Path.cwd()}; {_remedy(names)}")
        return found[0]
    for path in (Path(words), Path("runs") / words):
        if path.is_file():
            return path
        there = [path / name for name in names if (path / name).is_file()]
        if there:
            return max(there, key=lambda one: one.stat().st_mtime)
    if Path(words).is_dir() or (Path("runs") / words).is_dir():
        raise ConfigError(f"{words} has no {' or '.join(names)}; {_remedy(names)}")
    raise ConfigError(f"there is no file or run {words!r}.")


def _remedy(names: list[str]) -> str:
    return f"train with the callback {' or '.join(FILE_NAMES[name][0] for name in names)}."
