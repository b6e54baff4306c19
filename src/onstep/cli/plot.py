"""`onstep logs plot|report` and `onstep plot heatmap|pipeline`: draws figures of runs and writes HTML reports."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from onstep.cli.application import Labels, application
from onstep.cli.completed_words import complete_runs
from onstep.cli.runs import find_named, not_found, run_names
from onstep.errors import ConfigError

if TYPE_CHECKING:
    from onstep.analysis.logs.training_log import TrainingLog

Picture = Annotated[
    Path | None, typer.Option("--output", "-o", help="Image file to write; default: in the current directory.")
]
PictureFormat = Annotated[str | None, typer.Option("--format", metavar="FORMAT", help="png, svg or pdf.")]
EditPicture = Annotated[bool, typer.Option("--edit", "-e", help="Open the image in $VISUAL, $EDITOR or a viewer.")]
ShowPicture = Annotated[bool, typer.Option(help="Open the image in the system's viewer.")]
FigureTitle = Annotated[str | None, typer.Option(help="Title of the figure.")]

_WIDTH, _ROW_HEIGHT = 12.0, 4.0


def plot(
    paths: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[PATH ...]",
            autocompletion=complete_runs,
            help=(
                "Logs, run directories, or names below runs/; a directory of runs means its newest; default: the "
                "newest run."
            ),
        ),
    ] = None,
    metrics: Annotated[
        str | None,
        typer.Option(metavar="A,B", help="Keys of the records; default: loss,eval_loss,learning_rate, if logged."),
    ] = None,
    x_axis: Annotated[str, typer.Option(metavar="AXIS", help="x axis: step, epoch, time, tokens or flops.")] = "step",
    smooth: Annotated[
        int | None, typer.Option(metavar="N", help="Window of the moving mean in points; 1: off; default: by length.")
    ] = None,
    log_scale: Annotated[bool, typer.Option("--log-scale", help="Logarithmic y axes.")] = False,
    log_x: Annotated[bool, typer.Option("--log-x", help="Logarithmic x axes.")] = False,
    output: Picture = None,
    form: PictureFormat = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Draw the runs after it together with those before it.")
    ] = False,
    labels: Labels = None,
    title: FigureTitle = None,
    loss_curves: Annotated[
        bool, typer.Option("--loss-curves", help="Plot the losses; for a single run, with its learning rate.")
    ] = False,
    grad_norm: Annotated[bool, typer.Option("--grad-norm", help="Plot the gradient norm.")] = False,
    ignore_outliers: Annotated[bool, typer.Option(help="Ignore a few outliers when choosing the y limits.")] = True,
    perplexity: Annotated[bool, typer.Option("--perplexity", help="Plot exp(loss) instead of the loss.")] = False,
    x_min: Annotated[float | None, typer.Option(help="Lower limit of the x axis; minutes for time.")] = None,
    x_max: Annotated[float | None, typer.Option(help="Upper limit of the x axis.")] = None,
    y_min: Annotated[float | None, typer.Option(help="Lower limit of the y axis.")] = None,
    y_max: Annotated[float | None, typer.Option(help="Upper limit of the y axis.")] = None,
    edit: EditPicture = False,
    show: ShowPicture = False,
) -> None:
    """Plot metrics of one or more runs, and print the path of the image.

    Several runs share axes: onstep logs plot base low-lr --loss-curves --x-axis tokens
    """
    from onstep.analysis.logs.training_log import natural_order
    from onstep.cli.logs.lookup import as_file_name, file_prefix, hand_over, output_path, read_logs

    names = _metric_names(metrics, loss_curves=loss_curves, grad_norm=grad_norm)
    logs = natural_order(read_logs(paths or [], labels or []))
    if compare and len(logs) < 2:
        raise ConfigError("--compare requires at least two runs; pass their directories or names.")
    kind = "grad_norm" if grad_norm else "loss_curves" if loss_curves else "training_plot"
    if names is not None:
        kind = f"plot_{as_file_name('_'.join(names))}"
    target = output_path(output, form, file_prefix(logs) + kind)
    options = {
        "x_axis": x_axis, "smooth_window": smooth, "log_scale": log_scale, "log_x": log_x, "output_path": target,
        "title": title, "ignore_outliers": ignore_outliers,
        "x_min": x_min, "x_max": x_max, "y_min": y_min, "y_max": y_max,
    }  # fmt: skip
    if not grad_norm:
        options["perplexity"] = perplexity
    elif perplexity:
        raise ConfigError("--perplexity applies to loss plots only; drop it when using --grad-norm.")
    _draw(logs, names, options, loss_curves=loss_curves, grad_norm=grad_norm)
    hand_over(target, edit=edit, show=show)


def _metric_names(metrics: str | None, *, loss_curves: bool, grad_norm: bool) -> list[str] | None:
    """The requested keys; None without `--metrics`.

    Raises:
        ConfigError: when more than one kind of figure is requested.
    """
    if (metrics is not None) + loss_curves + grad_norm > 1:
        raise ConfigError("--metrics, --loss-curves and --grad-norm are mutually exclusive; choose one of them.")
    if metrics is None:
        return None
    names = [name.strip() for name in metrics.split(",") if name.strip()]
    if not names:
        raise ConfigError(f"--metrics must name at least one key, got {metrics!r}.")
    return names


def _draw(
    logs: list[TrainingLog], names: list[str] | None, options: dict[str, Any], *, loss_curves: bool, grad_norm: bool
) -> None:
    from onstep.analysis.plots.plots import default_metrics, plot_grad_norm, plot_loss_curves, plot_training_metrics

    if loss_curves:
        plot_loss_curves(logs, **options)
    elif grad_norm:
        plot_grad_norm(logs, **options)
    else:
        chosen = names or default_metrics(logs, options["x_axis"])
        rows = (len(chosen) + 1) // 2
        plot_training_metrics(logs, chosen, figsize=(_WIDTH, max(6.0, _ROW_HEIGHT * rows)), **options)


def report(
    paths: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[PATH ...]",
            autocompletion=complete_runs,
            help=(
                "Logs, run directories, names below runs/, or a directory of runs (all of them); default: the newest "
                "run."
            ),
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="HTML file to write; default: in the current directory.")
    ] = None,
    labels: Labels = None,
    title: Annotated[str | None, typer.Option(help="Heading of the page.")] = None,
    edit: Annotated[bool, typer.Option("--edit", "-e", help="Open the page in $VISUAL, $EDITOR or a browser.")] = False,
    show: Annotated[bool, typer.Option(help="Open the page in the browser.")] = False,
) -> None:
    """Write an HTML report: charts, summary, configuration differences, text samples, decisions, times, machines.

    The report is one self-contained file that works offline, below 1 MB for ten runs.
    """
    from onstep.analysis.logs.training_log import natural_order
    from onstep.analysis.reports.report import write_report
    from onstep.cli.logs.lookup import file_prefix, hand_over, output_path, read_logs

    logs = natural_order(read_logs(paths or [], labels or [], expand=True))
    target = output_path(output, None, f"{file_prefix(logs)}report", known=("html", "htm"))
    write_report(logs, target, title)
    hand_over(target, edit=edit, show=show)


class _Heatmaps(TyperGroup):
    """Names the command for curves if the words are those of one."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # the context's class has no public name
        """Refuse all but subcommands and requests for help."""
        if args and args[0] not in (*self.commands, *ctx.help_option_names):
            raise ConfigError(
                f"onstep plot has only {', '.join(self.commands)}, got {args[0]!r}; write onstep logs plot "
                f"{shlex.join(args)} for curves of runs."
            )
        return super().parse_args(ctx, args)


app = application(
    cls=_Heatmaps,
    no_args_is_help=True,
    help=(
        "Plot what is logged for each parameter, or the passes of a pipeline. For curves of a run's metrics, use: "
        "onstep logs plot"
    ),
)

FILE_NAMES = {
    "parameter_norms.json": ("ParameterNormLogger", ("norm", "spectral_norm")),
    "gradient_norms.json": ("GradNormLogger", ("grad_norm",)),
}
"""The files that can be plotted: the callback that writes each, and the metrics that it may contain."""


@app.command()
def heatmap(
    log_path: Annotated[
        str | None,
        typer.Argument(
            metavar="[LOG_PATH]",
            autocompletion=complete_runs,
            help="parameter_norms.json, gradient_norms.json, a run's directory or name; default: the newest such file.",
        ),
    ] = None,
    metric: Annotated[
        str | None, typer.Option(help="norm, spectral_norm or grad_norm; default: the one in the file.")
    ] = None,
    pattern: Annotated[
        str | None, typer.Option("--filter", "-f", metavar="REGEX", help="Only parameters whose name matches.")
    ] = None,
    step_stride: Annotated[int, typer.Option(metavar="N", help="Show every N-th record.")] = 1,
    output: Picture = None,
    form: PictureFormat = None,
    edit: EditPicture = False,
    title: FigureTitle = None,
    log_scale: Annotated[bool, typer.Option("--log-scale", help="Logarithmic color scale.")] = False,
    vmin: Annotated[float | None, typer.Option(help="Value of the lowest color.")] = None,
    vmax: Annotated[float | None, typer.Option(help="Value of the highest color.")] = None,
    figsize: Annotated[
        tuple[float, float] | None, typer.Option(metavar="W H", help="Size in inches; default: as large as needed.")
    ] = None,
    show: ShowPicture = False,
) -> None:
    """Plot a norm of every parameter over the steps, and print the path of the image."""
    from onstep.analysis.plots.heatmap import plot_parameter_heatmap
    from onstep.cli.logs.lookup import as_file_name, hand_over, output_path

    path = find_file(log_path, metric)
    name = f"{as_file_name(path.absolute().parent.name)}_heatmap_{path.stem}{f'_{metric}' if metric else ''}"
    target = output_path(output, form, name)
    plot_parameter_heatmap(
        path, metric, pattern, step_stride, log_scale, vmin, vmax, title=title, output_path=target, figsize=figsize
    )
    hand_over(target, edit=edit, show=show)


@app.command()
def pipeline(
    traces: Annotated[
        list[Path],
        typer.Argument(
            help="A trace of each rank of one pipeline (.json, .json.gz), or a directory with nothing else."
        ),
    ],
    output: Picture = None,
    form: PictureFormat = None,
    edit: EditPicture = False,
    title: FigureTitle = None,
    show: ShowPicture = False,
) -> None:
    """Plot when the ranks of a pipeline compute which pass, and print how long they are idle.

    Traces are recorded by ProfilerCallback or by: onstep control profile JOB --steps 3
    """
    from onstep.analysis.pipeline_traces import read_steps
    from onstep.analysis.plots.pipeline import plot_pipeline, typical
    from onstep.cli.logs.lookup import hand_over, output_path

    steps = read_steps(traces)
    step = typical(steps)
    target = output_path(output, form, "pipeline")
    plot_pipeline(step, title=title, output_path=target)
    busy = ", ".join(f"{one:.3f}" for one in step.busy)
    print(
        f"{len(steps)} steps of {len(step.ranks)} ranks. In a typical one, of {step.seconds:.3f} s, passes last "
        f"{busy} s: the ranks are idle for {step.idle:.1%} of that time. In this order, with passes of equal length "
        f"and no time for sending, they would be for {step.in_order().idle:.1%}."
    )
    hand_over(target, edit=edit, show=show)


def find_file(words: str | None, metric: str | None = None) -> Path:
    """The file that `words` names; for a run, or the whole project, the one last written to.

    Args:
        words: A file, a run's directory or its name; None: any run of the project.
        metric: The metric that the file must contain, unless `words` names a file; None: any.

    Raises:
        ConfigError: when no file is found.
    """
    from onstep.analysis.logs.files import find_diagnostic_logs

    names = [name for name, (_, metrics) in FILE_NAMES.items() if metric in metrics] or list(FILE_NAMES)
    if words is None:
        found = find_diagnostic_logs(Path.cwd(), *names)
        if not found:
            raise ConfigError(f"there is no {' or '.join(names)} below {Path.cwd()}; {_remedy(names)}")
        return found[0]
    path = find_named(words, lambda one: one.is_file() or any((one / name).is_file() for name in names))
    if path is not None:
        there = [path / name for name in names if (path / name).is_file()]
        return max(there, key=lambda one: one.stat().st_mtime) if there else path
    if find_named(words, Path.is_dir) is not None:
        raise ConfigError(f"{words} has no {' or '.join(names)}; {_remedy(names)}")
    raise ConfigError(f"there is no file or run {words!r}.{not_found(words, run_names(), '')}")


def _remedy(names: list[str]) -> str:
    return f"train with the callback {' or '.join(FILE_NAMES[name][0] for name in names)}."
