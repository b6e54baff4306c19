"""Reads, summarizes, plots and compares the metrics logs of runs. This package does not import torch.

`logs/` reads, `plots/` draws, `reports/` summarizes and compares. Names are loaded on first use, so a summary does not
import a plotting library.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from onstep.lazy_names import lazy_names

if TYPE_CHECKING:
    from onstep.analysis.logs.export_tables import export_csv, export_parquet
    from onstep.analysis.logs.files import find_diagnostic_logs, find_log_files
    from onstep.analysis.logs.log_tail import LogTail
    from onstep.analysis.logs.training_log import TrainingLog, distinct_labels
    from onstep.analysis.plots.heatmap import plot_parameter_heatmap
    from onstep.analysis.plots.plots import plot_grad_norm, plot_loss, plot_loss_curves, plot_training_metrics
    from onstep.analysis.plots.smoothing import smooth_values
    from onstep.analysis.reports.comparison import compare_runs, format_comparison
    from onstep.analysis.reports.report import write_report
    from onstep.analysis.reports.summary import compute_summary_statistics, get_perplexity
    from onstep.analysis.reports.summary_formats import (
        format_summary_json,
        format_summary_markdown,
        format_summary_oneline,
        format_summary_text,
    )

__all__ = [
    "LogTail",
    "TrainingLog",
    "compare_runs",
    "compute_summary_statistics",
    "distinct_labels",
    "export_csv",
    "export_parquet",
    "find_diagnostic_logs",
    "find_log_files",
    "format_comparison",
    "format_summary_json",
    "format_summary_markdown",
    "format_summary_oneline",
    "format_summary_text",
    "get_perplexity",
    "plot_grad_norm",
    "plot_loss",
    "plot_loss_curves",
    "plot_parameter_heatmap",
    "plot_training_metrics",
    "smooth_values",
    "write_report",
]

__getattr__, __dir__ = lazy_names(__name__)
