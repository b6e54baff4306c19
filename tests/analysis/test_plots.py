"""Figures of curves: what stands in them, read from matplotlib's own objects."""

from __future__ import annotations

import math
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from onstep.analysis import plot_grad_norm, plot_loss_curves, plot_training_metrics, smooth_values
from onstep.analysis.plots.axes import LogNumbers, ShortNumbers
from onstep.errors import ConfigError, DataError
from tests.support.made_logs import log_of, points, run


def heading(axes: Axes) -> str:
    return axes.get_title(loc="left")


def note(axes: Axes) -> str:
    return axes.get_title(loc="right")


def legend(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()] if figure.legends else []


def solid(axes: Axes) -> list[Any]:
    """The lines that are not the faint ones below, and no marks."""
    return [line for line in axes.lines if line.get_alpha() is None and line.get_linestyle() != "None"]


def ticks(axis: Any) -> list[str]:
    axis.figure.canvas.draw()
    low, high = sorted(axis.get_view_interval())
    places, labels = axis.get_majorticklocs(), axis.get_ticklabels()
    return [label.get_text() for place, label in zip(places, labels, strict=True) if low <= place <= high]


def test_each_metric_has_an_axes_and_each_run_a_curve() -> None:
    figure = plot_training_metrics([run("a"), run("b", offset=1.0)])
    assert [heading(axes) for axes in figure.axes] == ["training loss", "validation loss", "learning rate"]
    assert [len(solid(axes)) for axes in figure.axes] == [2, 2, 2]
    assert legend(figure) == ["a", "b"]
    colours = [[line.get_color() for line in solid(axes)] for axes in figure.axes]
    assert colours[0] == colours[1] == colours[2]
    assert len(set(colours[0])) == 2


def test_a_smoothed_curve_is_drawn_over_the_raw_one() -> None:
    log = run()
    axes = plot_training_metrics([log], ["loss"], smooth_window=8).axes[0]
    raw, smooth = axes.lines
    losses = log.column("loss")[log.has("loss")]
    assert raw.get_ydata() == pytest.approx(losses)
    assert smooth.get_ydata() == pytest.approx(smooth_values(losses, 8))
    assert raw.get_alpha() < 1
    assert raw.get_xdata().tolist() == smooth.get_xdata().tolist() == list(range(10, 1001, 10))


def test_a_window_of_one_draws_the_raw_curve_alone() -> None:
    [line] = plot_training_metrics([run()], ["loss"], smooth_window=1).axes[0].lines
    assert line.get_alpha() is None
    assert len(line.get_ydata()) == 100


def test_evaluations_and_learning_rates_are_not_smoothed() -> None:
    figure = plot_training_metrics([run()], ["eval_loss", "learning_rate"], smooth_window=9)
    assert [len(axes.lines) for axes in figure.axes] == [1, 1]
    assert figure.axes[0].lines[0].get_marker() == "o"


def test_one_run_shows_both_losses_and_the_learning_rate_on_an_axis_of_its_own() -> None:
    figure = plot_loss_curves([run()])
    left, right = figure.axes
    assert (left.get_ylabel(), right.get_ylabel(), left.get_xlabel()) == ("loss", "learning rate", "step")
    assert legend(figure) == ["training loss", "validation loss", "learning rate"]
    assert right.lines[0].get_linestyle() == "--"
    assert solid(left)[1].get_marker() == "o"


def test_a_learning_rate_that_some_records_lack_keeps_its_places() -> None:
    records = points("loss", [3.0, 2.0, 1.0])
    records[0]["learning_rate"], records[2]["learning_rate"] = 0.1, 0.3
    line = plot_loss_curves([log_of(records)]).axes[1].lines[0]
    assert (line.get_xdata().tolist(), line.get_ydata().tolist()) == ([1, 3], [0.1, 0.3])


def test_several_runs_stand_side_by_side_on_one_scale() -> None:
    figure = plot_loss_curves([run("a"), run("b", offset=3.0)])
    assert [heading(axes) for axes in figure.axes] == ["training loss", "validation loss"]
    assert figure.axes[0].get_ylim() == figure.axes[1].get_ylim()


def test_runs_without_evaluation_need_one_axes() -> None:
    logs = [log_of(points("loss", [3.0, 2.0]), name) for name in "ab"]
    assert [heading(axes) for axes in plot_loss_curves(logs).axes] == ["training loss"]


def test_gradient_norm_of_one_run_has_its_maximum_beside_it() -> None:
    records = [{"global_step": step, "grad_norm": 1.0, "max_grad_norm": 2.0} for step in range(1, 5)]
    assert legend(plot_grad_norm([log_of(records)])) == ["gradient norm", "largest gradient norm"]
    assert legend(plot_grad_norm([run()])) == ["gradient norm"]
    assert legend(plot_grad_norm([run("a"), run("b")])) == ["a", "b"]


@pytest.mark.parametrize(
    ("x_axis", "name", "last"),
    [
        ("step", "step", 1000),
        ("epoch", "epoch", 1),
        ("time", "time (minutes)", 49.5),
        ("tokens", "tokens", 100_000),
        ("flops", "floating-point operations", 5e11),
    ],
)
def test_every_x_axis(x_axis: str, name: str, last: float) -> None:
    axes = plot_loss_curves([run()], x_axis=x_axis).axes[0]
    assert axes.get_xlabel() == name
    assert solid(axes)[0].get_xdata()[-1] == pytest.approx(last)


def test_a_long_time_is_shown_in_hours_and_bounded_in_minutes() -> None:
    axes = plot_training_metrics([run(num=1000)], ["loss", "eval_loss"], x_axis="time", x_min=60, x_max=120).axes[0]
    assert axes.get_xlabel() == "time (hours)"
    assert axes.get_xlim() == (1, 2)
    assert solid(axes)[0].get_xdata()[0] == pytest.approx(1, abs=0.01)


def test_perplexity_is_exp_of_the_loss_and_smoothed_that_of_the_mean_loss() -> None:
    log = run()
    figure = plot_training_metrics([log], ["loss", "eval_loss", "grad_norm"], smooth_window=8, perplexity=True)
    training, validation, norm = figure.axes
    losses = log.column("loss")[log.has("loss")]
    assert training.lines[0].get_ydata() == pytest.approx(np.exp(losses))
    assert training.lines[1].get_ydata() == pytest.approx(np.exp(smooth_values(losses, 8)))
    assert (heading(training), heading(validation)) == ("training perplexity", "validation perplexity")
    assert norm.lines[0].get_ydata()[0] == 2.0


def test_a_perplexity_too_large_for_a_number_is_a_gap() -> None:
    axes = plot_training_metrics([log_of(points("loss", [1000.0, 1.0, 2.0]))], ["loss"], perplexity=True).axes[0]
    assert axes.lines[0].get_ydata() == pytest.approx([math.nan, math.e, math.e**2], nan_ok=True)
    assert note(axes) == "1 not finite (x)"


def spiky() -> Any:
    values = [2 + 0.01 * (index % 5) for index in range(200)]
    values[77] = 80.0
    return log_of(points("loss", values))


def test_outliers_leave_the_limits_alone_and_are_reported() -> None:
    shown = plot_training_metrics([spiky()], ["loss"]).axes[0]
    assert shown.get_ylim()[1] < 2.1
    assert note(shown) == "up to 80 outside"
    whole = plot_training_metrics([spiky()], ["loss"], ignore_outliers=False).axes[0]
    assert whole.get_ylim()[1] > 80
    assert note(whole) == ""


def test_metrics_that_are_no_loss_and_no_norm_are_shown_whole() -> None:
    values = [1.0] * 200
    values[5] = 50.0
    assert plot_training_metrics([log_of(points("speed", values))], ["speed"]).axes[0].get_ylim()[1] > 50


def test_bounds_that_are_given_win_over_outliers() -> None:
    axes = plot_training_metrics([spiky()], ["loss"], y_min=0, y_max=100, x_min=50, x_max=120).axes[0]
    assert (axes.get_ylim(), axes.get_xlim()) == ((0, 100), (50, 120))
    [top] = [plot_training_metrics([spiky()], ["loss"], y_max=3).axes[0].get_ylim()]
    assert 1.9 < top[0] < 2 < 3 == top[1]


@pytest.mark.parametrize(
    ("options", "limits"),
    [({"y_max": 1}, (0, 1)), ({"y_min": 200}, (200, 400)), ({"y_max": 1, "log_scale": True}, (0.1, 1))],
)
def test_bounds_that_are_given_win_also_beyond_the_data(options: dict[str, Any], limits: tuple[float, float]) -> None:
    assert plot_training_metrics([spiky()], ["loss"], **options).axes[0].get_ylim() == pytest.approx(limits)


def test_a_lone_spike_is_no_plateau_in_the_moving_mean() -> None:
    raw, smooth = plot_training_metrics([spiky()], ["loss"], smooth_window=20).axes[0].lines
    assert (raw.get_ydata().max(), smooth.get_ydata().max()) == (80.0, pytest.approx(2.02, abs=0.01))
    smooth = plot_training_metrics([spiky()], ["loss"], smooth_window=20, ignore_outliers=False).axes[0].lines[1]
    assert smooth.get_ydata().max() > 5


@pytest.mark.parametrize(
    ("bounds", "limits"),
    [({"x_min": 600}, (600, 1008)), ({"x_max": 500}, (0.2, 500)), ({"x_min": -10}, (-10, 1020.2))],
)
def test_one_bound_of_the_x_axis_leaves_the_other_at_the_end_of_the_data(
    bounds: dict[str, float], limits: tuple[float, float]
) -> None:
    for axes in plot_training_metrics([run()], ["loss", "eval_loss"], **bounds).axes:
        assert axes.get_xlim() == pytest.approx(limits)


def test_an_axes_whose_points_all_lie_beyond_the_bounds_says_so() -> None:
    records = [*points("loss", [3.0] * 20), {"global_step": 10, "eval_loss": 3.0}]
    training, validation = plot_training_metrics([log_of(records)], ["loss", "eval_loss"], x_min=15).axes
    assert training.get_xlim() == validation.get_xlim() == pytest.approx((15, 20.1))
    assert [text.get_text() for text in validation.texts] == ["no eval_loss here"]


def test_bounds_without_a_point_between_them_are_answered_with_the_range_of_the_data() -> None:
    for options in ({"x_min": 1001}, {"x_max": 9}, {"x_min": 11, "x_max": 12}):
        with pytest.raises(ConfigError, match=r"there are no points with .*the x axis \(step\) ranges from 10 to 1000"):
            plot_loss_curves([run()], **options)  # type: ignore[arg-type]


def test_gaps_beyond_the_bounds_are_neither_marked_nor_counted() -> None:
    values = [1.0, math.nan, 2.0, 3.0, 2.0]
    axes = plot_training_metrics([log_of(points("loss", values))], ["loss"], x_min=2.5).axes[0]
    assert [line.get_marker() for line in axes.lines] == ["o"]
    assert note(axes) == ""


def test_a_metric_is_called_by_its_own_name() -> None:
    [axes] = plot_training_metrics([log_of(points("cost_$", [1.0, 2.0]))], ["cost_$"]).axes
    assert heading(axes) == r"cost_\$"


def test_a_log_of_one_record_has_whole_steps_and_points_that_can_be_seen() -> None:
    left, right = plot_loss_curves([log_of(points("loss", [2.0], learning_rate=0.1))]).axes
    assert ticks(left.xaxis) == ["1"]
    assert right.lines[0].get_marker() == "o"


def test_letters_that_no_font_has_are_reported_once_and_not_by_a_warning_each(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onstep.analysis.plots.output.FALLBACKS", ("STIXGeneral", "No Such Font"))
    logs = [run("\u8bad\u7ec3"), run("\u2a6f b")]
    figure = plot_training_metrics(logs, ["loss"], output_path=tmp_path / "loss.png")
    [said] = [record.getMessage() for record in caplog.records]
    assert "no installed font has the characters \u7ec3 \u8bad," in said
    families = [text.get_fontfamily() for text in figure.legends[0].get_texts()]
    assert families == [["sans-serif", "STIXGeneral"]] * 2


def test_y_limits_fit_the_part_that_shows() -> None:
    axes = plot_training_metrics([spiky()], ["loss"], x_min=150, ignore_outliers=False).axes[0]
    assert axes.get_ylim()[1] < 2.1


def test_log_axes_show_outliers_and_short_numbers() -> None:
    axes = plot_training_metrics([spiky()], ["loss"], log_scale=True).axes[0]
    assert axes.get_yscale() == "log"
    assert axes.get_ylim()[1] > 80
    assert ticks(axes.yaxis) == ["2", "5", "10", "20", "50"]


def test_a_log_axis_without_positive_values_stays_linear() -> None:
    axes = plot_training_metrics([log_of(points("loss", [-1.0, 0.0]))], ["loss"], log_scale=True).axes[0]
    assert axes.get_yscale() == "linear"


def test_gaps_are_marked_and_points_between_them_are_dots() -> None:
    values = [1.0, math.nan, 2.0, math.inf, *([1.5] * 60)]
    axes = plot_training_metrics([log_of(points("loss", values))], ["loss"], smooth_window=1).axes[0]
    line, dots, crosses = axes.lines
    assert np.isnan(line.get_ydata()).sum() == 2
    assert dots.get_xdata().tolist() == [1, 3]
    assert (crosses.get_xdata().tolist(), crosses.get_marker()) == ([2, 4], "x")
    assert note(axes) == "2 not finite (x)"


def test_a_log_of_many_records_is_drawn_with_few_points_and_all_spikes() -> None:
    values = np.random.default_rng(0).normal(2, 0.1, 200_000)
    values[123_456] = 30.0
    raw, smooth = plot_training_metrics([log_of(points("loss", values.tolist()))], ["loss"]).axes[0].lines
    assert len(raw.get_xdata()) < 10_001
    assert len(smooth.get_xdata()) < 10_001
    assert raw.get_ydata().max() == 30.0


def test_runs_of_one_name_are_told_apart_and_long_names_are_shortened() -> None:
    assert len(set(legend(plot_loss_curves([run("same"), run("same")])))) == 2
    figure = plot_loss_curves([run("x" * 100 + "-seed-1"), run("_$hidden$ {")])
    first, second = legend(figure)
    assert len(first) == 60
    assert first.endswith("-seed-1")
    assert second == r" _\$hidden\$ {"
    figure.canvas.draw()


def test_many_runs_are_all_told_apart() -> None:
    figure = plot_training_metrics([run(f"run {index}") for index in range(25)], ["loss"])
    looks = {(line.get_color(), line.get_linestyle()) for line in figure.legends[0].get_lines()}
    assert len(looks) == 25


def test_nothing_of_a_figure_is_cut_off_or_overlaps() -> None:
    logs = [run(f"{'a very long name of a run ' * 3}{index}", offset=index) for index in range(6)]
    figure = plot_training_metrics(logs, ["loss", "eval_loss", "learning_rate", "grad_norm"], title="A title")
    figure.canvas.draw()
    boxes = [axes.get_tightbbox() for axes in figure.axes]
    places = [*boxes, figure.legends[0].get_window_extent()]
    assert all(box.x0 >= 0 and box.x1 <= figure.bbox.x1 and box.y0 >= 0 and box.y1 <= figure.bbox.y1 for box in places)
    assert not any(box.overlaps(other) for index, box in enumerate(places) for other in places[:index])


def test_pictures_are_written_in_the_format_of_their_suffix(tmp_path: Path) -> None:
    for suffix, beginning in ((".png", b"\x89PNG"), (".pdf", b"%PDF"), (".svg", b"<?xml")):
        path = tmp_path / "new" / f"loss{suffix}"
        plot_loss_curves([run()], output_path=path, figsize=(4, 3))
        assert path.read_bytes().startswith(beginning)
    with pytest.raises(ConfigError, match=r"must end in \.png, \.svg or \.pdf"):
        plot_loss_curves([run()], output_path=tmp_path / "loss")


def test_figures_leave_pyplot_alone() -> None:
    plot_loss_curves([run()])
    pyplot = sys.modules.get("matplotlib.pyplot")
    assert pyplot is None or pyplot.get_fignums() == []


def test_showing_without_a_screen_says_where_the_picture_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    plot_loss_curves([run()], output_path=tmp_path / "loss.png", show=True)
    assert "loss.png" in caplog.text


def test_a_metric_that_only_one_run_has_leaves_the_other_out() -> None:
    axes = plot_training_metrics([run("a"), log_of(points("loss", [1.0]), "b")], ["eval_loss", "loss"]).axes[0]
    assert len(axes.lines) == 1


def test_a_metric_that_no_run_has_is_left_out_unless_it_was_named() -> None:
    logs = [log_of(points("loss", [1.0, 2.0]), name) for name in "ab"]
    assert [heading(axes) for axes in plot_training_metrics(logs).axes] == ["training loss"]
    with pytest.raises(DataError, match=r"none of the logs has 'los'. Did you mean 'loss'\? Available: loss"):
        plot_training_metrics(logs, ["loss", "los"])


@pytest.mark.parametrize("plot", [plot_training_metrics, plot_loss_curves, plot_grad_norm])
def test_logs_without_anything_to_draw_are_an_error_that_says_so(plot: Any) -> None:
    with pytest.raises(DataError, match="no other metric yet"):
        plot([log_of([])])
    with pytest.raises(DataError, match="Available: other"):
        plot([log_of(points("other", [1.0]))])
    with pytest.raises(ConfigError, match="no log to plot"):
        plot([])


def test_a_metric_that_does_not_exist_is_answered_with_a_near_one() -> None:
    with pytest.raises(DataError, match=r"Did you mean 'grad_norm'\? Available: loss, grad_norm"):
        plot_training_metrics([run()], ["gradnorm"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"x_axis": "days"}, "Invalid x_axis: 'days'"),
        ({"smooth_window": 0}, "smooth_window must be at least 1"),
        ({"x_min": 2, "x_max": 1}, "x_min must be below x_max"),
        ({"y_min": math.nan}, "must be finite"),
        ({"log_scale": True, "y_min": 0}, "y_min must be > 0"),
        ({"log_scale": True, "y_max": -1}, "y_max must be > 0"),
        ({"figsize": (0, 3)}, "figsize must be"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plot_loss_curves([run()], **options)


@pytest.mark.parametrize(
    ("values", "labels"),
    [
        ([0, 500, 1000], ["0", "500", "1,000"]),
        ([0, 500_000, 1_000_000], ["0", "0.5M", "1.0M"]),
        ([0, 0.25, 0.5], ["0.00", "0.25", "0.50"]),
        ([0, 1e-4, 2e-4], ["0", "1e-4", "2e-4"]),
        ([0, 2.5e9, 5e9], ["0", "2.5G", "5.0G"]),
        ([], []),
    ],
)
def test_tick_labels_are_short(values: list[float], labels: list[str]) -> None:
    assert ShortNumbers().format_ticks(values) == labels


def test_tick_labels_of_neighbours_differ() -> None:
    for values in ([1.25, 1.5, 1.75], [2_000_000, 2_250_000], [0.001, 0.0015, 0.002], [-1, -0.5, 0]):
        labels = ShortNumbers().format_ticks(values)
        assert all(one != other for one, other in pairwise(labels)), labels
    assert LogNumbers().format_ticks([1e-5, 0.1, 20, 1e6]) == ["1e-5", "0.1", "20", "1e6"]


def test_a_logarithmic_x_axis_shows_the_first_steps() -> None:
    [axes] = plot_training_metrics(run(), ["loss"], log_x=True).axes
    low, high = axes.get_xlim()
    assert axes.get_xscale() == "log"
    assert 5 < low < 10
    assert 1000 < high < 1500
    assert {text.get_text() for text in axes.get_xticklabels()} >= {"10", "100", "1000"}


def test_a_point_at_zero_is_left_out_of_a_logarithmic_x_axis() -> None:
    [axes] = plot_training_metrics(run(), ["loss"], x_axis="time", log_x=True, smooth_window=1).axes
    assert axes.get_xscale() == "log"
    assert axes.lines[0].get_xdata()[0] == 0.5


def test_a_logarithmic_x_axis_of_a_long_run_has_its_first_steps_point_by_point() -> None:
    values = (5 / np.arange(1, 100_001)).tolist()
    [axes] = plot_training_metrics(log_of(points("loss", values)), ["loss"], log_x=True, smooth_window=1).axes
    assert axes.lines[0].get_xdata()[:50].tolist() == list(range(1, 51))
    assert len(axes.lines[0].get_xdata()) < 10_000


@pytest.mark.parametrize("bounds", [{"x_min": 0.0}, {"x_max": -3.0}])
def test_bounds_that_a_logarithmic_x_axis_cannot_have_are_refused(bounds: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="must be > 0 on a logarithmic axis"):
        plot_loss_curves(run(), log_x=True, **bounds)


def test_two_runs_with_the_same_first_loss_start_at_the_same_place() -> None:
    logs = [log_of(points("loss", (5.55 * np.exp(-np.arange(300) / scale)).tolist())) for scale in (8, 60)]
    [axes] = plot_training_metrics(logs, ["loss"]).axes
    smooth = [line for line in axes.lines if line.get_linewidth() > 1]
    assert [float(line.get_ydata()[0]) for line in smooth] == [5.55, 5.55]
