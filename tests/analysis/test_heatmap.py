"""Heat maps of parameter norms: the table below the picture, its labels and its colours."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.colors import LogNorm

from onstep.analysis import plot_parameter_heatmap
from onstep.analysis.plots.heatmap import read_table, short_label
from onstep.errors import ConfigError, DataError
from onstep.record import MetricsLog

NORMS = {"embed.weight": 4.0, "layers.0.q.weight": 1.0, "layers.1.q.weight": 2.0}


def written(directory: Path, records: list[dict[str, Any]], name: str = "parameter_norms.json") -> Path:
    with MetricsLog.open(directory / name) as metrics_log:
        for record in records:
            metrics_log.append(record)
    return directory / name


def records(num: int = 3, key: str = "norms", **more: Any) -> list[dict[str, Any]]:
    """`num` evaluations, 100 steps apart; each norm grows by its first value."""
    return [
        {"global_step": 100 * index, key: {name: value * index for name, value in NORMS.items()}, **more}
        for index in range(1, num + 1)
    ]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return written(tmp_path / "my-run", records())


def shown(figure: Any) -> np.ndarray:
    return np.ma.filled(figure.axes[0].collections[0].get_array(), math.nan)


def rows(figure: Any) -> list[str]:
    return [label.get_text() for label in figure.axes[0].get_yticklabels()]


def columns(figure: Any) -> list[str]:
    return [label.get_text() for label in figure.axes[0].get_xticklabels()]


def test_rows_are_parameters_and_columns_are_steps(path: Path) -> None:
    figure = plot_parameter_heatmap(path)
    assert rows(figure) == list(NORMS)
    assert columns(figure) == ["100", "200", "300"]
    assert shown(figure).tolist() == [[4, 8, 12], [1, 2, 3], [2, 4, 6]]
    assert figure.axes[1].get_ylabel() == "parameter norm"
    assert figure.axes[0].get_title(loc="left") == "Parameter norm, my-run"


@pytest.mark.parametrize(
    ("key", "name"), [("norms", "norm"), ("spectral_norms", "spectral_norm"), ("grad_norms", "grad_norm")]
)
def test_the_metric_is_found_by_what_the_file_has(tmp_path: Path, key: str, name: str) -> None:
    assert read_table(written(tmp_path, records(key=key))).metric == name


def test_of_two_metrics_the_first_is_taken_unless_the_other_is_asked_for(tmp_path: Path) -> None:
    path = written(tmp_path, records(spectral_norms={"layers.0.q.weight": 0.5}))
    assert read_table(path).metric == "norm"
    assert read_table(path, "spectral_norm").values.tolist() == [[0.5, 0.5, 0.5]]


def test_a_filter_keeps_the_parameters_in_whose_names_it_is_found(path: Path) -> None:
    assert rows(plot_parameter_heatmap(path, filter_pattern=r"layers\.\d")) == list(NORMS)[1:]


def test_a_stride_takes_every_so_many_records(path: Path) -> None:
    assert read_table(path, step_stride=2).steps.tolist() == [100, 300]


def test_what_is_missing_or_not_finite_is_grey_and_reported(tmp_path: Path) -> None:
    given = records()
    del given[1]["norms"]["embed.weight"]
    given[2]["norms"]["late.weight"] = math.inf
    figure = plot_parameter_heatmap(written(tmp_path, given))
    assert rows(figure)[-1] == "late.weight"
    assert np.isnan(shown(figure)).sum() == 4
    assert figure.axes[0].get_title(loc="right") == "gray: no value (4)"


def test_the_file_of_a_killed_run_can_be_drawn(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-30])
    assert columns(plot_parameter_heatmap(path)) == ["100", "200"]


def test_logarithmic_colours_begin_at_the_least_positive_value(tmp_path: Path) -> None:
    given = records()
    given[0]["norms"]["embed.weight"] = 0.0
    norm = plot_parameter_heatmap(written(tmp_path, given), log_scale=True).axes[0].collections[0].norm
    assert isinstance(norm, LogNorm)
    assert (norm.vmin, norm.vmax) == (1, 12)


def test_colours_can_be_bounded(path: Path) -> None:
    norm = plot_parameter_heatmap(path, vmin=2, vmax=9).axes[0].collections[0].norm
    assert (norm.vmin, norm.vmax) == (2, 9)


def test_long_names_keep_their_layer_and_their_end() -> None:
    assert short_label("a" * 60) == "a" * 60
    assert short_label("a" * 30 + "b" * 31) == "a" * 19 + "..." + "a" * 7 + "b" * 31
    names = [f"model.decoder.layers.{layer}.self_attention.core_attention.linear_qkv.weight" for layer in (1, 11)]
    first, second = map(short_label, names)
    assert first.startswith("model.decoder.layers.1...")
    assert second.startswith("model.decoder.layers.11...")
    assert second.endswith(".linear_qkv.weight")
    deep = f"{'wrapper.' * 8}layers.7.{'block.' * 8}linear.weight"
    assert "layers.7..." in short_label(deep)
    assert {len(short_label(name)) for name in (*names, deep)} == {60}


def test_values_beyond_the_colours_are_shown_by_the_bar(path: Path) -> None:
    bars = [plot_parameter_heatmap(path, **bounds).axes[0].collections[0].colorbar for bounds in ({}, {"vmax": 9})]
    assert [bar.extend for bar in bars] == ["neither", "max"]


def many(directory: Path, num_parameters: int, num_steps: int) -> Path:
    names = [f"layers.{index}.weight" for index in range(num_parameters)]
    values = [{"global_step": step, "norms": dict.fromkeys(names, 1.0 + step)} for step in range(num_steps)]
    directory.mkdir(exist_ok=True)
    (directory / "parameter_norms.json").write_text(json.dumps(values))
    return directory / "parameter_norms.json"


@pytest.mark.parametrize(
    ("num_parameters", "num_steps", "size"), [(2, 2, (10, 6)), (100, 100, (17, 27)), (400, 300, (40, 60))]
)
def test_the_figure_is_as_large_as_its_rows_and_columns(
    tmp_path: Path, num_parameters: int, num_steps: int, size: tuple[float, float]
) -> None:
    figure = plot_parameter_heatmap(many(tmp_path, num_parameters, num_steps))
    assert tuple(figure.get_size_inches()) == pytest.approx(size)
    assert len(rows(figure)) == num_parameters
    assert len(columns(figure)) <= 30


def test_a_hundred_labels_do_not_overlap(tmp_path: Path) -> None:
    figure = plot_parameter_heatmap(many(tmp_path, 100, 5))
    figure.canvas.draw()
    boxes = [label.get_window_extent() for label in figure.axes[0].get_yticklabels()]
    assert all(after.y1 <= before.y0 for before, after in pairwise(boxes))
    assert boxes[0].x0 >= 0


def test_pictures_are_written(path: Path, tmp_path: Path) -> None:
    plot_parameter_heatmap(path, output_path=tmp_path / "deep" / "map.png", figsize=(4, 3))
    assert (tmp_path / "deep" / "map.png").read_bytes().startswith(b"\x89PNG")


def test_a_huge_map_has_fewer_dots_an_inch(tmp_path: Path) -> None:
    path = tmp_path / "map.png"
    plot_parameter_heatmap(many(tmp_path / "run", 2, 2), output_path=path, figsize=(40, 60))
    width, height = (int.from_bytes(path.read_bytes()[at : at + 4], "big") for at in (16, 20))
    assert 30e6 < width * height < 45e6


def test_files_that_cannot_be_drawn_say_why(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        plot_parameter_heatmap(tmp_path / "none.json")
    with pytest.raises(DataError, match="no records yet"):
        plot_parameter_heatmap(written(tmp_path, [], "empty.json"))
    with pytest.raises(DataError, match=r"none of norms, spectral_norms, grad_norms.*global_step, loss"):
        plot_parameter_heatmap(written(tmp_path, [{"global_step": 1, "loss": 2.0}], "log.json"))


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"metric": "size"}, ConfigError, "metric must be one of norm, spectral_norm, grad_norm"),
        ({"metric": "grad_norm"}, DataError, "no 'grad_norms'; choose 'norm'"),
        ({"filter_pattern": "["}, ConfigError, "regular expression"),
        ({"filter_pattern": "nothing"}, DataError, "it has 3: embed.weight"),
        ({"step_stride": 0}, ConfigError, "step_stride must be at least 1"),
        ({"vmin": 2, "vmax": 1}, ConfigError, "v_min must be below v_max"),
        ({"vmin": 50}, ConfigError, "vmin=50 is above all values, which are 1 to 12"),
        ({"vmax": 0.5}, ConfigError, "vmax=0.5 is below all values"),
        ({"log_scale": True, "vmin": 0}, ConfigError, "vmin must be > 0"),
    ],
)
def test_options_that_cannot_be_are_refused(
    path: Path, options: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        plot_parameter_heatmap(path, **options)
